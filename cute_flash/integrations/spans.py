"""Batches whose sequences see runs of keys of their own: what a padding mask becomes in integrations/transformers.py.

A Span each, int32 (spans, 1, 1, 6) on the CPU, travels from the mask to every layer, where the batch is attended as one
of packed sequences: what lies between the spans is a sequence of rows without keys, or of keys without rows, so that
nothing is moved together and padded query rows return 0.

Eagerly these are torch functions. A graph cannot look at a mask, so there two operators stand for them, and look when
the graph runs: cute_flash::spans_of_mask, and cute_flash::attention_of_spans with its gradient.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..api import attention
from ..runtime import flops, ops, request
from ..runtime.packed import Lengths
from ..spec.errors import UnsupportedError
from ..varlen import attention_varlen

Bounds = tuple[int | None, int | None]  # (left, right) around the diagonal
DENSE = "attn_implementation='cute_flash' takes a 2-D padding mask, and got a dense one of shape {}"


class Span(NamedTuple):
    """What query rows of one sequence of the batch see: keys start <= j < stop, within (left, right) of the diagonal.

    The last query row stands beside key length - 1: padding behind stop counts, the unused end of a static cache not.
    A sequence has several where others are packed into it.
    """

    sequence: int
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


def _real_keys(mask: torch.Tensor | None, places: Places, bounds: Bounds) -> tuple[int, torch.Tensor | None]:
    """(keys that count: a static cache is longer than its contents, the part of the mask that is of them)."""
    _, q_length, kv_length, q_offset, kv_offset = places
    length = kv_length if bounds == (None, None) else int(q_offset) + q_length - kv_offset
    if length > kv_length:
        raise UnsupportedError(f"queries end at key {length} of {kv_length}: they are not aligned with the last key")
    if mask is None:
        return length, None
    real = mask[:, kv_offset : kv_offset + length]
    if real.shape[1] < length:
        raise UnsupportedError(f"attention_mask is of {mask.shape[1]} keys and there are {length}")
    return length, real


def is_whole(mask: torch.Tensor | None, places: Places, bounds: Bounds) -> bool:
    """Is every key of a padding mask real, and does it count?"""
    length, real = _real_keys(mask, places, bounds)
    return length == places.kv_length and (real is None or bool(real.all()))


def of_mask(mask: torch.Tensor | None, places: Places, bounds: Bounds) -> torch.Tensor:
    """The spans of a padding mask (batch, keys), True where a key is real; None = all are."""
    length, real = _real_keys(mask, places, bounds)
    starts, stops = ([0] * places.batch_size, [length] * places.batch_size) if real is None else _runs(real)
    runs = ((sequence, *run, length) for sequence, run in enumerate(zip(starts, stops, strict=True)))
    return _written(runs, bounds)


def of_packed(numbers: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """The spans of sequences that lie in one another's rows: of each token of (batch, seqlen) its sequence's number."""
    runs = []
    for row, of_row in enumerate(numbers.cpu()):
        stops = torch.unique_consecutive(of_row, return_counts=True)[1].cumsum(0).tolist()
        runs += [(row, start, stop, len(of_row)) for start, stop in zip([0, *stops], stops, strict=False)]
    return _written(runs, bounds)


def _written(runs: Iterable[tuple[int, int, int, int]], bounds: Bounds) -> torch.Tensor:
    """read() undoes it."""
    tail = [-1 if bound is None else bound for bound in bounds]
    return torch.tensor([[*run, *tail] for run in runs], dtype=torch.int32, device="cpu")[:, None, None]


def _runs(real: torch.Tensor) -> tuple[list[int], list[int]]:
    """Start and stop of the run of True in each row of (batch, keys); one copy to the CPU a forward, not a layer."""
    real = real.cpu().bool()
    starts = real.int().argmax(1)
    stops = starts + real.sum(1)
    keys = torch.arange(real.shape[1], device=real.device)
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
    unbounded = [[*row[:4], *(None if bound < 0 else bound for bound in row[4:])] for row in spans[:, 0, 0].tolist()]
    return [Span(*row) for row in unbounded]


# ---------------------------------------------------------------------------------------------------------- attention


class Part(NamedTuple):
    """What is attended together: slices of the batch, of the query rows and of the keys."""

    sequences: slice
    rows: slice
    keys: slice


def _parts(spans: torch.Tensor, batch: int, seqlen_q: int) -> tuple[list[Part], Bounds]:
    """One where all share their span. Under a mask that follows the diagonal, rows of padding are in none."""
    found = read(spans)
    if {span.sequence for span in found} != set(range(batch)):
        raise UnsupportedError(f"the mask is of {found[-1].sequence + 1} sequences and the batch of {batch}")
    if len(found) == batch and len({span[1:] for span in found}) == 1:
        alike = [(slice(0, batch), found[0])]
    else:
        alike = [(slice(span.sequence, span.sequence + 1), span) for span in found]
    parts = []
    for sequences, span in alike:
        rows = slice(0, seqlen_q)
        if span.left is not None or span.right is not None:
            diagonal = span.length - seqlen_q  # row i stands beside key i + diagonal
            rows = slice(*(min(max(0, key - diagonal), seqlen_q) for key in (span.start, span.stop)))
        parts.append(Part(sequences, rows, slice(span.start, span.stop)))
    return parts, (found[0].left, found[0].right)


def _is_packed(parts: list[Part], q: torch.Tensor) -> bool:
    """Not where a single row meets a cache, which would have to be copied to lie in one piece."""
    batch, seqlen_q = q.shape[:2]
    return len(parts) > batch or (len(parts) > 1 and seqlen_q > 1)


def _lengths(parts: list[Part], q: torch.Tensor, k: torch.Tensor) -> Lengths:
    """Of the batch with its sequences one after another. Rows after the last part are what attention_varlen makes 0."""
    starts = [(0, 0)]
    for sequences, rows, keys in parts:
        first_row, first_key = sequences.start * q.shape[1], sequences.start * k.shape[1]
        starts.append((first_row + rows.start, starts[-1][1]))  # rows that see nothing
        starts.append((first_row + rows.start, first_key + keys.start))  # keys that nobody sees
        starts.append((first_row + rows.stop, first_key + keys.stop))
    once = list(dict.fromkeys(starts))
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(of, dtype=torch.int32, device="cpu").to(q.device, non_blocking=True)
        for of in zip(*once, strict=True)
    )
    longest_q = max(part.rows.stop - part.rows.start for part in parts)
    longest_k = max(part.keys.stop - part.keys.start for part in parts)
    return Lengths(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, scale: float | None, softcap: float | None
) -> torch.Tensor:
    """attention() of (batch, seqlen, heads, dim) tensors in which each sequence sees its span; differentiable."""
    parts, window = _parts(spans, q.shape[0], q.shape[1])
    out: torch.Tensor
    if _is_packed(parts, q):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = attention_varlen(*flat, **_lengths(parts, q, k)._asdict(), window=window, scale=scale, softcap=softcap)
        return out.unflatten(0, q.shape[:2])
    outs = []
    for sequences, rows, keys in parts:
        qkv = q[sequences, rows], k[sequences, keys], v[sequences, keys]
        out = attention(*qkv, window=window, scale=scale, softcap=softcap)
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
    return of_mask(mask, places, (left, right))


def _fake_spans(mask: torch.Tensor | None, offset: torch.Tensor | None, *given: Any) -> torch.Tensor:
    return torch.empty((given[0], 1, 1, len(Span._fields)), dtype=torch.int32, device="cpu")


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, lse: bool, *numbers: Any) -> Any:
    parts, window = _parts(spans, q.shape[0], q.shape[1])
    words = _words(window, *numbers)
    if _is_packed(parts, q):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out, lse_out = torch.ops.cute_flash.attention_varlen(*flat, *_lengths(parts, q, k), lse, *words)
        return out.unflatten(0, q.shape[:2]), _as_batch(lse_out, q) if lse else lse_out
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse_out = _lse(q, lse).fill_(-torch.inf)
    for sequences, rows, keys in parts:
        qkv = q[sequences, rows], k[sequences, keys], v[sequences, keys]
        part, part_lse = torch.ops.cute_flash.attention(*qkv, lse, *words)
        out[sequences, rows] = part
        if lse:
            lse_out[sequences, :, rows] = part_lse
    return out, lse_out


def _as_batch(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(heads, batch * seqlen) -> (batch, heads, seqlen), contiguous."""
    return lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def _as_row(lse: torch.Tensor) -> torch.Tensor:
    """And back."""
    return lse.transpose(0, 1).flatten(1)


