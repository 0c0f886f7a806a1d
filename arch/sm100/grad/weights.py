"""P and dS, a key a thread and half of a query tile's rows a warpgroup: S^T and dP^T from tensor memory, P^T and dS^T
back over them, dS into shared memory as well. LSE and delta belong to columns, so every thread reads all of them."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.spec.mask import Mask

from ...common.numeric import capped_weights, exp2, pack_pair
from ..mask import Visible, mask_row
from ..memory import load_columns, store_columns
from ..pipeline import Ring, advanced, after_wait, arrive_warp, before_arrive
from .memory import BackwardShape
from .pipeline import Barriers

PART = 32  # columns in registers of dP^T, and turned into 16 bits, at a time
VECTOR = 8  # 16-bit values of a 16-byte access
NEVER = 1 << 30  # further than any column of a tile


@dataclass(frozen=True)
class WeighPlan:
    """The static part."""

    shape: BackwardShape
    dtype: type
    mask: Mask
    softcap: bool


class WeighContext(NamedTuple):
    """What one thread needs; read-only."""

    bars: Barriers
    tmem: cute.Pointer
    rows: cute.Tensor  # (2 * 128, q slots) float32: LSE in base 2, then delta
    ds: cute.Tensor  # (keys, queries), swizzled
    factors: tuple  # (what the exponent takes scores times, what goes inside a softcap)
    thread: Int32  # in its warpgroup: the key of the tile
    half: Int32  # of the queries: both warpgroups run the same code
    key: Int32
    seqlens: tuple
    bounds: tuple  # (left, right) of a window


@cute.jit
def visible_queries(context: WeighContext, row_start: Int32, mask: cutlass.Constexpr[Mask]) -> Visible:
    """Columns that see this thread's key, the first being query row_start; none where the key does not exist."""
    seqlen_q, seqlen_k = context.seqlens
    left, right = context.bounds
    diagonal = context.key - (seqlen_k - seqlen_q) - row_start
    first, end = Int32(0), Int32(NEVER)
    if cutlass.const_expr(mask.causal):
        first = diagonal
    elif cutlass.const_expr(mask.right):
        first = diagonal - right
    if cutlass.const_expr(mask.left):
        end = diagonal + left + 1
    if context.key >= seqlen_k:
        end = Int32(0)
    return Visible(first if cutlass.const_expr(mask.right) else None, end)


