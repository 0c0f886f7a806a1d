"""tcgen05, issued by one warp: S = Q K^T with both operands in shared memory, O += P V with P in tensor memory.

Order with two query tiles: QK(0), QK(1), then per step PV(0), QK(0) of the next step, PV(1), QK(1) of the next: while
one tile's softmax runs, the other's products do. With a single one: QK of the next step, then PV of this one.

In a pair of CTAs (cta_group::2) the leader's warp issues for both: an instruction of 256 rows takes 128 of A from each
CTA and half of B from each, keys of K or columns of V; each keeps the products of its rows. Both see the same keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from .memory import ForwardShape
from .pipeline import Barriers, Ring, advanced, after_wait, commit
from .tiles import SCORE_SLOTS

K_STEP = 16  # tcgen05's K for 16-bit operands
TAIL = 4  # the last quarter of P comes with a barrier of its own


@dataclass(frozen=True)
class ForwardMmas:
    """The two tiled MMAs, made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    shape: ForwardShape
    dtype: type

    def _make(self, b_major: OperandMajorMode, columns: int, source: tcgen05.OperandSource) -> cute.TiledMma:
        k_major, group = OperandMajorMode.K, tcgen05.CtaGroup(self.shape.ctas)
        tile = (self.shape.mma_rows, columns)
        return blackwell.make_trivial_tiled_mma(self.dtype, self.dtype, k_major, b_major, Float32, group, tile, source)

    def qk(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.K, self.shape.tile.tile_n, tcgen05.OperandSource.SMEM)

    def pv(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.MN, self.shape.width_v, tcgen05.OperandSource.TMEM)


class Fragments(NamedTuple):
    """Operand descriptors; layouts of what lies in tensor memory, which starts at `tmem`."""

    q: cute.Tensor  # (mma, 1, width_qk / 16, query_tiles)
    k: cute.Tensor  # (mma, 1, key_chunk / 16, slots)
    v: cute.Tensor  # (mma, 1, value_chunk / 16, slots)
    s: cute.Layout  # (mma, 1, 1) float32
    p: cute.Layout  # (mma, 1, tile_n / 16) 16-bit
    o: cute.Layout  # (mma, 1, 1) float32
    tmem: cute.Pointer


def make_fragments(mmas: ForwardMmas, smem: tuple, tmem: cute.Pointer) -> Fragments:
    s_q, s_k, s_v = smem
    shape, qk, pv, rows = mmas.shape, mmas.qk(), mmas.pv(), mmas.shape.mma_rows
    return Fragments(
        q=qk.make_fragment_A(s_q),
        k=qk.make_fragment_B(s_k),
        v=pv.make_fragment_B(s_v),
        s=qk.make_fragment_C(qk.partition_shape_C((rows, shape.tile.tile_n))).layout,
        p=pv.make_fragment_A(pv.partition_shape_A((rows, shape.tile.tile_n))).layout,
        o=pv.make_fragment_C(pv.partition_shape_C((rows, shape.width_v))).layout,
        tmem=tmem,
    )


class MmaContext(NamedTuple):
    bars: Barriers
    frags: Fragments


