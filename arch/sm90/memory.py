"""WHERE: the shared memory of a forward CTA.

sQ  (tile_m, width_qk, q_slots)
sO  (64, width_v, warpgroups)          where it fits
sK  (tile_n, width_qk, stages)         ring
sV  (width_v, tile_n, stages)          ring; stored as loaded, keys x width_v, read by wgmma as an MN-major operand
barriers                               full and empty of every slot of Q, of K, of V, of tickets
tickets (TICKET_WORDS, TICKET_SLOTS)   see queue.py
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, Int64
from cutlass.utils import LayoutEnum

from cute_flash.spec.plan import Tile

from .schedule import ROWS_PER_WARPGROUP

TICKET_SLOTS, TICKET_WORDS = 2, 8  # of the ring in which a CTA's next unit is announced
SWIZZLE_ALIGN = 1024  # bytes: one period of the 128-byte swizzle


class ForwardLayouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    o: cute.ComposedLayout


def forward_layouts(tile: Tile, width_qk: int, width_v: int, dtype: type, q_slots: int = 1) -> ForwardLayouts:
    qk_shape = (tile.tile_m, tile.tile_n, width_qk)
    pv_shape = (tile.tile_m, width_v, tile.tile_n)
    o_shape = (ROWS_PER_WARPGROUP, width_v)
    return ForwardLayouts(
        q=hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, qk_shape, dtype, q_slots),
        k=hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, qk_shape, dtype, tile.stages),
        v=hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, pv_shape, dtype, tile.stages),
        o=hopper.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, o_shape, tile.tile_m // ROWS_PER_WARPGROUP),
    )


def forward_storage(layouts: ForwardLayouts, stages: int, dtype: type, o_apart: bool) -> type:
    q_elements, o_elements, q_slots = cute.cosize(layouts.q), cute.cosize(layouts.o), cute.size(layouts.q, mode=[2])
    if not o_apart:
        o_elements = 0

    @cute.struct
    class Storage:
        q_barriers: cute.struct.MemRange[Int64, 2 * q_slots]
        k_barriers: cute.struct.MemRange[Int64, 2 * stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * stages]
        ticket_barriers: cute.struct.MemRange[Int64, 2 * TICKET_SLOTS]
        tickets: cute.struct.MemRange[Int32, TICKET_WORDS * TICKET_SLOTS]
        q: cute.struct.Align[cute.struct.MemRange[dtype, q_elements], SWIZZLE_ALIGN]
        o: cute.struct.Align[cute.struct.MemRange[dtype, o_elements], SWIZZLE_ALIGN]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], SWIZZLE_ALIGN]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], SWIZZLE_ALIGN]

    return Storage
