"""P and dS, a key a thread and half of a query tile's rows a warpgroup: S^T and dP^T from tensor memory, P^T and dS^T
back over them, dS into shared memory as well. LSE and delta belong to columns, so every thread reads all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.spec.mask import Mask

from ...common.delta import value_place
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
    rows: cute.Tensor  # (2 * tile_m, q slots) float32: LSE in base 2, then delta
    ds: cute.Tensor | None  # (keys, queries), swizzled; None where no dK is made
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


class RowValues(NamedTuple):
    """LSE or delta of some of a tile's rows, in the order of delta.value_place."""

    fours: cute.Tensor  # (4, rows / 4)
    tile_m: int

    def pairs(self) -> Iterator[tuple[int, tuple[Float32, Float32]]]:
        """(row, (its value, that of the next)), for every other row; 16-byte loads, that all threads share."""
        for start in range(0, cute.size(self.fours), 16):
            loaded = [self.fours[None, start // 4 + i].load() for i in range(4)]
            for row in range(0, 16, 2):
                place = value_place(row, self.tile_m)
                yield start + row, (loaded[place // 4][place % 4], loaded[place // 4][place % 4 + 1])


def row_values(values: cute.Tensor, first: Int32, count: int, tile_m: int) -> RowValues:
    start = (values.iterator + first).align(16)
    return RowValues(cute.make_tensor(start, cute.make_layout((4, count // 4))), tile_m)


def probabilities(scores: cute.Tensor, packed: cute.Tensor, lse: RowValues, context: WeighContext, plan: WeighPlan):
    """Scores become P = exp2(scale * score - LSE), rounded into `packed` too; under a softcap they become P times its
    slope, by which the score's gradient is less than that of what the exponent sees.

    The difference is taken the other way round, and the sign is MUFU's to change.
    """
    scale = context.factors[0]
    for c, (first, second) in lse.pairs():
        if plan.softcap:
            low, scores[c] = capped_weights(scores[c], first, context.factors)
            high, scores[c + 1] = capped_weights(scores[c + 1], second, context.factors)
        else:
            x = cute.arch.fma_packed_f32x2((scores[c], scores[c + 1]), (-scale, -scale), (first, second))
            low, high = exp2(-x[0]), exp2(-x[1])
            scores[c], scores[c + 1] = low, high
        packed[c // 2] = pack_pair(low, high, plan.dtype)


def score_gradients(weights: cute.Tensor, first: int, dp: cute.Tensor, packed: cute.Tensor, values: tuple):
    """packed = weights[first:] * (dP - delta), rounded; for one PART. values: (delta of the PART, dtype)."""
    delta, dtype = values
    for c, shift in delta.pairs():
        gradient = cute.arch.add_packed_f32x2((dp[c], dp[c + 1]), (-shift[0], -shift[1]))
        low, high = cute.arch.mul_packed_f32x2((weights[first + c], weights[first + c + 1]), gradient)
        packed[c // 2] = pack_pair(low, high, dtype)


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
    phase, columns, tile_m = step % 2, cutlass.const_expr(shape.half), cutlass.const_expr(shape.tile.tile_m)
    scores = cute.make_rmem_tensor((columns,), Float32)
    packed = cute.make_rmem_tensor((columns // 2,), Int32)
    s = context.tmem + shape.s_column + half * columns
    rows = context.rows[None, queries.slot]
    cute.arch.mbarrier_wait(bars.q_full + queries.slot, queries.phase)
    cute.arch.mbarrier_wait(bars.s_full, phase)
    after_wait()
    for first in cutlass.range_constexpr(0, columns, PART):
        load_columns(s, first, scores, first, PART, thread)
    cute.arch.fence_view_async_tmem_load()
    if masked:
        mask_row(scores, visible_queries(context, row_start + half * columns, plan.mask))
    probabilities(scores, packed, row_values(rows, half * columns, columns, tile_m), context, plan)
    store_columns(s, 0, packed, 0, columns // 2, thread)
    _announce(bars.p_ready)
    if cutlass.const_expr(shape.makes_dk):
        cute.arch.mbarrier_wait(bars.dq_full, phase ^ 1)  # of the tile before: its dS has been read
        cute.arch.mbarrier_wait(bars.dp_full, phase)
        after_wait()
        _leave_gradients(context, plan, scores, rows)
    return advanced(queries, shape.q_slots)


def _leave_gradients(context: WeighContext, plan: WeighPlan, weights: cute.Tensor, rows: cute.Tensor):
    """dS into tensor memory and into shared memory. rows: LSE, then delta."""
    thread, shape = context.thread, plan.shape
    tile_m, start = shape.tile.tile_m, context.half * shape.half
    dp = context.tmem + shape.dp_column + start
    gradients = cute.make_rmem_tensor((PART,), Float32)
    packed = cute.make_rmem_tensor((PART // 2,), Int32)
    vectors = cute.make_tensor(
        cute.recast_ptr(packed.iterator, dtype=plan.dtype), cute.make_layout((VECTOR, PART // VECTOR))
    )
    room = cute.tiled_divide(context.ds, (1, VECTOR))  # ((1, 8), keys, queries / 8)
    for first in range(0, shape.half, PART):
        load_columns(dp, first, gradients, 0, PART, thread)
        cute.arch.fence_view_async_tmem_load()
        delta = row_values(rows, tile_m + start + first, PART, tile_m)
        score_gradients(weights, first, gradients, packed, (delta, plan.dtype))
        store_columns(dp, first // 2, packed, 0, PART // 2, thread)
        for i in range(PART // VECTOR):
            at = context.half * (shape.half // VECTOR) + first // VECTOR + i
            cute.autovec_copy(vectors[None, i], room[(0, None), thread, at])
    cute.arch.fence_view_async_shared()
    _announce(context.bars.ds_ready)
