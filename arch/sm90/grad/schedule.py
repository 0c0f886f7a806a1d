"""WHO: one feeding warpgroup and the MMA warpgroups, the registers each may hold, and the keys that a CTA takes.

warp of the feeding warpgroup    does
0                                TMA: K and V once, then Q with its row values and dO, a query tile at a time
1 + w                            adds the part of dQ that MMA warpgroup w left in shared memory to global memory
3                                zeroes where CTAs that start later will add
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common.blocks import RowTiles, row_tiles
from ...common.delta import Ahead
from ...common.order import Sizes, head_by_head, longest_first, section_width
from ..schedule import BUDGETS, Schedule

LOAD_WARP, FIRST_ADD_WARP, ZERO_WARP = 0, 1, 3


def backward_schedule(warpgroups: int) -> Schedule:
    load, mma = BUDGETS[warpgroups]
    return Schedule(warpgroups, load, mma, ping_pong=False)


class Unit(NamedTuple):
    """What a CTA works on: a tile of keys and the query tiles of its group that see it."""

    key_block: Int32
    head_kv: Int32
    batch: Int32
    head_first: Int32  # of the group's query heads
    group: Int32
    tiles: RowTiles


@cute.jit
def unit_of(sizes: Sizes, tile: cutlass.Constexpr, widths: cutlass.Constexpr, mask: cutlass.Constexpr) -> Unit:
    """Of the CTA that asks. `widths`: (width_qk, width_v)."""
    index, _, _ = cute.arch.block_idx()
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


@cute.jit
def ahead_of(sizes: Sizes, tile: cutlass.Constexpr, widths: cutlass.Constexpr, mask: cutlass.Constexpr) -> Ahead:
    """Zeros are made so far ahead that all of a head are made by CTAs that start before any of its own does: as far as
    the key tiles of one head are apart in the order of unit_of."""
    blocks = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
    rows = sizes.heads_kv * sizes.batch
    if cutlass.const_expr(mask.causal and not mask.left):
        rows = section_width(rows, _row_bytes(sizes, widths))
    return Ahead(rows * blocks if cutlass.const_expr(mask.causal and not mask.left) else blocks, blocks, sizes.heads_q // sizes.heads_kv)


def _row_bytes(sizes: Sizes, widths: tuple) -> Int32:
    """Of Q, dO and dQ of a head, which should stay in L2."""
    rows = cutlass.min(sizes.seqlen_q, 1 << 17)  # beyond any L2, and the product stays within 32 bits
    return rows * (widths[0] * 6 + widths[1] * 2)


@cute.jit
def first_key_tile(row_start: Int32, tile_n: int, sizes: Sizes, mask: cutlass.Constexpr) -> Int32:
    """The first of the key tiles whose CTA visits the query tile that starts at row_start."""
    first = Int32(0)
    if cutlass.const_expr(mask.left):
        first = cutlass.max(0, row_start + sizes.seqlen_k - sizes.seqlen_q - sizes.left) // tile_n
    return first
