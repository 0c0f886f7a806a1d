"""Before a backward: LSE in base 2 and delta = rowsum(dO * O) - dLSE of every row, and zeros where dQ will be summed.

One CTA a tile of query rows. dS = P * (dP - delta), see FlashAttention-2 (arXiv 2307.08691), algorithm 2; a gradient
through LSE adds P * dLSE to dS. Rows that saw no key, or do not exist, get LSE +inf and delta 0: their P is exactly 0.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .numeric import LOG2_E, NEG_INF
from .ragged import slot_rows

THREADS = 128
VECTOR = 8  # 16-bit elements in 16 bytes
TOGETHER = 8  # vectors of dO, and as many of O, that a thread asks for before it waits: 75 us instead of 65 with one


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
    zeroed: cute.Tensor | None = None  # (heads_kv * batch,) Int32: how many pieces CTAs have zeroed, see Ahead
    shares: cute.Tensor | None = None  # (floats, shares - 1, key tiles, heads_kv, batch): what CTAs that share a key
    # tile leave the last of them
    arrived: cute.Tensor | None = None  # (warps, key tiles, heads_kv, batch) Int32: how many have left that warp's part


class Ahead(NamedTuple):
    """Who zeroes the sums: whoever takes unit i those of piece i + distance, prepare_kernel those before. A head of K
    and V has as many pieces as key tiles, and its units come in the order of its pieces or thereabouts."""

    distance: Int32
    key_tiles: Int32  # of a head
    group: Int32

    def piece_tiles(self, query_tiles: Int32) -> Int32:
        """Query tiles of a piece, counted through the heads of a group."""
        return (query_tiles * self.group + self.key_tiles - 1) // self.key_tiles

    def pieces_made(self, row: Int32) -> Int32:
        """Of a head, by CTAs; negative where its neighbours are not either. `row`: head of K and V in the batch."""
        return cutlass.min(self.key_tiles, (row + 1) * self.key_tiles - self.distance)


def scratch_of(
    memory: cute.Tensor,
    shape: tuple,
    tile_m: int,
    width_qk: int,
    parts: int = 0,
    counters: int = 0,
    ahead: bool = False,
) -> Scratch:
    """`shape`: (query tiles, heads_q, batch); `parts` of dQ are added to in turn, 0: in any order; `ahead`: is there a
    word for every head of K and V, at most one a row tile."""
    tiles, heads, batch = shape
    row_tiles = Int64(tiles) * heads

    def part(iterator: cute.Pointer, size: int) -> cute.Tensor:
        strides = (1, Int64(size), Int64(size) * tiles, size * row_tiles)
        return cute.make_tensor(iterator, cute.make_layout((size, tiles, heads, batch), stride=strides))

    dq_size = tile_m * width_qk
    after = memory.iterator + dq_size * row_tiles * batch
    rows = part(after.align(16), 2 * tile_m)
    words = cute.recast_ptr(after + 2 * tile_m * row_tiles * batch, dtype=Int32)
    after_turns = words + parts * row_tiles * batch
    drawn = cute.make_tensor(after_turns, cute.make_layout(counters)) if counters else None
    zeroed = cute.make_tensor(after_turns + counters, cute.make_layout(row_tiles * batch)) if ahead else None
    sums, turns = part(memory.iterator, dq_size) if width_qk else None, part(words, parts) if parts else None
    return Scratch(sums, rows, turns, drawn, zeroed)


def row_tile_grid(by_row_tile: tuple) -> tuple:
    """A CTA for each of (query tiles, heads_q, batch), all along x: along y and z a grid ends at 65535."""
    tiles, heads, batch = by_row_tile
    return (tiles * heads * batch, 1, 1)


def row_tile_of(values: cute.Tensor) -> tuple:
    """(tile, head, batch) of a CTA of row_tile_grid. values: modes (_, query tiles, heads_q, batch)."""
    index, (_, tiles, heads, _) = cute.arch.block_idx()[0], values.shape
    row = index // tiles
    return index % tiles, row % heads, row // heads


def _lanes(width: int) -> int:
    """That share a row: a power of two."""
    lanes = 1
    while lanes * VECTOR < width:
        lanes *= 2
    return lanes


def _row_vector(rows: cute.Tensor, row: Int32, first: Int32) -> cute.TensorSSA:
    """Elements [first, first + 8) of a row, by one load."""
    start = cute.domain_offset((row, first), rows).iterator
    return cute.make_tensor(start.align(16), cute.make_layout(VECTOR)).load()


@cute.jit
def _reset(counters: cute.Tensor, place: Int32):
    """By the first thread of a launch."""
    if place == 0:
        for i in cutlass.range_constexpr(cute.size(counters)):
            counters[i] = Int32(0)


@cute.jit
def _reset_all(words: cute.Tensor):
    """By all threads of a launch."""
    first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    for i in cutlass.range(first, cute.size(words), cute.arch.grid_dim()[0] * THREADS, unroll=1):
        words[i] = Int32(0)


@cute.jit
def _zero(scratch: Scratch, ahead: Ahead | None, place: tuple, thread: Int32, mine):
    """The sums of the CTA's tile, where they are `mine` and no later kernel does it. `place`: see row_tile_of."""
    tile, head, batch = place
    if cutlass.const_expr(ahead is not None):
        _, tiles, heads, _ = scratch.rows.shape
        row, within = batch * (heads // ahead.group) + head // ahead.group, head % ahead.group * tiles + tile
        if thread == 0 and within == 0:
            scratch.zeroed[row] = Int32(0)
        mine = row * ahead.key_tiles + within // ahead.piece_tiles(tiles) < ahead.distance
    if mine:
        sums = scratch.dq[None, tile, head, batch]
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        vectors = cute.make_tensor(sums.iterator.align(16), cute.make_layout((4, cute.size(sums) // 4)))
        for i in cutlass.range(thread, cute.size(sums) // 4, THREADS, unroll=4):
            cute.autovec_copy(zeros, vectors[None, i])


@cute.jit
def _make_rows(
    tensors: tuple,
    values: cute.Tensor,
    head_at: tuple,
    span: tuple,
    tile_m: cutlass.Constexpr,
    width_v: cutlass.Constexpr,
):
    """LSE and delta of a tile. `tensors`: (do, o, lse, dlse), `head_at`: (batch, head), `span`: (its first row, where
    rows end)."""
    do, o, lse, dlse = tensors
    batch, head = head_at
    first, end = span
    thread, _, _ = cute.arch.thread_idx()
    lanes = _lanes(width_v)
    do_rows, o_rows = do[batch, None, head, None], o[batch, None, head, None]
    steps, rows_together = tile_m * lanes // THREADS, THREADS // lanes
    column = thread % lanes * VECTOR
    inside = cutlass.min(column, do_rows.shape[1] - VECTOR)
    for start in cutlass.range_constexpr(0, steps, TOGETHER):
        loaded = []
        for step in cutlass.range_constexpr(start, min(start + TOGETHER, steps)):
            # what does not exist is read elsewhere and given no weight: loads that depend on nothing are all in flight
            row = cutlass.min(first + step * rows_together + thread // lanes, do_rows.shape[0] - 1)
            shift = dlse[batch, head, row] if cutlass.const_expr(dlse is not None) else Float32(0.0)
            vectors = _row_vector(do_rows, row, inside), _row_vector(o_rows, row, inside)
            loaded.append((*vectors, lse[batch, head, row], shift))
        for each in cutlass.range_constexpr(len(loaded)):
            in_tile = (start + each) * rows_together + thread // lanes
            do_vector, o_vector, value, shift = loaded[each]
            product = do_vector.to(Float32) * o_vector.to(Float32)
            total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = Float32(cutlass.select_(column == inside, total, Float32(0.0)))
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes) - shift
            seen = (first + in_tile < end) & (value != NEG_INF)
            place = value_place(in_tile, tile_m)
            if column == 0:
                values[place] = Float32(cutlass.select_(seen, value * LOG2_E, Float32(-NEG_INF)))
                values[tile_m + place] = Float32(cutlass.select_(seen, total, Float32(0.0)))


@cute.kernel
def prepare_kernel(
    do: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Tensor,
    dlse: cute.Tensor | None,
    scratch: Scratch,
    tile_m: cutlass.Constexpr[int],
    width_v: cutlass.Constexpr[int],
    ahead: Ahead | None = None,
    starts: cute.Tensor | None = None,
):
    """A kernel launched with use_pdl starts beside the last CTAs of this one and waits for them where it needs them.

    `starts` of packed sequences: (sequences + 1,) Int32; tiles are slots then, see ragged.py."""
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = row_tile_of(scratch.rows)
    span, used = (tile * tile_m, do.shape[1]), True
    if cutlass.const_expr(starts is not None):
        slot = slot_rows(starts, tile, do.shape[1], tile_m)
        first, used = slot.rows.first + slot.tile * tile_m, slot.tile * tile_m < slot.rows.count
        span = first, slot.rows.first + slot.rows.count
    if cutlass.const_expr(scratch.dq is not None):
        _zero(scratch, ahead, (tile, head, batch), thread, used)
    if cutlass.const_expr(scratch.counters is not None):
        _reset(scratch.counters, thread + tile + head + batch)
    if cutlass.const_expr(scratch.arrived is not None):
        _reset_all(scratch.arrived)
    if cutlass.const_expr(scratch.turns is not None):
        turns = scratch.turns[None, tile, head, batch]
        if thread < cute.size(turns):
            turns[thread] = Int32(0)
    tensors, values = (do, o, lse, dlse), scratch.rows[None, tile, head, batch]
    if used:
        _make_rows(tensors, values, (batch, head), span, tile_m, width_v)
