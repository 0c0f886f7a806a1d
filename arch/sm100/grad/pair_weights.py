"""P and dS in a pair of CTAs: as weights.py, but dS of each half of the queries goes to the CTA that multiplies it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..mask import mask_row
from ..memory import load_columns, store_columns
from ..pipeline import after_wait, arrive_leader, arrive_warp, before_arrive
from ..schedule import ROWS
from ..tiles import PAIR
from .pair_memory import ROW_SLOTS
from .pair_pipeline import PairBarriers
from .weights import PART, VECTOR, WeighPlan, probabilities, row_values, score_gradients, visible_queries

ROW_BYTES = 2 * ROWS // PAIR  # of sdS: 64 queries, one row of the 128-byte swizzle


class PairWeighContext(NamedTuple):
    """What one thread needs; read-only. As WeighContext where names are the same."""

    bars: PairBarriers
    tmem: cute.Pointer
    rows: cute.Tensor  # (2 * 128, ROW_SLOTS)
    ds: cute.Pointer  # of this CTA's sdS
    factors: tuple
    thread: Int32
    half: Int32
    row: Int32  # of sdS: this thread's key among those of both CTAs
    key: Int32
    seqlens: tuple
    bounds: tuple


def _announce(barrier: cute.Pointer):
    """What was stored to tensor memory may be multiplied, by the leader."""
    cute.arch.fence_view_async_tmem_store()
    before_arrive()
    arrive_leader(barrier, PAIR)


@cute.jit
def weigh_step_of_pair(context: PairWeighContext, plan: cutlass.Constexpr[WeighPlan], turn: tuple):
    """One query tile. turn: (step, first row of the tile, is it masked)."""
    bars, thread, half, shape = context.bars, context.thread, context.half, plan.shape
    step, row_start, masked = turn
    phase, slot, columns = step % 2, step % ROW_SLOTS, cutlass.const_expr(shape.half)
    scores = cute.make_rmem_tensor((columns,), Float32)
    packed = cute.make_rmem_tensor((columns // 2,), Int32)
    s = context.tmem + shape.s_column + half * columns
    rows = context.rows[None, slot]
    cute.arch.mbarrier_wait(bars.rows_full + slot, step // ROW_SLOTS % 2)
    cute.arch.mbarrier_wait(bars.s_full, phase)
    after_wait()
    for first in cutlass.range_constexpr(0, columns, PART):
        load_columns(s, first, scores, first, PART, thread)
    cute.arch.fence_view_async_tmem_load()
    if masked:
        mask_row(scores, visible_queries(context, row_start + half * columns, plan.mask))
    probabilities(scores, packed, row_values(rows, half * columns, columns, ROWS), context, plan)
    store_columns(s, 0, packed, 0, columns // 2, thread)
    _announce(bars.p_ready)
    cute.arch.mbarrier_wait(bars.dq_full, phase ^ 1)  # of the tile before: dS has been read, in both CTAs
    cute.arch.mbarrier_wait(bars.dp_full, phase)
    after_wait()
    _leave_gradients(context, plan, scores, rows)
    arrive_warp(bars.rows_free + slot)


def _leave_gradients(context: PairWeighContext, plan: WeighPlan, weights: cute.Tensor, rows: cute.Tensor):
    """dS into tensor memory, and into the shared memory of the CTA whose half of the queries it is."""
    thread, shape = context.thread, plan.shape
    start = context.half * shape.half
    dp = context.tmem + shape.dp_column + start
    gradients = cute.make_rmem_tensor((PART,), Float32)
    packed = cute.make_rmem_tensor((PART // 2,), Int32)
    room = cute.arch.map_dsmem_ptr(context.ds, context.half).toint() + context.row * ROW_BYTES
    for first in range(0, shape.half, PART):
        load_columns(dp, first, gradients, 0, PART, thread)
        cute.arch.fence_view_async_tmem_load()
        delta = row_values(rows, ROWS + start + first, PART, ROWS)
        score_gradients(weights, first, gradients, packed, (delta, plan.dtype))
        store_columns(dp, first // 2, packed, 0, PART // 2, thread)
        for i in range(PART // VECTOR):
            place = room + (((first // VECTOR + i) ^ (context.row % 8)) * 16)
            cute.arch.inline_ptx(
                "st.shared::cluster.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[place, *(packed[4 * i + j] for j in range(4))],
            )
    cute.arch.fence_proxy("async.shared", space="cluster")
    cute.arch.fence_acq_rel_cluster()
    _announce(context.bars.ds_ready)
