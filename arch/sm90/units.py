"""WHAT: the units of work of a forward launch, and the key tiles each one visits."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.spec.plan import Plan

from ..common.blocks import KeyTiles, key_tiles, never_none, part_of, window_tiles
from ..common.order import Sizes, WorkTile, head_by_head, longest_first, tile_count
from ..common.ragged import Place
from .queue import Ticket
from .schedule import ROWS_PER_WARPGROUP


class Unit(NamedTuple):
    """What a CTA works on at a time: a query tile, or one split of its keys."""

    work: WorkTile
    row_start: Int32
    split: Int32
    tiles: KeyTiles
    skips: Int32  # 1 for a warpgroup that sees nothing of the last key tile, which its `tiles` leave out, else 0
    halves: Int32  # 1 for a warpgroup that sees nothing of the second half of the last key tile in its `tiles`
    place: Place | None = None  # of packed sequences, the one that row_start and tiles are of


class Units:
    """Of one Plan."""

    def __init__(self, plan: Plan):
        self.tile, self.mask = plan.tile, plan.mask
        self.key_bytes = 2 * (plan.head_dim + plan.head_dim_v)  # of a row of K and one of V

    def count(self, sizes: Sizes, splits: Int32) -> Int32:
        return splits * tile_count(sizes.seqlen_q, self.tile.tile_m, sizes.heads_q, sizes.batch)

    @cute.jit
    def ticket(self, index: Int32, sizes: Sizes, splits: Int32) -> Ticket:
        m_blocks, group = cute.ceil_div(sizes.seqlen_q, self.tile.tile_m), sizes.heads_q // sizes.heads_kv
        if cutlass.const_expr(self.mask.causal and not self.mask.windowed):
            keys = cutlass.min(sizes.seqlen_k, 1 << 20)  # beyond any L2, and the product stays within 32 bits
            kv_bytes = keys * self.key_bytes
            work = longest_first(index // splits, m_blocks, sizes.heads_q, sizes.batch, kv_bytes, group)
        else:
            work = head_by_head(index // splits, m_blocks, sizes.heads_q)
        return Ticket(Int32(index < self.count(sizes, splits)), work, index % splits)

    @cute.jit
    def unit(self, ticket: Ticket, sizes: Sizes, splits: Int32) -> Unit:
        tile, work = self.tile, ticket.work
        row_start = work.m_block * tile.tile_m
        if cutlass.const_expr(self.mask.windowed):  # its keys are never split
            bounds = (sizes.left, sizes.right)
            tiles = window_tiles(row_start, tile, (sizes.seqlen_q, sizes.seqlen_k), bounds, self.mask)
        else:
            tiles = key_tiles(row_start, tile.tile_m, tile.tile_n, sizes.seqlen_q, sizes.seqlen_k, self.mask.causal)
            tiles = part_of(tiles, ticket.split, splits)
        tiles = never_none(tiles, cute.ceil_div(sizes.seqlen_k, tile.tile_n))
        return Unit(work, row_start, ticket.split, tiles, Int32(0), Int32(0))

    @cute.jit
    def of_warpgroup(self, unit: Unit, group: Int32, sizes: Sizes) -> Unit:
        """The unit as a warpgroup walks it: its 64 rows see less than the query tile's last one.

        One key tile is left out at most. Further ahead, a warpgroup would wait for keys that are loaded after values
        whose slot it holds itself."""
        tile = self.tile
        if cutlass.const_expr(not (self.mask.causal and (tile.skips or tile.halves))):
            return unit
        first, last, unmasked, whole = unit.tiles
        last_row = unit.row_start + ROWS_PER_WARPGROUP * (group + 1) - 1
        last_key = last_row + sizes.seqlen_k - sizes.seqlen_q
        skips = Int32(0)
        if cutlass.const_expr(tile.skips):
            hidden = (last - first > 1) & ((last - 1) * tile.tile_n > last_key)
            skips = Int32(cutlass.select_(hidden, Int32(1), Int32(0)))
            last = last - skips
        middle = (last - 1) * tile.tile_n + tile.tile_n // 2
        halves = Int32(cutlass.select_(middle > last_key, Int32(1), Int32(0)))
        return Unit(unit.work, unit.row_start, unit.split, KeyTiles(first, last, unmasked, whole), skips, halves)