@cute.jit
def _scores_of_chunk(
    context: MmaContext,
    mmas: cutlass.Constexpr,
    tile: cutlass.Constexpr[int],
    slot: int | Int32,
    chunk: int | Int32,
    ring: Ring,
) -> Ring:
    """S (+)= Q K^T over one chunk's columns. -> the place after it."""
    shape, frags, bars = mmas.shape, context.frags, context.bars
    mma = mmas.qk()
    mma.set(tcgen05.Field.ACCUMULATE, chunk > 0)
    steps = cutlass.const_expr(shape.key_chunk // K_STEP)
    s = cute.make_tensor(frags.tmem + shape.s_column(slot), frags.s)
    cute.arch.mbarrier_wait(bars.ring_full + ring.slot, ring.phase)
    for step in cutlass.range_constexpr(steps):
        q = frags.q[None, None, chunk * steps + step, tile]
        cute.gemm(mma, s, q, frags.k[None, None, step, ring.slot], s)
        mma.set(tcgen05.Field.ACCUMULATE, True)
    if cutlass.const_expr(tile == shape.query_tiles - 1):
        commit(bars.ring_free + ring.slot, shape.ctas)
    return advanced(ring, shape.tile.stages)


@cute.jit
def _scores(
    context: MmaContext, mmas: cutlass.Constexpr, tile: cutlass.Constexpr[int], slot: int | Int32, ring: Ring
) -> Ring:
    """S of one query tile, from the K chunks at `ring`; the last query tile frees them. -> the place after them.

    Several chunks are a loop on purpose: unrolled, ptxas holds a descriptor of Q for each of up to 16 steps in uniform
    registers from one key tile to the next, and the address of shared memory spills.
    """
    chunks = cutlass.const_expr(mmas.shape.key_chunks)
    if cutlass.const_expr(chunks == 1):
        ring = _scores_of_chunk(context, mmas, tile, slot, 0, ring)
    else:
        for chunk in cutlass.range(chunks, unroll=1):
            ring = _scores_of_chunk(context, mmas, tile, slot, chunk, ring)
    commit(context.bars.s_full + slot, mmas.shape.ctas)
    return ring


class Probabilities(NamedTuple):
    """One P to multiply by V."""

    slot: int | Int32  # of S, over which it lies
    phase: Int32
    accumulate: Boolean  # False at the first step: O holds something else


@cute.jit
def _output(
    context: MmaContext, mmas: cutlass.Constexpr, tile: cutlass.Constexpr[int], p: Probabilities, ring: Ring
) -> Ring:
    """O += P V of one query tile, from the V chunks at `ring`; P comes in two parts. -> the place after them."""
    shape, frags, bars = mmas.shape, context.frags, context.bars
    mma = mmas.pv()
    mma.set(tcgen05.Field.ACCUMULATE, p.accumulate)
    per_chunk = cutlass.const_expr(shape.value_chunk // K_STEP)
    steps = cutlass.const_expr(shape.tile.tile_n // K_STEP)
    weights = cute.make_tensor(cute.recast_ptr(frags.tmem + shape.p_column(p.slot), dtype=mmas.dtype), frags.p)
    o = cute.make_tensor(frags.tmem + shape.o_column(tile), frags.o)
    cute.arch.mbarrier_wait(bars.p_ready + p.slot, p.phase)
    after_wait()
    for step in cutlass.range_constexpr(steps):
        if cutlass.const_expr(step % per_chunk == 0):
            cute.arch.mbarrier_wait(bars.ring_full + ring.slot, ring.phase)
        if cutlass.const_expr(step == steps - steps // TAIL):
            cute.arch.mbarrier_wait(bars.p_tail + p.slot, p.phase)
            after_wait()
        cute.gemm(mma, o, weights[None, None, step], frags.v[None, None, step % per_chunk, ring.slot], o)
        mma.set(tcgen05.Field.ACCUMULATE, True)
        if cutlass.const_expr(step % per_chunk == per_chunk - 1):
            if cutlass.const_expr(tile == shape.query_tiles - 1):
                commit(bars.ring_free + ring.slot, shape.ctas)
            ring = advanced(ring, shape.tile.stages)
    return ring


class MmaState(NamedTuple):
    """What lasts from one work tile to the next."""

    ring: Ring
    q_phase: Int32
    p: tuple  # two query tiles: phases of their P; a single one: the Ring of S slots


def _free_queries(context: MmaContext, shape: ForwardShape):
    """After the last Q K^T of a work tile. Where O takes Q's room no CTA has a second one."""
    if not shape.shared_output:
        for tile in range(shape.query_tiles):
            commit(context.bars.q_free + tile, shape.ctas)


@cute.jit
def multiply_pair(context: MmaContext, mmas: cutlass.Constexpr, steps: Int32, skip: Int32, state: MmaState) -> MmaState:
    """Every product of two query tiles. skip: steps that the first sits out at the start, 0 or 1: under a causal mask
    it may see one key tile less."""
    shape, bars = mmas.shape, context.bars
    ring, q_phase = state.ring, state.q_phase
    phase_0, phase_1 = state.p
    cute.arch.mbarrier_wait(bars.q_full, q_phase)
    if skip == 0:
        _scores(context, mmas, 0, 0, ring)
    cute.arch.mbarrier_wait(bars.q_full + 1, q_phase)
    ring = _scores(context, mmas, 1, 1, ring)
    for step in cutlass.range(steps - 1, unroll=1):
        after = ring
        if step >= skip:
            after = _output(context, mmas, 0, Probabilities(0, phase_0, step > skip), ring)
            phase_0 = phase_0 ^ 1
        else:
            for _ in cutlass.range_constexpr(shape.value_chunks):
                after = advanced(after, shape.tile.stages)
        _scores(context, mmas, 0, 0, after)
        ring = _output(context, mmas, 1, Probabilities(1, phase_1, step > 0), ring)
        phase_1 = phase_1 ^ 1
        ring = _scores(context, mmas, 1, 1, ring)
    _free_queries(context, shape)
    _output(context, mmas, 0, Probabilities(0, phase_0, steps - 1 > skip), ring)
    commit(bars.o_full, shape.ctas)
    ring = _output(context, mmas, 1, Probabilities(1, phase_1, steps > 1), ring)
    commit(bars.o_full + 1, shape.ctas)
    return MmaState(ring, q_phase ^ 1, (phase_0 ^ 1, phase_1 ^ 1))


@cute.jit
def multiply_single(context: MmaContext, mmas: cutlass.Constexpr, steps: Int32, state: MmaState) -> MmaState:
    """Every product of a single query tile: S of the next step runs under the softmax of this one."""
    bars, ring, p = context.bars, state.ring, Ring(*state.p)
    cute.arch.mbarrier_wait(bars.q_full, state.q_phase)
    ring = _scores(context, mmas, 0, p.slot, ring)
    for step in cutlass.range(steps - 1, unroll=1):
        following = advanced(p, SCORE_SLOTS)
        ring = _scores(context, mmas, 0, following.slot, ring)
        ring = _output(context, mmas, 0, Probabilities(p.slot, p.phase, step > 0), ring)
        commit(bars.o_full, mmas.shape.ctas)
        p = following
    _free_queries(context, mmas.shape)
    ring = _output(context, mmas, 0, Probabilities(p.slot, p.phase, steps > 1), ring)
    commit(bars.o_full, mmas.shape.ctas)
    p = advanced(p, SCORE_SLOTS)
    return MmaState(ring, state.q_phase ^ 1, (p.slot, p.phase))
