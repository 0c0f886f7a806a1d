"""Packed sequences: which one a program works on, found on the device; and how many programs there may be at most."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

PROBES = tl.constexpr(32)


@triton.jit
def _within(start, total):
    """No value, however wild, leads out of the tensor, nor a difference of two out of 32 bits."""
    return tl.minimum(tl.maximum(start, 0), total)


@triton.jit
def _sequence_of(slot, starts, sequences, total, tile: tl.constexpr):
    """The last sequence whose slots start at or before this one; `sequences` is what follows the last."""
    first = slot * 0
    count = sequences + 1
    while count > 1:
        step = tl.cdiv(count, PROBES)
        probes = tl.arange(0, PROBES) * step
        inside = probes < count
        begin = _within(tl.load(starts + first + probes, mask=inside, other=0), total) // tile + first + probes
        reached = tl.sum((inside & (begin <= slot)).to(tl.int32))
        skipped = tl.maximum(reached - 1, 0) * step
        first += skipped
        count = tl.minimum(step, count - skipped)
    return first


@triton.jit
def _extent(starts, index, sequences, total):
    """(first row, rows) of a sequence; of what follows the last."""
    first = _within(tl.load(starts + index), total)
    last = _within(tl.load(starts + index + 1, mask=index < sequences, other=total), total)
    return first, tl.maximum(last - first, 0)


@triton.jit
def sequence_place(slot, lengths, sequences, sizes, tile: tl.constexpr, by_keys: tl.constexpr):
    """(tile, first row, rows, first key, keys) of a slot of packed sequences: the tile within its sequence, which may
    lie past the end. What follows the last sequence has rows without keys, or keys without rows."""
    starts_q, starts_k = lengths
    starts = starts_k if by_keys else starts_q
    total = sizes.seqlen_k if by_keys else sizes.seqlen_q
    index = _sequence_of(slot, starts, sequences, total, tile)
    within = tl.maximum(slot - (_within(tl.load(starts + index), total) // tile + index), 0)
    first_q, seqlen_q = _extent(starts_q, index, sequences, sizes.seqlen_q)
    first_k, seqlen_k = _extent(starts_k, index, sequences, sizes.seqlen_k)
    if by_keys:
        seqlen_q = tl.where(index < sequences, seqlen_q, 0)
    else:
        seqlen_k = tl.where(index < sequences, seqlen_k, 0)
    return within, first_q, seqlen_q, first_k, seqlen_k


def tiles_of(length: int, sequences: int | None, tile: int) -> int:
    """Tiles of a head. Of packed sequences as many as there may be, from what the host knows.

    Sequence i, which starts at row s, has the slots from s // tile + i on: as many as it has tiles, and at most one
    more. What follows the last sequence counts as one.
    """
    return -(-length // tile) if sequences is None else length // tile + sequences + 1


Taken = tuple[tuple[torch.Tensor, torch.Tensor] | None, int | None, tuple[float, ...]]


def lengths_taker(plan: Plan) -> Callable[[tuple[Any, ...]], Taken]:
    """What a kernel takes after its tensors -> (lengths, sequences, numbers), the first two None unless packed."""
    if plan.form != PACKED:
        return lambda numbers: (None, None, numbers)

    def take(numbers: tuple[Any, ...]) -> Taken:
        cu_seqlens_q, cu_seqlens_k, *rest = numbers
        return (cu_seqlens_q, cu_seqlens_k), cu_seqlens_q.shape[0] - 1, tuple(rest)

    return take
