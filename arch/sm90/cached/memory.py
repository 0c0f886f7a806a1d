"""WHERE: the shared memory of a CTA that reads a key-value cache.

sK  (tile_n, width_qk, stages)         ring
sV  (width_v, tile_n, stages)          ring; stored as loaded, read by wgmma as an MN-major operand
barriers                               full and empty of every slot of K and of V

Q is in registers. A slot is filled in boxes: as many rows as a tile and a page have in common.
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int64
from cutlass.utils import LayoutEnum

from cute_flash.spec.plan import Tile

from ..memory import SWIZZLE_ALIGN


class CacheLayouts(NamedTuple):
    k: cute.ComposedLayout
    v: cute.ComposedLayout


def cache_layouts(tile: Tile, width_qk: int, width_v: int, dtype: type) -> CacheLayouts:
    return CacheLayouts(
        k=hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (tile.tile_m, tile.tile_n, width_qk), dtype, tile.stages),
        v=hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, (tile.tile_m, width_v, tile.tile_n), dtype, tile.stages),
    )


def box_layout(slots: cute.ComposedLayout, box: tuple[int, int]) -> cute.ComposedLayout:
    """Of the first box of a slot: columns of a swizzle atom are together, the next ones a slot's rows further."""
    divided = cute.zipped_divide(cute.slice_(slots, (None, None, 0)).outer, box)
    return cute.make_composed_layout(slots.inner, 0, cute.make_layout(divided.shape[0], stride=divided.stride[0]))


def cache_storage(layouts: CacheLayouts, stages: int, dtype: type) -> type:
    @cute.struct
    class Storage:
        k_barriers: cute.struct.MemRange[Int64, 2 * stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * stages]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], SWIZZLE_ALIGN]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], SWIZZLE_ALIGN]

    return Storage
