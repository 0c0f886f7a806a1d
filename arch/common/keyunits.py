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


@cute.jit
def ahead_of(sizes: Sizes, tile: cutlass.Constexpr, widths: cutlass.Constexpr, mask: cutlass.Constexpr) -> Ahead:
    """All pieces of a head are zeroed by those who take units before its own: the distance is as far as the units of a
    head can be apart in the order of unit_of."""
    blocks = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
    distance = blocks
    if cutlass.const_expr(mask.causal and not mask.left):
        distance = blocks * section_width(sizes.heads_kv * sizes.batch, _row_bytes(sizes, widths))
    return Ahead(distance, blocks, sizes.heads_q // sizes.heads_kv)


@cute.jit
def unit_of(
    index: Int32, sizes: Sizes, tile: cutlass.Constexpr, widths: cutlass.Constexpr, mask: cutlass.Constexpr
) -> Unit:
    """The index-th of unit_count. `widths`: (width_qk, width_v)."""
    blocks = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
    group = sizes.heads_q // sizes.heads_kv
    if cutlass.const_expr(mask.causal and not mask.left):
        # the first keys are seen by most query tiles and start first, within as many heads as keep Q, dO, dQ in L2
        work = longest_first(index, blocks, sizes.heads_kv, sizes.batch, _row_bytes(sizes, widths), Int32(1))
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
def first_key_tile(row_start: Int32, tile_n: int, sizes: Sizes, mask: cutlass.Constexpr) -> Int32:
    """The first of the key tiles whose CTA visits the query tile that starts at row_start."""
    first = Int32(0)
    if cutlass.const_expr(mask.left):
        first = cutlass.max(0, row_start + sizes.seqlen_k - sizes.seqlen_q - sizes.left) // tile_n
    return first
