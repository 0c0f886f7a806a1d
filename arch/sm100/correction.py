"""The correction role: one warpgroup multiplies O in tensor memory by what the softmax asks, where a row asks at all.

A warp whose 32 rows all kept their maxima leaves O alone, and most do: see KEEP in softmax.py.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .memory import ForwardShape, load_columns, store_columns
from .pipeline import Barriers, Ring, advanced, after_wait, arrive_leader, arrive_warp, before_arrive
from .tiles import SCORE_SLOTS

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
    slot: int | Int32,
    phases: tuple[Int32, Int32],
    started: Boolean,
):
    """One key tile of one query tile. slot: of S; phases: of the factors, of O; started: O holds something.

    With two query tiles S of this step was committed after P V of the step before, so O is complete once a factor has
    come; with a single one O has to be waited for.
    """
    factor = receive_factor(context, tile, phases[0])
    asked = cute.arch.vote_any_sync(factor != 1.0)
    if started:
        if cutlass.const_expr(shape.query_tiles == 1):
            cute.arch.mbarrier_wait(context.bars.o_full + tile, phases[1])
        if asked:
            after_wait()
            rescale_output(context, shape, tile, factor)
    before_arrive()
    arrive_leader(context.bars.p_ready + slot, shape.ctas)


class CorrectionState(NamedTuple):
    """What lasts from one work tile to the next."""

    factors: tuple  # phases, of each query tile
    o_phase: Int32
    slot: Ring  # of S, with a single query tile


@cute.jit
def correct_pair(
    context: CorrectionContext,
    shape: cutlass.Constexpr[ForwardShape],
    steps: Int32,
    skip: Int32,
    state: CorrectionState,
) -> CorrectionState:
    """All steps of two query tiles, in the order in which the MMA warp waits for them; skip: as there."""
    first, second = state.factors
    for step in cutlass.range(steps, unroll=1):
        if step >= skip:
            correct_step(context, shape, 0, 0, (first, state.o_phase), step > skip)
            first = first ^ 1
        correct_step(context, shape, 1, 1, (second, state.o_phase), step > 0)
        second = second ^ 1
    return CorrectionState((first, second), state.o_phase, state.slot)


@cute.jit
def correct_single(
    context: CorrectionContext, shape: cutlass.Constexpr[ForwardShape], steps: Int32, state: CorrectionState
) -> CorrectionState:
    factor, unused = state.factors
    o_phase, slot = state.o_phase, state.slot
    for step in cutlass.range(steps, unroll=1):
        correct_step(context, shape, 0, slot.slot, (factor, o_phase), step > 0)
        factor = factor ^ 1
        if step > 0:
            o_phase = o_phase ^ 1
        slot = advanced(slot, SCORE_SLOTS)
    return CorrectionState((factor, unused), o_phase, slot)
