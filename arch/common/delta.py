"""Before a backward: LSE in base 2 and delta = rowsum(dO * O) - dLSE of every row, and zeros where dQ will be summed.

One CTA a tile of query rows. dS = P * (dP - delta), see FlashAttention-2 (arXiv 2307.08691), algorithm 2; a gradient
through LSE adds P * dLSE to dS. Rows that saw no key, or do not exist, get LSE +inf and delta 0: their P is exactly 0.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .numeric import LOG2_E, NEG_INF

THREADS = 128
VECTOR = 8  # 16-bit elements in 16 bytes


def values_together(tile_m: int) -> int:
    """How many values of its columns a thread of wgmma's D layout reads at once: 16 bytes, but 8 where a tile has so
    many rows that four registers in a row make others spill."""
    return 4 if tile_m < 128 else 2


def value_place(row: Int32, tile_m: int) -> Int32:
    """Where a row's value lies among those of its tile. In fours, columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of sixteen,
    which lanes with remainder q among four hold, are together."""
    if values_together(tile_m) == 2:
        return row
    return row // 16 * 16 + row % 8 // 2 * 4 + row % 16 // 8 * 2 + row % 2


class Scratch(NamedTuple):
    """What a backward keeps in global memory between its kernels, float32; one allocation."""

    dq: cute.Tensor | None  # (tile_m * width_qk, query tiles, heads_q, batch): sums; None for width 0
    rows: cute.Tensor  # (2 * tile_m, query tiles, heads_q, batch): LSE in base 2 of a tile's rows, then their delta,
    # both in the order of value_place
    turns: cute.Tensor | None = None  # (parts, query tiles, heads_q, batch) Int32: how often a part of dQ was added to
    counters: cute.Tensor | None = None  # Int32, one for each kernel whose CTAs draw their units


def scratch_of(
    memory: cute.Tensor, shape: tuple, tile_m: int, width_qk: int, parts: int = 0, counters: int = 0
) -> Scratch:
    """`shape`: (query tiles, heads_q, batch); `parts` of dQ are added to in turn, 0: in any order."""
    tiles, heads, batch = shape
    row_tiles = Int64(tiles) * heads

    def part(iterator: cute.Pointer, size: int) -> cute.Tensor:
        strides = (1, Int64(size), Int64(size) * tiles, size * row_tiles)
        return cute.make_tensor(iterator, cute.make_layout((size, tiles, heads, batch), stride=strides))

    dq_size = tile_m * width_qk
    after = memory.iterator + dq_size * row_tiles * batch
    rows = part(after.align(16), 2 * tile_m)
    words = cute.recast_ptr(after + 2 * tile_m * row_tiles * batch, dtype=Int32)
    drawn = cute.make_tensor(words + parts * row_tiles * batch, cute.make_layout(counters)) if counters else None
    sums = part(memory.iterator, dq_size) if width_qk else None
    return Scratch(sums, rows, part(words, parts) if parts else None, drawn)


def _lanes(width: int) -> int:
    """That share a row: a power of two."""
    lanes = 1
    while lanes * VECTOR < width:
        lanes *= 2
    return lanes


def _row_vector(rows: cute.Tensor, row: Int32, first: Int32) -> cute.TensorSSA:
    """Elements [first, first + 8) of a row, in float32, by one load."""
    start = cute.domain_offset((row, first), rows).iterator
    return cute.make_tensor(start.align(16), cute.make_layout(VECTOR)).load().to(Float32)


@cute.jit
def _reset(counters: cute.Tensor, place: Int32):
    """By the first thread of a launch."""
    if place == 0:
        for i in cutlass.range_constexpr(cute.size(counters)):
            counters[i] = Int32(0)


@cute.kernel
def prepare_kernel(
    do: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Tensor,
    dlse: cute.Tensor | None,
    scratch: Scratch,
    tile_m: cutlass.Constexpr[int],
    width_v: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    if cutlass.const_expr(scratch.dq is not None):
        sums = scratch.dq[None, tile, head, batch]
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        vectors = cute.make_tensor(sums.iterator.align(16), cute.make_layout((4, cute.size(sums) // 4)))
        for i in cutlass.range(thread, cute.size(sums) // 4, THREADS, unroll=4):
            cute.autovec_copy(zeros, vectors[None, i])
    if cutlass.const_expr(scratch.counters is not None):
        _reset(scratch.counters, thread + tile + head + batch)
    if cutlass.const_expr(scratch.turns is not None):
        turns = scratch.turns[None, tile, head, batch]
        if thread < cute.size(turns):
            turns[thread] = Int32(0)
    values = scratch.rows[None, tile, head, batch]
    lanes = _lanes(width_v)
    do_rows, o_rows = do[batch, None, head, None], o[batch, None, head, None]
    column = thread % lanes * VECTOR
    for step in cutlass.range_constexpr(tile_m * lanes // THREADS):
        in_tile = step * (THREADS // lanes) + thread // lanes
        row = tile * tile_m + in_tile
        total = Float32(0.0)
        if row < do_rows.shape[0] and column < do_rows.shape[1]:
            product = _row_vector(do_rows, row, column) * _row_vector(o_rows, row, column)
            total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        lse_log2 = Float32(-NEG_INF)
        if row < do_rows.shape[0]:
            value = lse[batch, head, row]
            if cutlass.const_expr(dlse is not None):
                total = total - dlse[batch, head, row]
            if value != NEG_INF:
                lse_log2 = value * LOG2_E
            else:
                total = Float32(0.0)
        if column == 0:
            values[value_place(in_tile, tile_m)] = lse_log2
            values[tile_m + value_place(in_tile, tile_m)] = total
