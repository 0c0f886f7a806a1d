"""Online softmax, one row a thread: S from tensor memory, P back over it, the factor for O to the correction warps."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from ..common.numeric import EXP2_DEGREE, exp2, exp2_polynomial, finite_or_nan, finite_or_zero, mul_rn, pack_pair
from ..common.rowstate import RowState
from .mask import Visible, mask_row
from .memory import ForwardShape, load_columns, store_columns
from .pipeline import Barriers, after_wait, arrive_leader, arrive_warp, before_arrive

CHAINS = 4  # partial maxima of a row
LOAD = 32  # columns of a TMEM load
PART = 32  # scores turned into P at a time
KEEP = -8.0  # log2: a maximum that grew by less is not worth rescaling for; P stays below 2^8, sums far from overflow
SETTLED = 16.0  # a row's sum, in weights of its maximum, from which on it may keep an older one: see _new_reference


@dataclass(frozen=True)
class SoftmaxPlan:
    """The static part of a softmax step."""

    shape: ForwardShape
    dtype: type  # of P
    emulated_pairs: int  # of the PART / 2 pairs that turn into P at a time, how many go through the FMA pipe

    def emulates(self, pair: int) -> bool:
        """Evenly spread, so that both pipes are busy at once."""
        pairs = PART // 2
        return (pair + 1) * self.emulated_pairs // pairs > pair * self.emulated_pairs // pairs

    @property
    def degree(self) -> int:
        return EXP2_DEGREE["bfloat16" if self.dtype is BFloat16 else "float16"]


class SoftmaxContext(NamedTuple):
    """What one thread of a softmax warpgroup needs; read-only."""

    bars: Barriers
    tmem: cute.Pointer
    tile: Int32  # query tile: both warpgroups run the same code
    state: RowState  # one row
    factors: cute.Tensor  # (128,) of this query tile
    scale_log2: Float32
    thread: Int32  # in the warpgroup: the row of the tile
    cap_slope: Float32 | None  # with a softcap: 2 log2(e) scale / softcap


@cute.jit
def _cap_row(scores: cute.Tensor, slope: Float32):
    """Scores become tanh(scale score / softcap) = 1 - 2 / (1 + exp(2 x)), off by 2^-22 at most; the softcap itself is
    in scale_log2. MUFU.TANH is off by 2^-11, which a softcap of 50 makes 2% of a probability."""
    for c in cutlass.range_constexpr(0, cute.size(scores), 2):
        low, high = cute.arch.mul_packed_f32x2((scores[c], scores[c + 1]), (slope, slope))
        low, high = cute.arch.add_packed_f32x2((exp2(low), exp2(high)), (1.0, 1.0))
        pair = (cute.arch.rcp_approx(low), cute.arch.rcp_approx(high))
        scores[c], scores[c + 1] = cute.arch.fma_packed_f32x2(pair, (-2.0, -2.0), (1.0, 1.0))


def _larger(a: Float32, b: Float32) -> Float32:
    """NaN if either is: the polynomial, which clamps what it is given, would hide a score that is NaN."""
    return cute.arch.fmax(a, b, nan=True)


def _row_maximum(scores: cute.Tensor, start: Float32) -> Float32:
    """Several chains: three-input maxima have a latency, and one chain of them would pay it 64 times."""
    chains = [start, *(scores[c] for c in range(CHAINS - 1))]
    for c in range(CHAINS - 1, cute.size(scores)):
        chains[c % CHAINS] = _larger(chains[c % CHAINS], scores[c])
    return _larger(_larger(chains[0], chains[1]), _larger(chains[2], chains[3]))


@cute.jit
def _new_reference(scores: cute.Tensor, context: SoftmaxContext, masked: cutlass.Constexpr[bool]) -> Float32:
    """The subtrahend of this step. Sets maximum and rescale: an old maximum that is at most 2^8 too low is kept.

    Keeping it is exact but for rounding: numerator and denominator carry the same factor (FlashAttention-4's
    conditional rescaling). The weight of a row's true maximum is 1, which 16 bits hold exactly; that of one above the
    reference is rounded like any other. Where few keys carry a row, that is its largest error (up to a fifth more in
    all on scores of deviation 2), so the reference follows the maximum until other keys weigh SETTLED together.
    """
    state, scale = context.state, context.scale_log2
    old = state.maximum[0]
    new = _row_maximum(scores, old)
    subtrahend = mul_rn(new, scale)
    if cutlass.const_expr(masked):
        subtrahend = finite_or_zero(subtrahend)
    else:
        subtrahend = finite_or_nan(subtrahend)
    growth = mul_rn(old, scale) - subtrahend  # at most 0; -inf at the first visible key
    rescale = exp2(growth)
    if growth >= KEEP and state.total[0] >= SETTLED:
        new, subtrahend, rescale = old, mul_rn(old, scale), Float32(1.0)
    state.maximum[0] = new
    state.rescale[0] = rescale
    return subtrahend


@cute.jit
def send_factor(context: SoftmaxContext, phase: Int32, factor: Float32):
    """To the correction warps: what this row of O is to be multiplied by."""
    cute.arch.mbarrier_wait(context.bars.factor_free + context.tile, phase ^ 1)
    context.factors[context.thread] = factor
    arrive_warp(context.bars.factor_full + context.tile)


def _probabilities(scores: cute.Tensor, packed: cute.Tensor, first: int, line: tuple, plan: SoftmaxPlan, masked: bool):
    """scores[first : first + PART] become exp2(scale * score - subtrahend), and pairs of them 16-bit words.

    line: scale and subtrahend. Hidden keys must become 0, which only MUFU gives.
    """
    scale, offset = line[0], -line[1]
    for pair in range(PART // 2):
        c = first + 2 * pair
        x = cute.arch.fma_packed_f32x2((scores[c], scores[c + 1]), (scale, scale), (offset, offset))
        if plan.emulates(pair) and not masked:
            scores[c], scores[c + 1] = exp2_polynomial(x, plan.degree)
        else:
            scores[c], scores[c + 1] = exp2(x[0]), exp2(x[1])
        packed[c // 2] = pack_pair(scores[c], scores[c + 1], plan.dtype)


def _row_sum(scores: cute.Tensor) -> Float32:
    """Two packed chains, four partial sums."""
    sums = [(scores[c], scores[c + 1]) for c in (0, 2)]
    for c in range(4, cute.size(scores), 2):
        sums[c // 2 % 2] = cute.arch.add_packed_f32x2(sums[c // 2 % 2], (scores[c], scores[c + 1]))
    low, high = cute.arch.add_packed_f32x2(*sums)
    return low + high


class SoftmaxSlots(NamedTuple):
    """What lasts from step to step, and from one work tile to the next."""

    first: Int32  # S slot of this warpgroup's first step: its own, or 0 where a single query tile has both
    s: Int32
    s_phase: Int32
    factor_phase: Int32


@cute.jit
def softmax_step(
    context: SoftmaxContext,
    plan: cutlass.Constexpr[SoftmaxPlan],
    slots: SoftmaxSlots,
    visible: Visible | None,
) -> SoftmaxSlots:
    """One key tile. visible: columns that the row sees, None where it sees all. -> the slots of the next step."""
    bars, state, thread, slot = context.bars, context.state, context.thread, slots.s
    tile_n = cutlass.const_expr(plan.shape.tile.tile_n)
    masked = cutlass.const_expr(visible is not None)
    scores = cute.make_rmem_tensor((tile_n,), Float32)
    packed = cute.make_rmem_tensor((tile_n // 2,), Int32)
    s, p = context.tmem + plan.shape.s_column(slot), context.tmem + plan.shape.p_column(slot)
    cute.arch.mbarrier_wait(bars.s_full + slot, slots.s_phase)
    after_wait()
    for first in cutlass.range_constexpr(0, tile_n, LOAD):
        load_columns(s, first, scores, first, LOAD, thread)
    cute.arch.fence_view_async_tmem_load()
    if cutlass.const_expr(context.cap_slope is not None):
        _cap_row(scores, context.cap_slope)
    if cutlass.const_expr(masked):
        mask_row(scores, visible)
    subtrahend = _new_reference(scores, context, masked)
    send_factor(context, slots.factor_phase, state.rescale[0])
    for first in cutlass.range_constexpr(0, tile_n, PART):
        _probabilities(scores, packed, first, (context.scale_log2, subtrahend), plan, masked)
        store_columns(p, first // 2, packed, first // 2, PART // 2, thread)
        if cutlass.const_expr(first == tile_n - 2 * PART):
            _announce(bars.p_ready + slot, plan.shape.ctas)
    _announce(bars.p_tail + slot, plan.shape.ctas)
    state.total[0] = state.total[0] * state.rescale[0] + _row_sum(scores)
    if cutlass.const_expr(plan.shape.query_tiles == 1):
        slot = slot ^ 1
    phase = slots.s_phase ^ 1 if slot == slots.first else slots.s_phase
    return SoftmaxSlots(slots.first, slot, phase, slots.factor_phase ^ 1)


def _announce(barrier: cute.Pointer, ctas: int):
    """What was stored to tensor memory may be multiplied."""
    cute.arch.fence_view_async_tmem_store()
    before_arrive()
    arrive_leader(barrier, ctas)