def _lse(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    batch, seqlen_q, heads_q, _ = q.shape
    return q.new_empty((batch, heads_q, seqlen_q) if wanted else 0, dtype=request.lse_dtype(q.dtype))


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, lse: bool, *numbers: Any) -> Any:
    request.check_tensors(q, k, v)
    check(spans)
    return q.new_empty(*q.shape[:3], v.shape[3]), _lse(q, lse)


def _run_backward(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> Any:
    q, k, v, out, lse, spans, *numbers = rest
    parts, window = _parts(spans, q.shape[0], q.shape[1])
    words = _words(window, *numbers)
    if _is_packed(parts, q):
        flat = (x.flatten(0, 1) for x in (q, k, v, out))
        row = None if dlse is None else _as_row(dlse)
        grads = torch.ops.cute_flash.attention_varlen_backward(
            dout.flatten(0, 1), row, *flat, _as_row(lse), *_lengths(parts, q, k), *words
        )
        return tuple(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for sequences, rows, keys in parts:
        mine, theirs = (sequences, rows), (sequences, keys)
        lses = [None if x is None else x[sequences, :, rows].contiguous() for x in (dlse, lse)]
        operands = (dout[mine], lses[0], q[mine], k[theirs], v[theirs], out[mine], lses[1])
        dq[mine], dk[theirs], dv[theirs] = torch.ops.cute_flash.attention_backward(*operands, *words)
    return dq, dk, dv


def _register() -> ops.Library:
    library = ops.Library("FRAGMENT")
    sizes = "SymInt batch_size, SymInt q_length, SymInt kv_length, SymInt q_offset, SymInt kv_offset"
    of_mask = f"(Tensor? mask, Tensor? offset, {sizes}, SymInt? left, SymInt? right) -> Tensor"
    ops.define(library, f"spans_of_mask{of_mask}", _run_spans, _fake_spans)
    words = "float? scale, float? softcap"
    running = _run, _fake, _run_backward
    ops.define_attention(library, "attention_of_spans", ("Tensor spans",), words, running, flops.dense)
    return library


_library = _register()  # the operators live as long as it does
