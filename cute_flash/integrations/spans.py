"""Batches whose sequences see runs of keys of their own: what a padding mask becomes in integrations/transformers.py.

A Span each, int32 (batch, 1, 1, 5) on the CPU, travels from the mask to every layer. Sequences with spans of their own
are attended one after another, since there is no kernel for packed ones yet; padded query rows return 0.

Eagerly these are torch functions. A graph cannot look at a mask, so there two operators stand for them, and look when
the graph runs: cute_flash::spans_of_mask, and cute_flash::attention_of_spans with its gradient.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..api import attention
from ..runtime import autograd, request
from ..spec.errors import UnsupportedError

Bounds = tuple[int | None, int | None]  # (left, right) around the diagonal
DENSE = "attn_implementation='cute_flash' takes a 2-D padding mask, and got a dense one of shape {}"


class Span(NamedTuple):
    """What the query rows of one sequence see: keys start <= j < stop, within (left, right) of the diagonal.

    The last query row stands beside key length - 1: padding behind stop counts, the unused end of a static cache not.
    """

    start: int
    stop: int
    length: int
    left: int | None
    right: int | None


class Places(NamedTuple):
    """Where the queries and keys of a mask lie, in Transformers' words."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | torch.Tensor
    kv_offset: int


# ------------------------------------------------------------------------------------------------------ mask to spans


def of_mask(
    mask: torch.Tensor | None, places: Places, bounds: Bounds, whole_is_none: bool = False
) -> torch.Tensor | None:
    """The spans of a padding mask (batch, keys), True where a key is real; None = all are.

    With whole_is_none, None comes back where every key is real, and used.
    """
    batch_size, q_length, kv_length, q_offset, kv_offset = places
    aligned = bounds != (None, None)
    length = (
        int(q_offset) + q_length - kv_offset if aligned else kv_length
    )  # a static cache is longer than its contents
    if length > kv_length:
        raise UnsupportedError(f"queries end at key {length} of {kv_length}: they are not aligned with the last key")
    whole_is_none = whole_is_none and length == kv_length
    if mask is None:
        if whole_is_none:
            return None
        starts, stops = [0] * batch_size, [length] * batch_size
    else:
        real = mask[:, kv_offset : kv_offset + length]
        if real.shape[1] < length:
            raise UnsupportedError(f"attention_mask is of {mask.shape[1]} keys and there are {length}")
        if whole_is_none and bool(real.all()):
            return None
        starts, stops = _runs(real)
    written = [-1 if bound is None else bound for bound in bounds]
    rows = [[start, stop, length, *written] for start, stop in zip(starts, stops, strict=True)]
    return torch.tensor(rows, dtype=torch.int32)[:, None, None]


def _runs(real: torch.Tensor) -> tuple[list[int], list[int]]:
    """Start and stop of the run of True in each row of (batch, keys); one copy to the CPU a forward, not a layer."""
    real = real.cpu().bool()
    starts = real.int().argmax(1)
    stops = starts + real.sum(1)
    keys = torch.arange(real.shape[1])
    whole = ((keys >= starts[:, None]) & (keys < stops[:, None]) == real).all(1)
    if not bool(whole.all()):
        row = int(whole.int().argmin())
        raise UnsupportedError(f"row {row} of attention_mask has holes: a padding mask is one run of real keys")
    return starts.tolist(), stops.tolist()


def check(spans: torch.Tensor) -> None:
    """UnsupportedError for a mask that of_mask did not make."""
    if spans.dtype != torch.int32 or spans.dim() != 4 or tuple(spans.shape[1:]) != (1, 1, len(Span._fields)):
        raise UnsupportedError(DENSE.format(tuple(spans.shape)))


def read(spans: torch.Tensor) -> list[Span]:
    check(spans)
    unbounded = [[*row[:3], *(None if bound < 0 else bound for bound in row[3:])] for row in spans[:, 0, 0].tolist()]
    return [Span(*row) for row in unbounded]


# ---------------------------------------------------------------------------------------------------------- attention


class Part(NamedTuple):
    """Sequences of a batch that share a span: slices of the batch, of the query rows and of the keys."""

    sequences: slice
    rows: slice
    keys: slice
    window: Bounds


def _parts(spans: torch.Tensor, batch: int, seqlen_q: int) -> Iterator[Part]:
    """Under a mask that follows the diagonal, rows of padding have no part; neither has a sequence without a key."""
    found = read(spans)
    if len(found) != batch:
        raise UnsupportedError(f"the mask is of {len(found)} sequences and the batch of {batch}")
    alike = [(slice(0, batch), found[0])] if len(set(found)) == 1 else [
        (slice(b, b + 1), span) for b, span in enumerate(found)
    ]  # fmt: skip
    for sequences, span in alike:
        rows = slice(0, seqlen_q)
        if span.left is not None or span.right is not None:
            diagonal = span.length - seqlen_q  # row i stands beside key i + diagonal
            rows = slice(*(min(max(0, key - diagonal), seqlen_q) for key in (span.start, span.stop)))
        yield Part(sequences, rows, slice(span.start, span.stop), (span.left, span.right))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, scale: float | None, softcap: float | None
) -> torch.Tensor:
    """attention() of (batch, seqlen, heads, dim) tensors in which each sequence sees its span; differentiable."""
    outs = []
    for sequences, rows, keys, window in _parts(spans, q.shape[0], q.shape[1]):
        qkv = q[sequences, rows], k[sequences, keys], v[sequences, keys]
        out: torch.Tensor = attention(*qkv, window=window, scale=scale, softcap=softcap)
        outs.append(F.pad(out, (0, 0, 0, 0, rows.start, q.shape[1] - rows.stop)) if out.shape[1] < q.shape[1] else out)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


# ----------------------------------------------------------------------------------------------------------- in graphs


