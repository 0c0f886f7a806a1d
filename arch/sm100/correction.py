"""The correction role: one warpgroup multiplies O in tensor memory by what the softmax asks, where a row asks at all.

A warp whose 32 rows all kept their maxima leaves O alone, and most do: see KEEP in softmax.py.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .memory import ForwardShape, load_columns, store_columns
from .pipeline import Barriers, after_wait, arrive_warp, before_arrive

COLUMNS = 32  # of O in registers at a time


class CorrectionContext(NamedTuple):
    bars: Barriers
    tmem: cute.Pointer
    factors: cute.Tensor  # (128, query_tiles)
    thread: Int32  # in the warpgroup: the row of the tile


@cute.jit
def receive_factor(context: CorrectionContext, tile: cutlass.Constexpr[int], phase: Int32) -> Float32:
    cute.arch.mbarrier_wait(context.bars.factor_full + tile, phase)
    factor = context.factors[context.thread, tile]
    arrive_warp(context.bars.factor_free + tile)
    return factor


@cute.jit
def rescale_output(
    context: CorrectionContext, shape: cutlass.Constexpr[ForwardShape], tile: cutlass.Constexpr[int], factor: Float32
):
    values = cute.make_rmem_tensor((COLUMNS,), Float32)
    for first in cutlass.range_constexpr(0, shape.width_v, COLUMNS):
        column = shape.o_column(tile) + first
        load_columns(context.tmem, column, values, 0, COLUMNS, context.thread)
        cute.arch.fence_view_async_tmem_load()
        for c in cutlass.range_constexpr(0, COLUMNS, 2):
            pair = (values[c], values[c + 1])
            values[c], values[c + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))
        store_columns(context.tmem, column, values, 0, COLUMNS, context.thread)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def correct_step(
    context: CorrectionContext,
    shape: cutlass.Constexpr[ForwardShape],
    tile: cutlass.Constexpr[int],
    phase: Int32,
    started: Boolean,
):
    """One key tile of one query tile. phase: of its factors; started: O holds something."""
    factor = receive_factor(context, tile, phase)
    asked = cute.arch.vote_any_sync(factor != 1.0)
    if asked and started:
        after_wait()  # S of this step was committed after the products before it: O is complete
        rescale_output(context, shape, tile, factor)
    before_arrive()
    arrive_warp(context.bars.p_ready + tile)
