"""Packed sequences: the checks, the Problem and the launch of attention_varlen.

In here they are a batch of one: q is (1, total_q, heads_q, head_dim), and the kernel finds the sequences in it from the
two operands before its numbers. What dense calls use for outputs, padding, alignment and gradients serves as it is.
"""

import numbers
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..spec.device import Device
from ..spec.lengths import check_starts
from ..spec.problem import FEW, PACKED, SHORT_KEYS, Problem
from . import autograd, dispatch, launch, request
from .dispatch import Decision
from .launch import Backward, Call, Numbers
from .request import Options

Outputs = tuple[torch.Tensor, torch.Tensor | None]
Kind = tuple[int, int, bool]  # Problem.few_rows, few_keys and short
_int32 = torch.int32


class Lengths(NamedTuple):
    """What says where sequences start, and how long they may be."""

    cu_seqlens_q: torch.Tensor  # (sequences + 1,) int32
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def kind(self, q: torch.Tensor, k: torch.Tensor) -> Kind:
        starts = self.cu_seqlens_q.shape[0]
        return kind((self.max_seqlen_q, self.max_seqlen_k), (q.shape[0], k.shape[0]), starts)


def _few(longest: int | None, total: int, starts: int) -> int:
    if longest is None:
        return FEW[-1] if total <= FEW[-1] * (starts - 1) else 0
    return 0 if longest > FEW[-1] else next(few for few in FEW if longest <= few)


def kind(longest: tuple[int | None, int | None], totals: tuple[int, int], starts: int) -> Kind:
    """All that a kernel depends on of the hints: the longest of q's and of k's. Without one, sequences count as short
    where they are in the mean; totals: rows of q and of k, starts: of cu_seqlens."""
    few_q, few_k = _few(longest[0], totals[0], starts), _few(longest[1], totals[1], starts)
    return few_q, few_k, longest[1] is not None and longest[1] <= SHORT_KEYS


def fit(q: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> bool:
    """Would check_lengths pass them? In a third of its time."""
    (starts,), device = cu_seqlens_q.shape, q.device
    return (
        cu_seqlens_q.dtype is cu_seqlens_k.dtype is _int32
        and (starts,) == cu_seqlens_k.shape
        and starts > 0
        and cu_seqlens_q.is_contiguous()
        and cu_seqlens_k.is_contiguous()
        and cu_seqlens_q.device == cu_seqlens_k.device == device
        and type(cu_seqlens_q) is type(cu_seqlens_k) is torch.Tensor
    )


def _check_hint(name: str, value: Any) -> None:
    if value is None or isinstance(value, torch.SymInt):
        return
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer or None, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name}={value}: a length is >= 0, and None means unknown")


def check_lengths(q: torch.Tensor, lengths: Lengths) -> None:
    """A TypeError or ValueError that names the value and the rule. The values on the device are not looked at."""
    for name, tensor in (("cu_seqlens_q", lengths.cu_seqlens_q), ("cu_seqlens_k", lengths.cu_seqlens_k)):
        request.check_int32(name, tensor, "(sequences + 1,)")
        if tensor.dim() != 1 or tensor.shape[0] == 0:
            raise ValueError(f"{name} must be 1-D (sequences + 1,), got shape {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got stride {tensor.stride(0)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    count_q, count_k = (tensor.shape[0] - 1 for tensor in lengths[:2])
    if count_q != count_k:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one length, got {count_q} and {count_k} sequences")
    _check_hint("max_seqlen_q", lengths.max_seqlen_q)
    _check_hint("max_seqlen_k", lengths.max_seqlen_k)


def describe(
    batch_of_one: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    of: Kind,
    options: Options,
    device: Device | None = None,
) -> Problem:
    """The forward problem; `of` is the kind of the Lengths."""
    few_rows, few_keys, short = of
    problem = request.describe(*batch_of_one, options, device)
    return replace(problem, form=PACKED, few_rows=few_rows, few_keys=few_keys, short=short, small=False)


def as_batch_of_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)


def decide(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Kind, options: Options, device: Device | None
) -> Decision:
    """As launch.decide."""
    problem = describe(as_batch_of_one(q, k, v), of, options, device)
    decision = dispatch.choose(problem, options.backend)
    backward = None
    if request.needs_grad(q, k, v):
        backward = dispatch.choose(request.backward_of(problem, options.return_lse), options.backend)
    return replace(decision, copies=request.scale_copy(options.scale) + decision.copies, backward=backward)


def prepare(batch_of_one: tuple[torch.Tensor, torch.Tensor, torch.Tensor], of: Kind, options: Options) -> Call:
    """The Call of checked, non-empty inputs."""
    q = batch_of_one[0]
    problem = describe(batch_of_one, of, options)
    return launch.prepare_problem(problem, options, (q.device, q.dtype), request.needs_grad(*batch_of_one))


def prepare_backward(
    batch_of_one: tuple[torch.Tensor, torch.Tensor, torch.Tensor], of: Kind, options: Options
) -> Backward:
    """As launch.prepare_backward."""
    q = batch_of_one[0]
    problem = request.backward_of(describe(batch_of_one, of, options), options.return_lse)
    return launch.prepare_backward_problem(problem, options, (q.device, q.dtype))


def run(
    call: Call, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], lengths: Lengths, numbers: Numbers
) -> Outputs:
    """(out (total_q, heads_q, head_dim_v), lse (heads_q, total_q) or None), differentiable where the call is."""
    q, k, v = as_batch_of_one(*qkv)
    cu_seqlens = lengths[:2]
    if call.grad:
        out, lse = autograd.Packed.apply(q, k, v, *cu_seqlens, (call, numbers))
    else:
        out, lse = call.forward(q, k, v, cu_seqlens + numbers, 1, q.shape[1], k.shape[1])
    return out.squeeze(0), lse.squeeze(0) if call.return_lse else None


def empty(qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], lengths: Lengths) -> Outputs:
    """Where there is no query, or no key in any sequence. No kernel looks at the lengths: done here, on the host."""
    for name, starts, rows in zip(Lengths._fields, lengths[:2], qkv[:2], strict=False):
        if starts.device.type == "cpu":
            check_starts(name, starts.tolist(), rows.shape[0])
    out, lse = autograd.Empty.apply(*as_batch_of_one(*qkv))
    return out.squeeze(0), lse.squeeze(0)
