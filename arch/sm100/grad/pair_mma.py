"""tcgen05 of a pair, issued by the leader: S^T and dP^T of 256 keys, dV, dK, and dQ^T = K^T dS^T over the keys of both.

Each CTA gives half of every B operand: shared memory reads of B, and of A of dQ, are halved. Order as in mma.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ..pipeline import after_wait, commit
from ..schedule import ROWS
from ..tiles import PAIR
from .memory import BackwardShape
from .mma import K_MAJOR, K_STEP, MN_MAJOR, SMEM, TMEM, product
from .pair_memory import BOTH_KEYS
from .pair_pipeline import PairBarriers
from .schedule import HALVES


@dataclass(frozen=True)
class PairMmas:
    """The tiled MMAs, made anew where they are used."""

    shape: BackwardShape
    dtype: type

    def _make(self, majors: tuple, rows: int, source: tcgen05.OperandSource) -> cute.TiledMma:
        two, tile = tcgen05.CtaGroup.TWO, (rows, ROWS)
        return blackwell.make_trivial_tiled_mma(self.dtype, self.dtype, *majors, Float32, two, tile, source)

    def scores(self) -> cute.TiledMma:
        """Of S^T and of dP^T: (keys of both, queries)."""
        return self._make((K_MAJOR, K_MAJOR), BOTH_KEYS, SMEM)

    def by_keys(self) -> cute.TiledMma:
        """Of dK and dV: (keys of both, columns), A from tensor memory."""
        return self._make((K_MAJOR, MN_MAJOR), BOTH_KEYS, TMEM)

    def dq(self) -> cute.TiledMma:
        """(columns, queries): 64 columns of each CTA, over the keys of both."""
        return self._make((MN_MAJOR, MN_MAJOR), ROWS, SMEM)


class Operands(NamedTuple):
    """Descriptors of shared memory, (mma, 1, k steps, 1); layouts of tensor memory."""

    k: cute.Tensor
    v: cute.Tensor
    k_columns: cute.Tensor
    q_rows: cute.Tensor
    q_columns: cute.Tensor
    do_rows: cute.Tensor
    do_columns: cute.Tensor
    ds: cute.Tensor
    s: cute.Layout  # of S^T, dP^T
    weights: cute.Layout  # (mma, 1, 64 / 16): A of dK and dV, of half of the queries
    sums: cute.Layout  # of dK, dV
    dq: cute.Layout
    tmem: cute.Pointer


def make_operands(mmas: PairMmas, smem: tuple, tmem: cute.Pointer) -> Operands:
    """smem: in the order of Operands."""
    s_k, s_v, k_columns, q_rows, q_columns, do_rows, do_columns, s_ds = smem
    scores, by_keys, dq = mmas.scores(), mmas.by_keys(), mmas.dq()

    def products(mma: cute.TiledMma, rows: int) -> cute.Layout:
        return mma.make_fragment_C(mma.partition_shape_C((rows, ROWS))).layout

    return Operands(
        k=scores.make_fragment_A(s_k),
        v=scores.make_fragment_A(s_v),
        k_columns=dq.make_fragment_A(k_columns),
        q_rows=scores.make_fragment_B(q_rows),
        q_columns=by_keys.make_fragment_B(q_columns),
        do_rows=scores.make_fragment_B(do_rows),
        do_columns=by_keys.make_fragment_B(do_columns),
        ds=dq.make_fragment_B(s_ds),
        s=products(scores, BOTH_KEYS),
        weights=by_keys.make_fragment_A(by_keys.partition_shape_A((BOTH_KEYS, mmas.shape.half))).layout,
        sums=products(by_keys, BOTH_KEYS),
        dq=products(dq, ROWS),
        tmem=tmem,
    )


@cute.jit
def _add_weighted(mmas: cutlass.Constexpr, ops: Operands, columns: cutlass.Constexpr, b: cute.Tensor, add: Boolean):
    """dV or dK (+)= P^T or dS^T times b. columns: (of the weights, of the sums)."""
    weights, sums = columns
    mma = mmas.by_keys()
    mma.set(tcgen05.Field.ACCUMULATE, add)
    half = mmas.shape.half
    steps = cutlass.const_expr(half // K_STEP)
    to = cute.make_tensor(ops.tmem + sums, ops.sums)
    for step in cutlass.range_constexpr(HALVES * steps):
        place = cute.recast_ptr(ops.tmem + weights + step // steps * half, dtype=mmas.dtype)
        a = cute.make_tensor(place, ops.weights)
        cute.gemm(mma, to, a[None, None, step % steps], b[None, None, step, 0], to)
        mma.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def _scores(bars: PairBarriers, ops: Operands, mmas: cutlass.Constexpr, phase: Int32):
    cute.arch.mbarrier_wait(bars.q_rows_full, phase)
    s = cute.make_tensor(ops.tmem + mmas.shape.s_column, ops.s)
    product(mmas, "scores", s, ops.k[None, None, None, 0], ops.q_rows[None, None, None, 0])
    commit(bars.s_full, PAIR)
    commit(bars.q_rows_free, PAIR)


@cute.jit
def _gradients(bars: PairBarriers, ops: Operands, mmas: cutlass.Constexpr, phase: Int32):
    cute.arch.mbarrier_wait(bars.do_rows_full, phase)
    dp = cute.make_tensor(ops.tmem + mmas.shape.dp_column, ops.s)
    product(mmas, "scores", dp, ops.v[None, None, None, 0], ops.do_rows[None, None, None, 0])
    commit(bars.dp_full, PAIR)
    commit(bars.do_rows_free, PAIR)


@cute.jit
def multiply_in_pairs(bars: PairBarriers, ops: Operands, mmas: cutlass.Constexpr[PairMmas], steps: Int32):
    """Every product of two key tiles, by the leader."""
    shape, phase = mmas.shape, Int32(0)
    cute.arch.mbarrier_wait(bars.k_full, 0)
    _scores(bars, ops, mmas, phase)
    cute.arch.mbarrier_wait(bars.v_full, 0)
    _gradients(bars, ops, mmas, phase)
    cute.arch.mbarrier_wait(bars.k_columns_full, 0)
    for step in cutlass.range(steps, unroll=1):
        more = step + 1 < steps
        cute.arch.mbarrier_wait(bars.p_ready, phase)
        after_wait()
        cute.arch.mbarrier_wait(bars.do_columns_full, phase)
        _add_weighted(mmas, ops, (shape.s_column, shape.dv_column), ops.do_columns, step > 0)
        commit(bars.do_columns_free, PAIR)
        if more:
            _scores(bars, ops, mmas, phase ^ 1)
        cute.arch.mbarrier_wait(bars.ds_ready, phase)
        cute.arch.fence_acq_rel_cluster()  # dS that the other CTA's warps wrote
        after_wait()
        cute.arch.mbarrier_wait(bars.q_columns_full, phase)
        _add_weighted(mmas, ops, (shape.dp_column, shape.dk_column), ops.q_columns, step > 0)
        commit(bars.q_columns_free, PAIR)
        dq = cute.make_tensor(ops.tmem + shape.dp_column, ops.dq)
        product(mmas, "dq", dq, ops.k_columns[None, None, None, 0], ops.ds[None, None, None, 0])
        commit(bars.dq_full, PAIR)
        if more:
            cute.arch.mbarrier_wait(bars.dq_free, phase)
            after_wait()
            _gradients(bars, ops, mmas, phase ^ 1)
        phase = phase ^ 1
    commit(bars.sums_full, PAIR)
