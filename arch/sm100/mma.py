"""tcgen05, issued by one warp: S = Q K^T with both operands in shared memory, O += P V with P in tensor memory.

Order with two query tiles: QK(0), QK(1), then per step PV(0), QK(0) of the next step, PV(1), QK(1) of the next: while
one tile's softmax runs, the other's products do.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from .memory import ForwardShape
from .pipeline import Barriers, Ring, advanced, after_wait, commit
from .schedule import ROWS

K_STEP = 16  # tcgen05's K for 16-bit operands
TAIL = 4  # the last quarter of P comes with a barrier of its own


@dataclass(frozen=True)
class ForwardMmas:
    """The two tiled MMAs, made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    shape: ForwardShape
    dtype: type

    def _make(self, b_major: OperandMajorMode, columns: int, source: tcgen05.OperandSource) -> cute.TiledMma:
        k_major, one = OperandMajorMode.K, tcgen05.CtaGroup.ONE
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, b_major, Float32, one, (ROWS, columns), source
        )

    def qk(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.K, self.shape.tile.tile_n, tcgen05.OperandSource.SMEM)

    def pv(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.MN, self.shape.width_v, tcgen05.OperandSource.TMEM)


class Fragments(NamedTuple):
    """Operand descriptors, and accumulators in tensor memory, one of each per query tile where it is a tuple."""

    q: cute.Tensor  # (mma, 1, width_qk / 16, query_tiles)
    k: cute.Tensor  # (mma, 1, key_chunk / 16, slots)
    v: cute.Tensor  # (mma, 1, value_chunk / 16, slots)
    s: tuple  # (mma, 1, 1) float32
    p: tuple  # (mma, 1, tile_n / 16) 16-bit
    o: tuple  # (mma, 1, 1) float32


def make_fragments(mmas: ForwardMmas, smem: tuple, tmem: cute.Pointer) -> Fragments:
    s_q, s_k, s_v = smem
    shape, qk, pv = mmas.shape, mmas.qk(), mmas.pv()
    tiles = range(shape.query_tiles)
    s = qk.make_fragment_C(qk.partition_shape_C((ROWS, shape.tile.tile_n))).layout
    p = pv.make_fragment_A(pv.partition_shape_A((ROWS, shape.tile.tile_n))).layout
    o = pv.make_fragment_C(pv.partition_shape_C((ROWS, shape.width_v))).layout
    return Fragments(
        q=qk.make_fragment_A(s_q),
        k=qk.make_fragment_B(s_k),
        v=pv.make_fragment_B(s_v),
        s=tuple(cute.make_tensor(tmem + shape.s_column(i), s) for i in tiles),
        p=tuple(cute.make_tensor(cute.recast_ptr(tmem + shape.p_column(i), dtype=mmas.dtype), p) for i in tiles),
        o=tuple(cute.make_tensor(tmem + shape.o_column(i), o) for i in tiles),
    )


class MmaContext(NamedTuple):
    bars: Barriers
    frags: Fragments


