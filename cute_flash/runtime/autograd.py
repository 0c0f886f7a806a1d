"""Gradients: one autograd Function around a Call. The backward re-enters the dispatcher with a backward Problem."""

from collections.abc import Sequence
from typing import Any

import torch

from . import request
from .launch import Call, Numbers

Bound = tuple[Call, Numbers, int, int, int]  # call, numbers, batch, seqlen_q, seqlen_k
ONCE = "attention: double backward is not implemented"


class Once(torch.autograd.Function):
    """Gradients as functions of what they came from, so that differentiating them again meets this node, and raises.

    (count, *gradients, *sources) -> the gradients. Tied to the sources: a node hanging loose would not be visited where
    another path leads to q, and the missing term would go unnoticed.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise RuntimeError(ONCE)


def _once(grads: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """For create_graph=True."""
    given = [grad for grad in grads if grad is not None]
    tied = Once.apply(len(given), *given, *(source for source in sources if source is not None))
    carriers: Any = iter(tied)
    return tuple(None if grad is None else next(carriers) for grad in grads)


def _zeros_like_expanded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((1, 1, 1, 1), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


class Attention(torch.autograd.Function):
    """(q, k, v, bound) -> out, or (out, lse) where the call returns it."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: Bound) -> Any:
        call, numbers, batch, seqlen_q, seqlen_k = ctx.bound = bound
        out, lse = call.forward(q, k, v, numbers, batch, seqlen_q, seqlen_k)
        ctx.save_for_backward(q, k, v, out, lse)
        if not call.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        call, numbers, *_ = ctx.bound
        return (*_gradients(call, ctx.saved_tensors, numbers, (dout, dlse), ctx.needs_input_grad[:3]), None)


class Packed(torch.autograd.Function):
    """(q, k, v, cu_seqlens_q, cu_seqlens_k, (call, numbers)) -> (out, lse), the tensors as a batch of one."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        bound: tuple[Call, Numbers],
    ) -> Any:
        call, numbers = ctx.bound = bound
        lengths = (cu_seqlens_q, cu_seqlens_k)
        out, lse = call.forward(q, k, v, lengths + numbers, 1, q.shape[1], k.shape[1])
        ctx.save_for_backward(q, k, v, out, lse, *lengths)  # lengths too: one that was changed since must not pass
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        call, numbers = ctx.bound
        *saved, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        numbers = (cu_seqlens_q, cu_seqlens_k, *numbers)
        grads = _gradients(call, saved, numbers, (dout, dlse if call.return_lse else None), ctx.needs_input_grad[:3])
        return (*grads, None, None, None)


def _gradients(
    call: Call,
    saved: Sequence[torch.Tensor],
    numbers: tuple[Any, ...],
    douts: tuple[torch.Tensor | None, torch.Tensor | None],
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Of q, k and v, those that are wanted. saved: (q, k, v, out, lse); numbers: what the kernel takes after them."""
    q, k, v, out, lse = saved
    dout, dlse = douts
    if dout is None and dlse is None:
        return [None, None, None]
    if dout is None:
        dout = _zeros_like_expanded(out)
    for name, grad in (("dout", dout), ("dlse", dlse)):
        if type(grad) is not torch.Tensor and grad is not None:
            request.refuse_without_memory(name, grad)
    create_graph = torch.is_grad_enabled()
    sources = (q, k, v, dout, dlse)
    with torch.no_grad():
        assert call.backwards is not None  # a call without one has no node in the graph
        backward = call.backwards(dlse is not None)
        try:
            dout = dout.resolve_neg()  # a lazy sign, which no kernel would see
            if dlse is not None:
                dlse = dlse.resolve_neg().contiguous()
            grads = backward(dout, q, k, v, out, lse, dlse, *numbers)
        except Exception:
            for name, grad in (("dout", dout), ("dlse", dlse)):
                if grad is not None:
                    request.refuse_batched(name, grad)
            raise
        kept = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
    return list(_once(kept, sources)) if create_graph else kept


# Function.apply less its Python preamble, which costs half of it (2.8 of 5.7 us) and only functorch needs.
apply = super(torch.autograd.Function, Attention).apply


def empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) where there is no query, or no key to see: output 0, LSE -inf."""
    batch, seqlen_q, heads_q, _ = q.shape
    out = torch.zeros((batch, seqlen_q, heads_q, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.full((batch, heads_q, seqlen_q), float("-inf"), dtype=request.lse_dtype(q.dtype), device=q.device)
    return out, lse


class Empty(torch.autograd.Function):
    """No query, or no key to see: output 0, LSE -inf, zero gradients, and no kernel."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        ctx.save_for_backward(q, k, v)
        return empty_outputs(q, v)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) if wanted else None for t, wanted in pairs]
        return _once(grads, (*ctx.saved_tensors, dout, dlse)) if torch.is_grad_enabled() else tuple(grads)
