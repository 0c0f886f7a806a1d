"""WHERE: the shared memory of a CTA that reads a key-value cache.

sQ     (tile_m, width_qk)              written by the MMA threads
sP     (tile_m, tile_n)                probabilities, likewise
stats  (tile_m, MMA warps) float32     a warp's maximum of each query row, at the end its sum
sK     (tile_n, width_qk, stages)      ring
sV     (width_v, tile_n, stages)       ring; stored as loaded, read by wgmma as an M-major operand
barriers                               full and empty of every slot of K and of V

A slot is filled in boxes: as many rows as a tile and a page have in common.
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int64
from cutlass.utils import LayoutEnum

from cute_flash.spec.plan import Tile

from ..memory import SWIZZLE_ALIGN
from .pipeline import MMA_WARPS


class CacheLayouts(NamedTuple):
    q: cute.ComposedLayout
    p: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout


def cache_layouts(tile: Tile, width_qk: int, width_v: int, dtype: type) -> CacheLayouts:
    rows, keys = tile.tile_m, tile.tile_n
    return CacheLayouts(
        q=hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (keys, rows, width_qk), dtype, 1),
        p=hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (width_v, rows, keys), dtype, 1),
        k=hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (keys, rows, width_qk), dtype, tile.stages),
        v=hopper.make_smem_layout_a(LayoutEnum.COL_MAJOR, (width_v, rows, keys), dtype, tile.stages),
    )


def box_layout(slots: cute.ComposedLayout, box: tuple[int, int]) -> cute.ComposedLayout:
    """Of the first box of a slot: columns of a swizzle atom are together, the next ones a slot's rows further."""
    divided = cute.zipped_divide(cute.slice_(slots, (None, None, 0)).outer, box)
    return cute.make_composed_layout(slots.inner, 0, cute.make_layout(divided.shape[0], stride=divided.stride[0]))


def cache_storage(layouts: CacheLayouts, tile: Tile, dtype: type) -> type:
    stages = tile.stages

    @cute.struct
    class Storage:
        k_barriers: cute.struct.MemRange[Int64, 2 * stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * stages]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, tile.tile_m * MMA_WARPS], 16]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], SWIZZLE_ALIGN]
        p: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.p)], SWIZZLE_ALIGN]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], SWIZZLE_ALIGN]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], SWIZZLE_ALIGN]

    return Storage