def _fours(values: cute.Tensor, first: Int32) -> cute.Tensor:
    """values[first:] in 16-byte pieces, (4, pieces)."""
    start = (values.iterator + first).align(16)
    return cute.make_tensor(start, cute.make_layout((4, (cute.size(values) // 2) // 4)))


def _probabilities(scores: cute.Tensor, packed: cute.Tensor, lse: cute.Tensor, context: WeighContext, plan: WeighPlan):
    """Scores become P = exp2(scale * score - LSE), rounded into `packed` too; under a softcap they become P times its
    slope, by which the score's gradient is less than that of what the exponent sees.

    The difference is taken the other way round, and the sign is MUFU's to change.
    """
    scale = context.factors[0]
    for c in range(0, cute.size(scores), 4):
        four = lse[None, c // 4].load()
        for i in range(0, 4, 2):
            pair = scores[c + i], scores[c + i + 1]
            if plan.softcap:
                low, scores[c + i] = capped_weights(pair[0], four[i], context.factors)
                high, scores[c + i + 1] = capped_weights(pair[1], four[i + 1], context.factors)
            else:
                x = cute.arch.fma_packed_f32x2(pair, (-scale, -scale), (four[i], four[i + 1]))
                low, high = exp2(-x[0]), exp2(-x[1])
                scores[c + i], scores[c + i + 1] = low, high
            packed[(c + i) // 2] = pack_pair(low, high, plan.dtype)


def _score_gradients(weights: cute.Tensor, first: int, dp: cute.Tensor, packed: cute.Tensor, delta: cute.Tensor, dtype):
    """packed = weights[first:] * (dP - delta), rounded; for one PART."""
    for c in range(0, PART, 4):
        four = delta[None, (first + c) // 4].load()
        for i in range(0, 4, 2):
            shift = (-four[i], -four[i + 1])
            gradient = cute.arch.add_packed_f32x2((dp[c + i], dp[c + i + 1]), shift)
            weight = weights[first + c + i], weights[first + c + i + 1]
            low, high = cute.arch.mul_packed_f32x2(weight, gradient)
            packed[(c + i) // 2] = pack_pair(low, high, dtype)


def _announce(barrier: cute.Pointer):
    """What was stored to tensor memory may be multiplied."""
    cute.arch.fence_view_async_tmem_store()
    before_arrive()
    arrive_warp(barrier)


@cute.jit
def weigh_step(context: WeighContext, plan: cutlass.Constexpr[WeighPlan], queries: Ring, turn: tuple) -> Ring:
    """One query tile. turn: (step, first row of the tile, is it masked). -> the next place among the slots of Q."""
    bars, thread, half, shape = context.bars, context.thread, context.half, plan.shape
    step, row_start, masked = turn
    phase, columns = step % 2, cutlass.const_expr(shape.half)
    scores = cute.make_rmem_tensor((columns,), Float32)
    packed = cute.make_rmem_tensor((columns // 2,), Int32)
    s, dp = context.tmem + shape.s_column + half * columns, context.tmem + shape.dp_column + half * columns
    rows = context.rows[None, queries.slot]
    cute.arch.mbarrier_wait(bars.q_full + queries.slot, queries.phase)
    cute.arch.mbarrier_wait(bars.s_full, phase)
    after_wait()
    for first in cutlass.range_constexpr(0, columns, PART):
        load_columns(s, first, scores, first, PART, thread)
    cute.arch.fence_view_async_tmem_load()
    if masked:
        mask_row(scores, visible_queries(context, row_start + half * columns, plan.mask))
    _probabilities(scores, packed, _fours(rows, half * columns), context, plan)
    for first in cutlass.range_constexpr(0, columns // 2, PART):
        store_columns(s, first, packed, first, PART, thread)
    _announce(bars.p_ready)
    cute.arch.mbarrier_wait(bars.dq_full, phase ^ 1)  # of the tile before: its dS has been read
    cute.arch.mbarrier_wait(bars.dp_full, phase)
    after_wait()
    _leave_gradients(context, plan, scores, (dp, _fours(rows, shape.tile.tile_m + half * columns)))
    return advanced(queries, shape.q_slots)


def _leave_gradients(context: WeighContext, plan: WeighPlan, weights: cute.Tensor, sources: tuple):
    """dS into tensor memory and into shared memory. sources: (dP^T in tensor memory, delta)."""
    dp, delta = sources
    thread, shape = context.thread, plan.shape
    gradients = cute.make_rmem_tensor((PART,), Float32)
    packed = cute.make_rmem_tensor((PART // 2,), Int32)
    vectors = cute.make_tensor(
        cute.recast_ptr(packed.iterator, dtype=plan.dtype), cute.make_layout((VECTOR, PART // VECTOR))
    )
    room = cute.tiled_divide(context.ds, (1, VECTOR))  # ((1, 8), keys, queries / 8)
    for first in range(0, shape.half, PART):
        load_columns(dp, first, gradients, 0, PART, thread)
        cute.arch.fence_view_async_tmem_load()
        _score_gradients(weights, first, gradients, packed, delta, plan.dtype)
        store_columns(dp, first // 2, packed, 0, PART // 2, thread)
        start = context.half * (shape.half // VECTOR) + first // VECTOR
        for i in range(PART // VECTOR):
            cute.autovec_copy(vectors[None, i], room[(0, None), thread, start + i])
    cute.arch.fence_view_async_shared()
    _announce(context.bars.ds_ready)
