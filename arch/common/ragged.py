"""Packed sequences in memory: the rows of one of them, for TMA and for direct access.

A TMA descriptor has one bound for all its boxes, but a sequence ends where the next one begins. So the rows become
three modes, x < BOUND and y of the rows' stride s, z of stride WRAP - s. Row r of a sequence of n rows from row f on is

    x = BOUND - n + r,  y = f + n,  z = BOUND:    x s + y s + z (WRAP - s) = (f + r) s + BOUND WRAP

and BOUND WRAP elements of 16 bits are 2^64 bytes, which addresses wrap around. x reaches BOUND where the sequence ends:
what lies behind reads as zero and is not written, whoever owns it. Sequences may have 2^30 rows.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

BOUND = 1 << 30
WRAP = 1 << 33


class Rows(NamedTuple):
    """Of one sequence: of Q and O, or of K and V."""

    first: Int32
    count: Int32


class Place(NamedTuple):
    """Of one sequence."""

    q: Rows
    k: Rows


def ragged_view(tensor: cute.Tensor, rows_mode: int = 0) -> cute.Tensor:
    """(1, rows, heads, width) as TMA is to see it: modes (x, width, heads, y, z), x and width the other way round with
    rows_mode 1."""
    _, rows, heads, width = tensor.shape
    _, row, head, column = tensor.stride
    step = 128 // tensor.element_type.width
    # a single row's stride may be anything, but here it counts: x and y take it 2^30 times, z gives it back
    row = cute.assume(Int64(cutlass.select_(rows == 1, Int64(step), row)), divby=step)
    back = cute.assume(WRAP - row, divby=step)
    shape, stride = [BOUND, width], [row, column]
    if rows_mode:
        shape, stride = shape[::-1], stride[::-1]
    layout = cute.make_layout((*shape, heads, BOUND + 1, BOUND + 1), stride=(*stride, head, row, back))
    return cute.make_tensor(tensor.iterator, layout)


def sequence_plane(tensor: cute.Tensor, head: Int32, rows: Rows, rows_mode: int = 0) -> cute.Tensor:
    """A sequence's rows of a TMA tensor of ragged_view, as if it began with them: (rows, width), or (width, rows)."""
    plane = tensor[None, None, head, rows.first + rows.count, BOUND]
    start = BOUND - rows.count
    return cute.domain_offset((0, start) if rows_mode else (start, 0), plane)


def sequence_heads(tensor: cute.Tensor, rows: Rows) -> cute.Tensor:
    """The same of all heads: (rows, width, heads)."""
    return cute.domain_offset((BOUND - rows.count, 0, 0), tensor[None, None, None, rows.first + rows.count, BOUND])


def only_rows(tensor: cute.Tensor, mode: int, rows: Rows) -> cute.Tensor:
    """A tensor in global memory with the rows of one sequence in that mode."""
    moved = cute.domain_offset(tuple(rows.first if i == mode else 0 for i in range(cute.rank(tensor))), tensor)
    shape = tuple(rows.count if i == mode else size for i, size in enumerate(tensor.shape))
    return cute.make_tensor(moved.iterator, cute.make_layout(shape, stride=tensor.stride))


def rows_of(starts: cute.Tensor, index: Int32, total: Int32) -> Rows:
    """Of sequence `index`, or of what follows the last one. Within the tensor, whatever the lengths say."""
    first = start_of(starts, index, total)
    return Rows(first, cutlass.max(_end_of(starts, index, total) - first, 0))


def start_of(starts: cute.Tensor, index: Int32, total: Int32) -> Int32:
    return cutlass.min(cutlass.max(starts[index], 0), total)


@cute.jit
def _end_of(starts: cute.Tensor, index: Int32, total: Int32) -> Int32:
    end = total
    if index + 1 < starts.shape[0]:
        end = start_of(starts, index + 1, total)
    return end


def first_slot(starts: cute.Tensor, index: Int32, total: Int32, tile: int) -> Int32:
    """Where the tiles of a sequence begin in memory that has room for whole tiles of each: slots_of in all. Found
    without a sum over those before; a slot between two sequences may stay unused."""
    return start_of(starts, index, total) // tile + index


def slots_of(total: Int32, sequences: Int32, tile: int) -> Int32:
    return total // tile + sequences + 1


@cute.jit
def last_reached(starts: cute.Tensor, count: Int32, sought: Int32, total: Int32, tile: cutlass.Constexpr):
    """By a warp: the last of `count` entries that starts at `sought` or before; with a tile, whose first slot does."""
    lane, first = cute.arch.lane_idx(), Int32(0)
    while count > 1:
        step = (count + 31) // 32
        place = first + cutlass.min(lane * step, count - 1)
        if cutlass.const_expr(tile):
            start = first_slot(starts, place, total, tile)
        else:
            start = starts[place]
        reached = cute.arch.popc(cute.arch.vote_ballot_sync((lane * step < count) & (start <= sought)))
        skipped = cutlass.max(reached - 1, 0) * step
        first += skipped
        count = cutlass.min(step, count - skipped)
    return first


class SlotRows(NamedTuple):
    """What a slot holds."""

    tile: Int32  # of the sequence
    rows: Rows  # of the sequence


@cute.jit
def slot_rows(starts: cute.Tensor, slot: Int32, total: Int32, tile: cutlass.Constexpr) -> SlotRows:
    """By a warp."""
    index = last_reached(starts, starts.shape[0], slot, total, tile)
    within = cutlass.max(slot - first_slot(starts, index, total, tile), 0)
    return SlotRows(within, rows_of(starts, index, total))
