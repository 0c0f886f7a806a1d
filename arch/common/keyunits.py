"""What a CTA of a backward works on: a tile of keys, and the query tiles of its group of heads that see it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .blocks import RowTiles, row_tiles
from .delta import Ahead
from .order import Sizes, head_by_head, longest_first, section_width


class Unit(NamedTuple):
    """What a CTA works on: a tile of keys and the query tiles of its group that see it."""

    key_block: Int32
    head_kv: Int32
    batch: Int32
    head_first: Int32  # of the group's query heads
    group: Int32
    tiles: RowTiles


def unit_count(sizes: Sizes, tile) -> Int32:
    return (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n * sizes.heads_kv * sizes.batch


def _row_bytes(sizes: Sizes, widths: tuple[int, int]) -> Int32:
    """Of Q, dO and dQ of a head, which should stay in L2."""
    rows = cutlass.min(sizes.seqlen_q, 1 << 17)  # beyond any L2, and the product stays within 32 bits
    return rows * (widths[0] * 6 + widths[1] * 2)


def _in_sections(mask, in_turn: bool) -> bool:
    """Are key tiles taken from many heads in turn? Causal, so that the longest come first. CTAs that add in turn are
    then spread over many heads, and few wait for one another; a window parts them as well, see next_stop."""
    return (mask.causal or in_turn) and not mask.left


def _section_bytes(sizes: Sizes, widths: tuple[int, int], in_turn: bool) -> Int32:
    """What a head counts for. In turn CTAs walk a head close behind one another, and so twice as many fit in L2."""
    return _row_bytes(sizes, widths) // 2 if in_turn else _row_bytes(sizes, widths)


@cute.jit
def ahead_of(
    sizes: Sizes,
    tile: cutlass.Constexpr,
    widths: cutlass.Constexpr,
    mask: cutlass.Constexpr,
    in_turn: cutlass.Constexpr = False,
) -> Ahead:
    """All pieces of a head are zeroed by those who take units before its own: the distance is as far as the units of a
    head can be apart in the order of unit_of."""
    blocks = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
    distance = blocks
    if cutlass.const_expr(_in_sections(mask, in_turn)):
        distance = blocks * section_width(sizes.heads_kv * sizes.batch, _section_bytes(sizes, widths, in_turn))
    return Ahead(distance, blocks, sizes.heads_q // sizes.heads_kv)


@cute.jit
def unit_of(
    index: Int32,
    sizes: Sizes,
    tile: cutlass.Constexpr,
    widths: cutlass.Constexpr,
    mask: cutlass.Constexpr,
    in_turn: cutlass.Constexpr = False,
) -> Unit:
    """The index-th of unit_count. `widths`: (width_qk, width_v); `in_turn`: do CTAs add in turn? See next_stop."""
    blocks = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
    group = sizes.heads_q // sizes.heads_kv
    if cutlass.const_expr(_in_sections(mask, in_turn)):
        # the first keys are seen by most query tiles and start first, within as many heads as keep Q, dO, dQ in L2
        head_bytes = _section_bytes(sizes, widths, in_turn)
        work = longest_first(index, blocks, sizes.heads_kv, sizes.batch, head_bytes, Int32(1))
        key_block = blocks - 1 - work.m_block
    else:
        work = head_by_head(index, blocks, sizes.heads_kv)
        key_block = work.m_block
    seqlens, bounds = (sizes.seqlen_q, sizes.seqlen_k), (sizes.left, sizes.right)
    tiles = row_tiles(key_block * tile.tile_n, tile, seqlens, bounds, mask)
    return Unit(key_block, work.head, work.batch, work.head * group, group, tiles)


def ticket_of(live: Int32, unit: Unit) -> tuple:
    """A unit as integers, to be handed to other warps; the first says that there is one."""
    return (live, unit.key_block, unit.head_kv, unit.batch, *unit.tiles)


def unit_from(ticket: tuple, group: Int32) -> Unit:
    """What ticket_of was given; `group`: query heads of a head of K and V."""
    key_block, head_kv, batch = ticket[1:4]
    return Unit(key_block, head_kv, batch, head_kv * group, group, RowTiles(*ticket[4:]))


@cute.jit
def first_stop(unit: Unit, in_turn: cutlass.Constexpr) -> tuple:
    """(query tile, query head of the group): where the walk through a unit begins. See next_stop."""
    at = unit.tiles.first
    if cutlass.const_expr(in_turn):
        at = unit.tiles.last - 1
    return at, Int32(0)


@cute.jit
def next_stop(stop: tuple, unit: Unit, in_turn: cutlass.Constexpr) -> tuple:
    """Head by head, from a unit's first query tile to its last.

    Where CTAs add to dQ in turn, key tile by key tile: from the last to the first, and all heads of the group at each.
    For the key tiles of a head are taken in that order, too, and none ends its queries before an earlier one: whoever
    started before is ahead at every stop. Upwards, a causal tile would start at its diagonal, ahead of all who come
    first, and wait; head by head, a short one would be at the second head before a long one.
    """
    at, member = stop
    if cutlass.const_expr(in_turn):
        member += 1
        if member == unit.group:
            member = Int32(0)
            at -= 1
    else:
        at += 1
        if at == unit.tiles.last:
            at = unit.tiles.first
            member += 1
    return at, member


@cute.jit
def first_key_tile(row_start: Int32, tile_n: int, sizes: Sizes, mask: cutlass.Constexpr) -> Int32:
    """The first of the key tiles whose CTA visits the query tile that starts at row_start."""
    first = Int32(0)
    if cutlass.const_expr(mask.left):
        first = cutlass.max(0, row_start + sizes.seqlen_k - sizes.seqlen_q - sizes.left) // tile_n
    return first
