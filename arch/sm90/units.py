"""WHAT: the units of work of a forward launch, and the key tiles each one visits."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.spec.plan import Plan

from ..common.blocks import KeyTiles, key_tiles, never_none, part_of, window_tiles
from ..common.order import Rounds, Sizes, WorkTile, head_by_head, longest_first, rounds_of, tile_count
from .pipeline import rank_in_cluster
from .queue import Ticket

MANY_TILES = 48  # query tiles of a head from which on a CTA without rows costs less than sharing keys gains


class Unit(NamedTuple):
    """What a CTA works on at a time: a query tile, or one split of its keys."""

    work: WorkTile
    row_start: Int32
    split: Int32
    tiles: KeyTiles


class Units:
    """Of one Plan."""

    def __init__(self, plan: Plan):
        self.tile, self.mask = plan.tile, plan.mask
        self.shared = plan.tile.cluster > 1
        self.key_bytes = 2 * (plan.head_dim + plan.head_dim_v)  # of a row of K and one of V

    @cute.jit
    def together(self, seqlen_q: Int32) -> Int32:
        """CTAs of a cluster. With an odd number of query tiles the last cluster of a head has a CTA without rows."""
        m_blocks = cute.ceil_div(seqlen_q, self.tile.tile_m)
        return Int32(self.tile.cluster) if m_blocks % self.tile.cluster == 0 or m_blocks >= MANY_TILES else Int32(1)

    def count(self, sizes: Sizes, splits: Int32) -> Int32:
        """Of a launch; where CTAs share keys, a unit is a cluster's."""
        if self.shared:
            return self._blocks(sizes) * sizes.heads_q * sizes.batch
        return splits * tile_count(sizes.seqlen_q, self.tile.tile_m, sizes.heads_q, sizes.batch)

    def rounds(self, sizes: Sizes, splits: Int32) -> Rounds:
        return rounds_of(self.count(sizes, splits), sizes.together if self.shared else 1)

    def _blocks(self, sizes: Sizes) -> Int32:
        """Neighbouring query tiles of a head that are taken together."""
        m_blocks = cute.ceil_div(sizes.seqlen_q, self.tile.tile_m)
        return (m_blocks + sizes.together - 1) // sizes.together

    @cute.jit
    def ticket(self, index: Int32, sizes: Sizes, splits: Int32) -> Ticket:
        if cutlass.const_expr(self.shared):
            work = head_by_head(index, self._blocks(sizes), sizes.heads_q)
            m_block = work.m_block * sizes.together + rank_in_cluster()
            return Ticket(Int32(index < self.count(sizes, splits)), WorkTile(m_block, work.head, work.batch), Int32(0))
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