@cute.jit
def _scores(context: MmaContext, mmas: cutlass.Constexpr, tile: cutlass.Constexpr[int], ring: Ring) -> Ring:
    """S of one query tile, from the K chunks at `ring`; the last query tile frees them. -> the place after them."""
    shape, frags, bars = mmas.shape, context.frags, context.bars
    mma = mmas.qk()
    mma.set(tcgen05.Field.ACCUMULATE, False)
    steps = cutlass.const_expr(shape.key_chunk // K_STEP)
    for chunk in cutlass.range_constexpr(shape.key_chunks):
        cute.arch.mbarrier_wait(bars.ring_full + ring.slot, ring.phase)
        for step in cutlass.range_constexpr(steps):
            q = frags.q[None, None, chunk * steps + step, tile]
            cute.gemm(mma, frags.s[tile], q, frags.k[None, None, step, ring.slot], frags.s[tile])
            mma.set(tcgen05.Field.ACCUMULATE, True)
        if cutlass.const_expr(tile == shape.query_tiles - 1):
            commit(bars.ring_free + ring.slot)
        ring = advanced(ring, shape.tile.stages)
    commit(bars.s_full + tile)
    return ring


@cute.jit
def _output(
    context: MmaContext,
    mmas: cutlass.Constexpr,
    tile: cutlass.Constexpr[int],
    ring: Ring,
    phase: Int32,
    accumulate: cutlass.Boolean,
) -> Ring:
    """O += P V of one query tile; P comes in two parts. phase: of P."""
    shape, frags, bars = mmas.shape, context.frags, context.bars
    mma = mmas.pv()
    mma.set(tcgen05.Field.ACCUMULATE, accumulate)
    per_chunk = cutlass.const_expr(shape.value_chunk // K_STEP)
    steps = cutlass.const_expr(shape.tile.tile_n // K_STEP)
    cute.arch.mbarrier_wait(bars.p_ready + tile, phase)
    after_wait()
    for step in cutlass.range_constexpr(steps):
        if cutlass.const_expr(step % per_chunk == 0):
            cute.arch.mbarrier_wait(bars.ring_full + ring.slot, ring.phase)
        if cutlass.const_expr(step == steps - steps // TAIL):
            cute.arch.mbarrier_wait(bars.p_tail + tile, phase)
            after_wait()
        v = frags.v[None, None, step % per_chunk, ring.slot]
        cute.gemm(mma, frags.o[tile], frags.p[tile][None, None, step], v, frags.o[tile])
        mma.set(tcgen05.Field.ACCUMULATE, True)
        if cutlass.const_expr(step % per_chunk == per_chunk - 1):
            if cutlass.const_expr(tile == shape.query_tiles - 1):
                commit(bars.ring_free + ring.slot)
            ring = advanced(ring, shape.tile.stages)
    return ring


@cute.jit
def multiply_tile(
    context: MmaContext, mmas: cutlass.Constexpr, steps: Int32, skip: Int32, ring: Ring, phases: tuple
) -> tuple[Ring, tuple]:
    """Every product of one work tile with steps > 0. phases: of Q, then of P of each query tile.

    skip: steps that query tile 0 sits out at the start, 0 or 1: under a causal mask it may see one key tile less.
    """
    shape, bars = mmas.shape, context.bars
    q_phase, p_phase_0, p_phase_1 = phases
    two = cutlass.const_expr(shape.query_tiles == 2)
    last = cutlass.const_expr(shape.query_tiles - 1)
    after = ring
    cute.arch.mbarrier_wait(bars.q_full, q_phase)
    if cutlass.const_expr(two):
        if skip == 0:
            _scores(context, mmas, 0, ring)
        cute.arch.mbarrier_wait(bars.q_full + 1, q_phase)
    ring = _scores(context, mmas, last, ring)
    for step in cutlass.range(steps - 1, unroll=1):
        if cutlass.const_expr(two):
            after = ring
            if step >= skip:
                after = _output(context, mmas, 0, ring, p_phase_0, step > skip)
                p_phase_0 = p_phase_0 ^ 1
            else:
                for _ in cutlass.range_constexpr(shape.value_chunks):
                    after = advanced(after, shape.tile.stages)
            _scores(context, mmas, 0, after)
        ring = _output(context, mmas, last, ring, p_phase_1, step > 0)
        p_phase_1 = p_phase_1 ^ 1
        ring = _scores(context, mmas, last, ring)
    if cutlass.const_expr(not shape.shared_output):
        for tile in cutlass.range_constexpr(shape.query_tiles):
            commit(bars.q_free + tile)
    if cutlass.const_expr(two):
        _output(context, mmas, 0, ring, p_phase_0, steps - 1 > skip)
        p_phase_0 = p_phase_0 ^ 1
        commit(bars.o_full)
    ring = _output(context, mmas, last, ring, p_phase_1, steps > 1)
    p_phase_1 = p_phase_1 ^ 1
    commit(bars.o_full + last)
    return ring, (q_phase ^ 1, p_phase_0, p_phase_1)
