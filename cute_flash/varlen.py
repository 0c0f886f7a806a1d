"""attention_varlen: sequences of any lengths, packed one after another. The path of a call is api.attention's."""

from typing import Any

import torch
from torch.autograd import forward_ad

from .runtime import dispatch, ops, packed, packed_ops, report, request, substitution
from .runtime.dispatch import Decision
from .runtime.launch import Call
from .runtime.packed import Lengths
from .runtime.request import SCALE_MAX, SCALE_MIN, Options
from .spec import settings
from .spec.device import Device

_warm: dict[tuple[Any, ...], Call] = {}

_is_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_modes = request.modes
_torch_deterministic = torch.are_deterministic_algorithms_enabled
_float32 = torch.float32

LENGTHS = Lengths._fields


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Exact attention of packed sequences: sequence i's queries see sequence i's keys and no other's.

    The lengths stay on the device: nothing waits for it, and a CUDA graph may be replayed with other lengths (but
    backend="reference" reads them on the host).

    Args:
        q: (total_q, heads_q, head_dim): all sequences' rows, one sequence after another.
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v). Dtypes, devices, head counts, head dims and strides as attention takes them.
        cu_seqlens_q: (sequences + 1,) int32 on q's device: sequence i's queries are rows cu_seqlens_q[i] to
            cu_seqlens_q[i + 1] of q. Starts at 0, never falls, ends at total_q or before: rows after the last sequence
            get output 0, LSE -inf and zero gradients. Sequences may be empty. Values that break the rule are refused
            where they are on the CPU; on a GPU they give wrong numbers, but nothing outside the tensors is touched.
        cu_seqlens_k: likewise, of k and v.
        max_seqlen_q, max_seqlen_k: the longest sequence's rows and keys, where known: kernels for short sequences are
            chosen by it. Never needed, and results are right with any value.
        causal, window: as attention takes them, of each sequence's own lengths: row i of a sequence sees keys
            j <= i + seqlen_k - seqlen_q.
        scale, softcap, deterministic, backend: as attention takes them.
        return_lse: also return the natural-log LSE, float32 (float64 for float64), (heads_q, total_q).

    Returns:
        out (total_q, heads_q, head_dim_v), contiguous, in q's dtype; or (out, lse) with return_lse=True.
        Both are differentiable in q, k and v, once.

    Raises:
        As attention.
    """
    key, call = None, None
    if not unknown:
        try:
            kind, bounds = (causal, ()) if window is softcap is None else request.bounds(causal, window, softcap)
            total_q, heads_q, head_dim = q.shape
            total_k, heads_k, head_dim_k = k.shape
            total_v, heads_v, head_dim_v = v.shape
            dtype = q.dtype
            lazy = q.is_neg() or k.is_neg() or v.is_neg()
            key = (
                dtype, q.device, type(q), type(k), type(v), heads_q, heads_k, head_dim, head_dim_v, kind,
                packed.kind((max_seqlen_q, max_seqlen_k), (total_q, total_k), cu_seqlens_q.shape[0]),
                return_lse, deterministic or _torch_deterministic(),
                _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
                backend, settings.generation, dtype is not _float32 or request.float32_kind(q.device),
            )  # fmt: skip
            call = _warm.get(key) if packed.fit(q, cu_seqlens_q, cu_seqlens_k) else None
        except (AttributeError, TypeError, ValueError, RuntimeError):  # RuntimeError: of a tensor in place of a number
            key = None  # the cold path says what is wrong
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if (
        call is not None
        and total_k == total_v and heads_k == heads_v and head_dim == head_dim_k and total_q and total_k and not lazy
        and forward_ad._current_level < 0 and not _functorch_active() and not _modes()
        and (scale is None or (type(scale) is float and SCALE_MIN <= scale <= SCALE_MAX))
        and (causal is False or causal is True) and (return_lse is False or return_lse is True)
        and (deterministic is False or deterministic is True)
        and (max_seqlen_q is None or (type(max_seqlen_q) is int and max_seqlen_q >= 0))
        and (max_seqlen_k is None or (type(max_seqlen_k) is int and max_seqlen_k >= 0))
    ):  # fmt: skip
        try:
            out, lse = packed.run(call, (q, k, v), lengths, (scale or call.scale, *bounds))
            return (out, lse) if return_lse else out
        except Exception:  # of k and v only shapes were looked at
            if not request.is_special(q, k, v):
                request.check_tensors(q, k, v, dims=3)
                raise
    options = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "return_lse": return_lse,
        "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    return _cold((q, k, v), lengths, _check_options(options, unknown), key)


def _check_options(arguments: dict[str, Any], unknown: dict[str, Any]) -> Options:
    return request.check_options(arguments, unknown, settings.BACKEND_NAMES, "attention_varlen")


def _cold(qkv: tuple[Any, Any, Any], lengths: Lengths, options: Options, key: tuple[Any, ...] | None) -> Any:
    """The first call of a kind, and every call that is out of the ordinary: checked in full, then as the warm path."""
    if request.is_special(*qkv):
        if request.is_recorded(*qkv):
            return packed_ops.attention_varlen(*qkv, lengths, options)
        q, k, v = request.autocast(*qkv)
        return attention_varlen(q, k, v, **lengths._asdict(), **vars(options))
    request.check_tensors(*qkv, dims=3)
    packed.check_lengths(qkv[0], lengths)
    q, k, v = (tensor.resolve_neg() for tensor in qkv)
    if key is None:  # an option was spelled in another way (attn_mask=None): once more, in the plain spelling
        return attention_varlen(q, k, v, **lengths._asdict(), **vars(options))
    for sentence in request.scale_copy(options.scale):
        report.say("dispatch", sentence)
    q, scale = request.positive_scale(q, options.scale)
    batch_of_one = packed.as_batch_of_one(q, k, v)
    if request.is_empty(q, k):
        dispatch.choose(packed.describe(batch_of_one, lengths.kind(q, k), options), options.backend)
        out, lse = packed.empty((q, k, v), lengths)
        return (out, lse) if options.return_lse else out
    call = _warm.get(key)
    if call is None:
        call = ops.remember(_warm, key, packed.prepare(batch_of_one, lengths.kind(q, k), options))
    numbers = (scale, *request.bounds(options.causal, options.window, options.softcap)[1])
    out, lse = packed.run(call, (q, k, v), lengths, numbers)
    return (out, lse) if options.return_lse else out


_OPTIONS = frozenset(attention_varlen.__kwdefaults__ or ()).difference(LENGTHS)


def _checked(given: dict[str, Any]) -> tuple[Lengths, Options]:
    """Of the keyword arguments that were given."""
    missing = [name for name in LENGTHS[:2] if name not in given]
    if missing:
        raise TypeError(f"packed sequences need {missing[0]}=")
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    unknown = {name: value for name, value in given.items() if name not in _OPTIONS and name not in LENGTHS}
    lengths = Lengths(**{name: given[name] for name in LENGTHS if name in given})
    return lengths, _check_options(options, unknown)


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: Device | None, given: dict[str, Any]
) -> Decision:
    """What attention_varlen would run with the keyword arguments `given`; see api.explain."""
    lengths, options = _checked(given)
    request.check_tensors(q, k, v, values=False, dims=3)
    packed.check_lengths(q, lengths)
    return packed.decide(q, k, v, lengths.kind(q, k), options, device)


def _in_graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    """What torch.compile traces in place of attention_varlen: the operator. Checked by the same rules."""
    lengths, options = _checked(given)
    return packed_ops.attention_varlen(q, k, v, lengths, options)


substitution.substitute(attention_varlen, _in_graph)