def of_mask_in_graph(mask: torch.Tensor | None, places: Places, bounds: Bounds) -> torch.Tensor:
    """of_mask as one node; an offset that is a tensor (of a static cache) is read when the graph runs."""
    batch_size, q_length, kv_length, q_offset, kv_offset = places
    offset, number = (q_offset, 0) if isinstance(q_offset, torch.Tensor) else (None, q_offset)
    sizes = (batch_size, q_length, kv_length, number, kv_offset)
    spans: torch.Tensor = torch.ops.cute_flash.spans_of_mask(mask, offset, *sizes, *bounds)
    return spans


def attend_in_graph(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, scale: float | None, softcap: float | None
) -> torch.Tensor:
    """attend as one node."""
    q, k, v = request.autocast(q, k, v)
    if scale is not None and scale <= 0:
        q, scale = request.positive_scale(q, scale)
    lse = request.needs_grad(q, k, v)
    out: torch.Tensor = torch.ops.cute_flash.attention_of_spans(q, k, v, spans, lse, scale, softcap)[0]
    return out


def _words(window: Bounds, scale: float | None, softcap: float | None) -> tuple[Any, ...]:
    """The options of cute_flash::attention."""
    return (False, *window, scale, softcap or None, False, None)


def _run_spans(mask: torch.Tensor | None, offset: torch.Tensor | None, *given: Any) -> torch.Tensor:
    batch_size, q_length, kv_length, number, kv_offset, left, right = given
    places = Places(batch_size, q_length, kv_length, number if offset is None else offset, kv_offset)
    spans = of_mask(mask, places, (left, right))
    if spans is None:
        raise RuntimeError("spans were not asked to be left out")
    return spans


def _fake_spans(mask: torch.Tensor | None, offset: torch.Tensor | None, *given: Any) -> torch.Tensor:
    return torch.empty((given[0], 1, 1, len(Span._fields)), dtype=torch.int32, device="cpu")


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, lse: bool, *numbers: Any) -> Any:
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse_out = _lse(q, lse).fill_(-torch.inf)
    for sequences, rows, keys, window in _parts(spans, q.shape[0], q.shape[1]):
        qkv = q[sequences, rows], k[sequences, keys], v[sequences, keys]
        part, part_lse = torch.ops.cute_flash.attention(*qkv, lse, *_words(window, *numbers))
        out[sequences, rows] = part
        if lse:
            lse_out[sequences, :, rows] = part_lse
    return out, lse_out


def _lse(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    batch, seqlen_q, heads_q, _ = q.shape
    return q.new_empty((batch, heads_q, seqlen_q) if wanted else 0, dtype=request.lse_dtype(q.dtype))


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, lse: bool, *numbers: Any) -> Any:
    request.check_tensors(q, k, v)
    check(spans)
    return q.new_empty(*q.shape[:3], v.shape[3]), _lse(q, lse)


def _run_backward(dout: torch.Tensor, *rest: Any) -> Any:
    q, k, v, spans, out, lse, *numbers = rest
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for sequences, rows, keys, window in _parts(spans, q.shape[0], q.shape[1]):
        mine, theirs = (sequences, rows), (sequences, keys)
        operands = (q[mine], k[theirs], v[theirs], out[mine], lse[sequences, :, rows].contiguous())
        grads = torch.ops.cute_flash.attention_backward(dout[mine], None, *operands, *_words(window, *numbers))
        dq[mine], dk[theirs], dv[theirs] = grads
    return dq, dk, dv


def _fake_backward(dout: torch.Tensor, *rest: Any) -> Any:
    return tuple(tensor.new_empty(tensor.shape) for tensor in rest[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, spans, ctx.has_lse, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, spans, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: torch.Tensor, _: Any) -> Any:
    q, k, v, spans, out, lse = ctx.saved_tensors
    if not ctx.has_lse:  # traced where no gradient was wanted, and differentiated all the same
        detached = (x.detach() for x in (q, k, v))
        out, lse = torch.ops.cute_flash.attention_of_spans(*detached, spans, True, *ctx.numbers)
    grads = torch.ops.cute_flash.attention_of_spans_backward(dout, q, k, v, spans, out, lse, *ctx.numbers)
    wanted = ctx.needs_input_grad[:3]
    kept = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return (*kept, None, None, None, None)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """There is no second derivative to keep anything for."""


def _refuse_twice(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(autograd.ONCE)


def _register() -> torch.library.Library:
    library = torch.library.Library("cute_flash", "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    head, tail = "Tensor q, Tensor k, Tensor v, Tensor spans", "float? scale, float? softcap"
    sizes = "SymInt batch_size, SymInt q_length, SymInt kv_length, SymInt q_offset, SymInt kv_offset"
    library.define(
        f"spans_of_mask(Tensor? mask, Tensor? offset, {sizes}, SymInt? left, SymInt? right) -> Tensor", tags=tags
    )
    library.define(f"attention_of_spans({head}, bool lse, {tail}) -> (Tensor, Tensor)", tags=tags)
    library.define(
        f"attention_of_spans_backward(Tensor dout, {head}, Tensor out, Tensor lse, {tail}) -> (Tensor, Tensor, Tensor)",
        tags=tags,
    )
    for name, run, fake in (
        ("spans_of_mask", _run_spans, _fake_spans),
        ("attention_of_spans", _run, _fake),
        ("attention_of_spans_backward", _run_backward, _fake_backward),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cute_flash::{name}", fake, lib=library)
    register = torch.library.register_autograd
    register("cute_flash::attention_of_spans", _differentiate, setup_context=_keep, lib=library)
    register("cute_flash::attention_of_spans_backward", _refuse_twice, setup_context=_keep_nothing, lib=library)
    return library


_library = _register()  # the operators live as long as it does
