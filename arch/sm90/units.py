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


class Unit(NamedTuple):
    """What a CTA works on at a time: a query tile, or one split of its keys."""

    work: WorkTile
    row_start: Int32
    split: Int32
    tiles: KeyTiles
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
        return Unit(work, row_start, ticket.split, tiles)
