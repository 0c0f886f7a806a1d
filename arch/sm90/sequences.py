"""Packed sequences: the table from which CTAs learn what they work on, and the units of such a launch.

prepare_kernel puts the sequences in order, the ones with most keys first so that the last units are short, and counts
their query tiles; the load warp of the main kernel finds the sequence of a unit by a search in the counts. What follows
the last sequence is one more, without keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.blocks import key_tiles, never_none, window_tiles
from ..common.order import Sizes, WorkTile, head_by_head, longest_first
from ..common.ragged import Place, Rows, last_reached, rows_of, slots_of
from .queue import Ticket, draw
from .tiles import drawn_together
from .units import Unit, Units

THREADS = 1024
WARPS = THREADS // 32
SORTED = 2048  # entries up to which they are put in order: each is compared with each
TILES_MAX = (1 << 30) - 1  # where counting stops: lengths out of order may add up to anything


class Table(NamedTuple):
    """(entries, ...) in the order of work; an entry is a sequence, or what follows the last."""

    rows: cute.Tensor  # (4, entries) Int32: first row and rows of q, first row and rows of k
    starts: cute.Tensor  # (entries + 1,) Int32: query tiles of a head before those of the entry; of all of them
    order: cute.Tensor  # (entries,) Int32: which sequence the entry is


def table_of(memory: cute.Tensor, sequences: Int32) -> Table:
    """memory: Int32, as many as tiles.TABLE says."""
    entries = sequences + 1
    rows = cute.make_tensor(memory.iterator, cute.make_layout((4, entries)))
    starts = cute.make_tensor(memory.iterator + 4 * entries, cute.make_layout(entries + 1))
    order = cute.make_tensor(memory.iterator + 5 * entries + 1, cute.make_layout(entries))
    return Table(rows, starts, order)


class Lengths(NamedTuple):
    """What a launch is given; the totals are the rows of q and of k."""

    starts_q: cute.Tensor  # (sequences + 1,) Int32
    starts_k: cute.Tensor
    total_q: Int32
    total_k: Int32


@cute.jit
def place_of(lengths: Lengths, index: Int32) -> Place:
    q, k = rows_of(lengths.starts_q, index, lengths.total_q), rows_of(lengths.starts_k, index, lengths.total_k)
    keys = k.count
    if index + 1 == lengths.starts_q.shape[0]:
        keys = Int32(0)
    return Place(q, Rows(k.first, keys))


def _tiles(place: Place, tile_m: int) -> Int32:
    return (place.q.count + tile_m - 1) // tile_m


@cute.jit
def _write(table: Table, rank: Int32, index: Int32, place: Place, start: Int32):
    entry = table.rows[None, rank]
    entry[0], entry[1], entry[2], entry[3] = place.q.first, place.q.count, place.k.first, place.k.count
    table.starts[rank], table.order[rank] = start, index


def _add(x: Int32, y: Int32) -> Int32:
    return cutlass.min(x + y, TILES_MAX)


def _warp_total(x: Int32, add: Callable = _add) -> Int32:
    for offset in (16, 8, 4, 2, 1):
        x = add(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


@cute.jit
def _ranked(lengths: Lengths, table: Table, index: Int32, tile_m: cutlass.Constexpr):
    """By a warp: an entry stands where as many come before it as have more keys, or as many and a lower index."""
    entries, lane = lengths.starts_q.shape[0], cute.arch.lane_idx()
    mine = place_of(lengths, index)
    rank, before, total = Int32(0), Int32(0), Int32(0)
    for other in cutlass.range(lane, entries, 32, unroll=2):
        place = place_of(lengths, other)
        tiles = _tiles(place, tile_m)
        total = _add(total, tiles)
        if place.k.count > mine.k.count or (place.k.count == mine.k.count and other < index):
            rank += 1
            before = _add(before, tiles)
    rank, before, total = _warp_total(rank), _warp_total(before), _warp_total(total)
    if lane == 0:
        _write(table, rank, index, mine, before)
        if index == 0:
            table.starts[entries] = total


@cute.jit
def _scan(x: Int32) -> Int32:
    """Over the lanes up to the own."""
    for offset in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(x, offset=1 << offset, mask_and_clamp=0)
        if cute.arch.lane_idx() >= 1 << offset:
            x = _add(x, lower)
    return x


@cute.jit
def _counted(lengths: Lengths, table: Table, tile_m: cutlass.Constexpr):
    """By a CTA: THREADS entries stay in their order; each CTA counts all that come before its own."""
    entries, thread = lengths.starts_q.shape[0], cute.arch.thread_idx()[0]
    warp, lane = thread // 32, cute.arch.lane_idx()
    sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout((WARPS, 2)))
    first = cute.arch.block_idx()[0] * THREADS
    before, tiles = Int32(0), Int32(0)
    for other in cutlass.range(thread, first, THREADS, unroll=4):
        before = _add(before, _tiles(place_of(lengths, other), tile_m))
    index = first + thread
    mine = place_of(lengths, cutlass.min(index, entries - 1))
    if index < entries:
        tiles = _tiles(mine, tile_m)
    upto, before = _scan(tiles), _warp_total(before)
    if lane == 31:
        sums[warp, 0], sums[warp, 1] = before, upto
    cute.arch.sync_threads()
    before = upto - tiles
    for other in cutlass.range(WARPS, unroll=1):
        before = _add(before, sums[other, 0])
        if other < warp:
            before = _add(before, sums[other, 1])
    if index < entries:
        _write(table, index, index, mine, before)
        if index == entries - 1:
            table.starts[entries] = _add(before, tiles)


@cute.kernel
def prepare_kernel(lengths: Lengths, table: Table, tile_m: cutlass.Constexpr):
    cute.arch.griddepcontrol_launch_dependents()
    entries = lengths.starts_q.shape[0]
    if entries <= SORTED:
        index = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if index < entries:
            _ranked(lengths, table, index, tile_m)
    else:
        _counted(lengths, table, tile_m)


@cute.jit
def launch_prepare(lengths: Lengths, table: Table, tile_m: cutlass.Constexpr, stream):
    entries = lengths.starts_q.shape[0]
    a_cta = Int32(WARPS) if entries <= SORTED else Int32(THREADS)
    prepare_kernel(lengths, table, tile_m).launch(
        grid=((entries + a_cta - 1) // a_cta, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def entry_at(table: Table, tile: Int32) -> Int32:
    """By a warp: the one that has this tile, of those of a head."""
    return last_reached(table.starts, cute.size(table.order), tile, 0, 0)


def place_at(table: Table, entry: Int32) -> Place:
    numbers = cute.make_tensor(table.rows[None, entry].iterator.align(16), cute.make_layout(4)).load()
    return Place(Rows(numbers[0], numbers[1]), Rows(numbers[2], numbers[3]))


def tile_total(table: Table, heads: Int32) -> Int32:
    """Tiles of all sequences and heads. Their numbers, and some beyond, are 32-bit."""
    most = ((1 << 31) - (1 << 16)) // heads
    return cutlass.min(table.starts[cute.size(table.order)], most) * heads


class PackedUnits(Units):
    """Of one Plan for packed sequences; `table` stands where splits of keys do."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.together = drawn_together(plan.tile)

    def bound(self, sizes: Sizes, sequences: Int32) -> Int32:
        """As many as there may be, on the host."""
        return slots_of(sizes.seqlen_q, sequences, self.tile.tile_m) * sizes.heads_q

    def count(self, sizes: Sizes, table: Table) -> Int32:
        return tile_total(table, sizes.heads_q)

    @cute.jit
    def following(self, index: Int32, units: Int32, counter: cute.Tensor) -> Int32:
        """The CTA's unit after the index-th. So many are drawn together, beginning with as many for each CTA, and who
        has done the last of them draws: once for each draw of units that there is."""
        index += 1
        if index % self.together == 0 or index >= units:
            draws = (units + self.together - 1) // self.together
            index = (cute.arch.grid_dim()[0] + draw(counter, draws)) * self.together
        return index

    @cute.jit
    def ticket(self, index: Int32, sizes: Sizes, table: Table, entry: Int32) -> tuple:
        """`entry`: of the unit before. -> (ticket, the entry)"""
        live, tile = Int32(index < self.count(sizes, table)), index // sizes.heads_q
        if live == 0:
            entry = Int32(0)
        elif tile < table.starts[entry] or tile >= table.starts[entry + 1]:
            entry = entry_at(table, tile)
        start = table.starts[entry]
        place = place_at(table, entry)
        work = self.work(index - start * sizes.heads_q, place, sizes)
        return Ticket(live, work, Int32(0), place), entry

    @cute.jit
    def work(self, index: Int32, place: Place, sizes: Sizes) -> WorkTile:
        """The index-th unit of a sequence."""
        m_blocks, group = cutlass.max(1, _tiles(place, self.tile.tile_m)), sizes.heads_q // sizes.heads_kv
        if cutlass.const_expr(self.mask.causal and not self.mask.windowed):
            kv_bytes = cutlass.min(place.k.count, 1 << 20) * self.key_bytes
            return longest_first(index, m_blocks, sizes.heads_q, Int32(1), kv_bytes, group)
        return head_by_head(index, m_blocks, sizes.heads_q)

    @cute.jit
    def unit(self, ticket: Ticket, sizes: Sizes, table: Table) -> Unit:
        tile, place = self.tile, ticket.place
        seqlens, row_start = (place.q.count, place.k.count), ticket.work.m_block * tile.tile_m
        if cutlass.const_expr(self.mask.windowed):
            tiles = window_tiles(row_start, tile, seqlens, (sizes.left, sizes.right), self.mask)
        else:
            tiles = key_tiles(row_start, tile.tile_m, tile.tile_n, *seqlens, self.mask.causal)
        tiles = never_none(tiles, (place.k.count + tile.tile_n - 1) // tile.tile_n)
        return Unit(ticket.work, row_start, ticket.split, tiles, Int32(0), Int32(0), place)
