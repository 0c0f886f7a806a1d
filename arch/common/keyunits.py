"""What a CTA of a backward works on: a tile of keys, and the query tiles of its group of heads that see it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.spec.problem import SHORT_KEYS

from . import order
from .blocks import RowTiles, row_tiles
from .delta import Ahead
from .order import Sizes, head_by_head, last_section, longest_first, section_width
from .ragged import Place


class Unit(NamedTuple):
    """What a CTA works on: a tile of keys and the query tiles of its group that see it."""

    key_block: Int32
    head_kv: Int32
    batch: Int32
    head_first: Int32  # of the group's query heads
    group: Int32
    tiles: RowTiles
    way: Int32  # through these: 1 from the first to the last, -1 back
    place: Place | None = None  # of packed sequences, the one that all these are of
    slot: Int32 | None = None  # and its first slot, see ragged.py
    share: Int32 | None = None  # which of those among whom the key tile's queries are shared out
    shares: Int32 | None = None  # so many


def unit_count(sizes: Sizes, tile) -> Int32:
    return (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n * sizes.heads_kv * sizes.batch


def row_bytes(seqlen_q: Int32, widths: tuple[int, int]) -> Int32:
    """Of Q, dO and dQ of a head, which should stay in L2."""
    rows = cutlass.min(seqlen_q, 1 << 17)  # beyond any L2, and the product stays within 32 bits
    return rows * (widths[0] * 6 + widths[1] * 2)


def _section_bytes(sizes: Sizes, widths: tuple[int, int], mask, in_turn: bool, most: int) -> Int32:
    """What a head is taken to fill of a section of L2: of few keys, so much that `most` heads fit; 0: any number.

    All key tiles of a head add to a query tile one after the other: in turn, under a full mask, two heads at least are
    worked on at a time at 192 columns. NVIDIA H200, 16384 keys, TFLOP/s: 502 instead of 490; (192, 128) 471 instead of
    481, causal 478 instead of 489, d=192 4096 with ten instead of five 455 instead of 475 (commit 4169d99)."""
    head_bytes = row_bytes(sizes.seqlen_q, widths)
    if most:
        wide = cutlass.max(head_bytes, order.L2_SECTION_BYTES // most)
        head_bytes = Int32(cutlass.select_(sizes.seqlen_k <= SHORT_KEYS, wide, head_bytes))
    if in_turn and not mask.windowed and not mask.causal and min(widths) > 128:
        head_bytes = cutlass.min(head_bytes, order.L2_SECTION_BYTES // 2)
    return head_bytes


def in_sections(mask, in_turn: bool) -> bool:
    """Are key tiles taken from many heads by turns? Causal, so that lengths mix. Who adds in turn then seldom follows
    close behind another; under a window nobody does."""
    return (mask.causal or in_turn) and not mask.left


@cute.jit
def ahead_of(
    sizes: Sizes,
    tile: cutlass.Constexpr,
    widths: cutlass.Constexpr,
    mask: cutlass.Constexpr,
    most: cutlass.Constexpr = 0,
) -> Ahead:
    """All pieces of a head are zeroed by those who take units before its own: the distance is as far as the units of a
    head can be apart in the order of unit_of."""
    blocks = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
    distance = blocks
    if cutlass.const_expr(in_sections(mask, False)):
        head_bytes = _section_bytes(sizes, widths, mask, False, most)
        distance = blocks * section_width(sizes.heads_kv * sizes.batch, head_bytes)
    return Ahead(distance, blocks, sizes.heads_q // sizes.heads_kv)


@cute.jit
def unit_of(
    index: Int32,
    sizes: Sizes,
    tile: cutlass.Constexpr,
    widths: cutlass.Constexpr,
    mask: cutlass.Constexpr,
    in_turn: cutlass.Constexpr = False,
    most: cutlass.Constexpr = 0,
) -> Unit:
    """The index-th of unit_count. `widths`: (width_qk, width_v); `most`: heads of few keys worked on together.

    `in_turn`: CTAs add to a query tile's dQ in the order in which they took its key tiles, so that nobody waits for one
    that has not started, and walk so that those before are ahead at every query tile. From the last query tile back, if
    the first keys were taken first: later key tiles see no fewer of the last queries. Causal, that order has long units
    first and short ones soon behind one another, so that it is kept for the last heads, where it makes all end
    together; before, the last keys are taken first, and who starts at its diagonal is behind them. That spreads CTAs
    over all of a head, and a group's heads, walked together, over more than L2 holds: groups keep the one order, in
    which a query tile of theirs has time for those who follow.
    """
    blocks = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
    group, way = sizes.heads_q // sizes.heads_kv, Int32(-1 if in_turn else 1)
    if cutlass.const_expr(in_sections(mask, in_turn)):
        # the first keys are seen by most query tiles and start first, within as many heads as keep Q, dO, dQ in L2
        rows, head_bytes = sizes.heads_kv * sizes.batch, _section_bytes(sizes, widths, mask, in_turn, most)
        work = longest_first(index, blocks, sizes.heads_kv, sizes.batch, head_bytes, Int32(1))
        key_block = blocks - 1 - work.m_block
        if cutlass.const_expr(in_turn and mask.causal):
            early = (group == 1) & (work.batch * sizes.heads_kv + work.head < last_section(rows, head_bytes))
            key_block = Int32(cutlass.select_(early, work.m_block, key_block))
            way = Int32(cutlass.select_(early, Int32(1), way))
    else:
        work = head_by_head(index, blocks, sizes.heads_kv)
        key_block = work.m_block
    seqlens, bounds = (sizes.seqlen_q, sizes.seqlen_k), (sizes.left, sizes.right)
    tiles = row_tiles(key_block * tile.tile_n, tile, seqlens, bounds, mask)
    return Unit(key_block, work.head, work.batch, work.head * group, group, tiles, way)


def ticket_of(index: Int32, unit: Unit) -> tuple:
    """A unit as integers, to be handed to other warps; the first is not 0."""
    return ((index + 1) * unit.way, unit.key_block, unit.head_kv, unit.batch, *unit.tiles)


def index_from(ticket: tuple) -> Int32:
    return cutlass.max(ticket[0], -ticket[0]) - 1


def unit_from(ticket: tuple, group: Int32) -> Unit:
    """What ticket_of was given; `group`: query heads of a head of K and V."""
    key_block, head_kv, batch = ticket[1:4]
    way = Int32(cutlass.select_(ticket[0] > 0, Int32(1), Int32(-1)))
    return Unit(key_block, head_kv, batch, head_kv * group, group, RowTiles(*ticket[4:]), way)


@cute.jit
def first_stop(unit: Unit, in_turn: cutlass.Constexpr) -> tuple:
    """(query tile, query head of the group): where the walk through a unit begins."""
    at = unit.tiles.first
    if cutlass.const_expr(in_turn):
        at = Int32(cutlass.select_(unit.way > 0, at, unit.tiles.last - 1))
    return at, Int32(0)


@cute.jit
def next_stop(stop: tuple, unit: Unit, in_turn: cutlass.Constexpr) -> tuple:
    """Head by head of the group. Where CTAs add in turn, all heads at each query tile: head by head, a short unit would
    be at the second before a long one that was taken earlier."""
    at, member = stop
    if cutlass.const_expr(in_turn):
        member += 1
        if member == unit.group:
            member = Int32(0)
            at += unit.way
    else:
        at += 1
        if at == unit.tiles.last:
            at = unit.tiles.first
            member += 1
    return at, member


@cute.jit
def turn_of(unit: Unit, at: Int32, sizes: Sizes, tile: cutlass.Constexpr, mask: cutlass.Constexpr) -> Int32:
    """How many key tiles of the head were taken before the unit's and see query tile `at`."""
    turn = unit.key_block - first_key_tile(at * tile.tile_m, tile.tile_n, sizes, mask)
    if cutlass.const_expr(mask.causal and not mask.left):
        last_seen = (at + 1) * tile.tile_m - 1 + sizes.seqlen_k - sizes.seqlen_q
        last = cutlass.min(last_seen, sizes.seqlen_k - 1) // tile.tile_n
        turn = Int32(cutlass.select_(unit.way > 0, last - unit.key_block, turn))
    return turn


@cute.jit
def first_key_tile(row_start: Int32, tile_n: int, sizes: Sizes, mask: cutlass.Constexpr) -> Int32:
    """The first of the key tiles whose CTA visits the query tile that starts at row_start."""
    first = Int32(0)
    if cutlass.const_expr(mask.left):
        first = cutlass.max(0, row_start + sizes.seqlen_k - sizes.seqlen_q - sizes.left) // tile_n
    return first
