"""tcgen05, issued by one warp: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.

P^T and dS^T are A operands in tensor memory, where the weighing warps left them; dQ sums over keys, the lanes of dS^T,
so its A operand dS comes from shared memory. Order: S^T(0), dP^T(0), then per query tile dV, S^T of the next, dK, dQ,
dP^T of the next: S^T of the next tile is there before dS of this one, and dQ leaves while the next P is made.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from ..pipeline import Ring, advanced, after_wait, commit, ring_start
from ..schedule import ROWS
from .memory import BackwardShape
from .pipeline import Barriers
from .schedule import HALVES

K_STEP = 16  # tcgen05's K for 16-bit operands
UNROLLED = 8  # k steps at most; more are a loop over TOGETHER, which widths beyond 128 are multiples of
TOGETHER = 4
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SMEM, TMEM = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM


@dataclass(frozen=True)
class BackwardMmas:
    """The tiled MMAs, made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    shape: BackwardShape
    dtype: type

    def _make(self, majors: tuple, tile: tuple[int, int], source: tcgen05.OperandSource) -> cute.TiledMma:
        one = tcgen05.CtaGroup.ONE
        return blackwell.make_trivial_tiled_mma(self.dtype, self.dtype, *majors, Float32, one, tile, source)

    def scores(self) -> cute.TiledMma:
        """Of S^T and of dP^T: (keys, queries)."""
        return self._make((K_MAJOR, K_MAJOR), (self.shape.tile.tile_n, self.shape.tile.tile_m), SMEM)

    def by_keys(self, width: int) -> cute.TiledMma:
        """Of dK and dV: (keys, width), A from tensor memory."""
        return self._make((K_MAJOR, MN_MAJOR), (self.shape.tile.tile_n, width), TMEM)

    def dq(self) -> cute.TiledMma:
        """(queries, width_qk), or (128 of width_qk, queries)."""
        tile_m, shape = self.shape.tile.tile_m, self.shape
        tile = (ROWS, tile_m) if shape.dq_transposed else (tile_m, shape.width_qk)
        return self._make((MN_MAJOR, MN_MAJOR), tile, SMEM)


class Operands(NamedTuple):
    """Descriptors of what lies in shared memory, (mma, 1, k steps, slots), slots of k_columns being every 128 columns
    where dQ is transposed; layouts of what lies in tensor memory."""

    k: cute.Tensor  # A of S^T
    v: cute.Tensor  # A of dP^T
    q: cute.Tensor  # B of S^T
    do: cute.Tensor  # B of dP^T
    ds: cute.Tensor  # A of dQ, or B of dQ^T
    k_columns: cute.Tensor  # B of dQ, or A of dQ^T
    q_columns: cute.Tensor  # B of dK
    do_columns: cute.Tensor  # B of dV
    s: cute.Layout  # of S^T and dP^T, float32
    weights: cute.Layout  # (mma, 1, half / 16): A of dK and dV, of half of the queries
    dv: cute.Layout
    dk: cute.Layout
    dq: cute.Layout
    tmem: cute.Pointer


def make_operands(mmas: BackwardMmas, smem: tuple, tmem: cute.Pointer) -> Operands:
    """smem: tensors in the order of memory.OperandLayouts."""
    s_k, s_v, s_q, s_do, s_ds, k_columns, q_columns, do_columns = smem
    shape = mmas.shape
    tile_m, tile_n = shape.tile.tile_m, shape.tile.tile_n
    scores, dq, dk, dv = mmas.scores(), mmas.dq(), mmas.by_keys(shape.width_qk), mmas.by_keys(shape.width_v)

    def sums(mma: cute.TiledMma, rows: int, columns: int) -> cute.Layout:
        return mma.make_fragment_C(mma.partition_shape_C((rows, columns))).layout

    ds, k_of_dq, dq_shape = dq.make_fragment_A, dq.make_fragment_B, (tile_m, shape.width_qk)
    if shape.dq_transposed:
        ds, k_of_dq, dq_shape = k_of_dq, ds, (ROWS, tile_m)
    return Operands(
        k=scores.make_fragment_A(s_k),
        v=scores.make_fragment_A(s_v),
        q=scores.make_fragment_B(s_q),
        do=scores.make_fragment_B(s_do),
        ds=ds(s_ds),
        k_columns=k_of_dq(k_columns),
        q_columns=dk.make_fragment_B(q_columns),
        do_columns=dv.make_fragment_B(do_columns),
        s=sums(scores, tile_n, tile_m),
        weights=dv.make_fragment_A(dv.partition_shape_A((tile_n, shape.half))).layout,
        dv=sums(dv, tile_n, shape.width_v),
        dk=sums(dk, tile_n, shape.width_qk),
        dq=sums(dq, *dq_shape),
        tmem=tmem,
    )


@cute.jit
def _some_steps(mma: cute.TiledMma, to: cute.Tensor, a: cute.Tensor, b: cute.Tensor, run: tuple):
    """Some k steps. run: (the first, how many, does `to` hold something already)."""
    first, count, add = run
    mma.set(tcgen05.Field.ACCUMULATE, add)
    for step in cutlass.range_constexpr(count):
        cute.gemm(mma, to, a[None, None, first + step], b[None, None, first + step], to)
        mma.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def product(mmas: cutlass.Constexpr, kind: cutlass.Constexpr, to: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """to = a b, operands in shared memory: (mma, 1, k steps); kind: names one of the tiled MMAs.

    Many steps are a loop on purpose: unrolled, ptxas holds a descriptor for each of them in uniform registers from one
    query tile to the next, and others spill.
    """
    steps = cutlass.const_expr(cute.size(b, mode=[2]))
    if cutlass.const_expr(steps <= UNROLLED):
        _some_steps(getattr(mmas, kind)(), to, a, b, (0, steps, False))
    else:
        for part in cutlass.range(steps // TOGETHER, unroll=1):
            _some_steps(getattr(mmas, kind)(), to, a, b, (part * TOGETHER, TOGETHER, part > 0))


def _add_weighted(mma: cute.TiledMma, place: tuple, to: cute.Tensor, b: cute.Tensor, add: Boolean):
    """to (+)= P^T or dS^T times b. place: (mmas, ops, the column where it lies, each half of the queries apart)."""
    mmas, ops, weights = place
    shape = mmas.shape
    mma.set(tcgen05.Field.ACCUMULATE, add)
    steps = shape.half // K_STEP
    for step in range(HALVES * steps):
        column = weights + step // steps * shape.half
        a = cute.make_tensor(cute.recast_ptr(ops.tmem + column, dtype=mmas.dtype), ops.weights)
        cute.gemm(mma, to, a[None, None, step % steps], b[None, None, step], to)
        mma.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def _scores(bars: Barriers, ops: Operands, mmas: cutlass.Constexpr, ring: Ring):
    cute.arch.mbarrier_wait(bars.q_full + ring.slot, ring.phase)
    s = cute.make_tensor(ops.tmem + mmas.shape.s_column, ops.s)
    product(mmas, "scores", s, ops.k[None, None, None, 0], ops.q[None, None, None, ring.slot])
    commit(bars.s_full, 1)


@cute.jit
def _gradients(bars: Barriers, ops: Operands, mmas: cutlass.Constexpr, ring: Ring):
    cute.arch.mbarrier_wait(bars.do_full + ring.slot, ring.phase)
    dp = cute.make_tensor(ops.tmem + mmas.shape.dp_column, ops.s)
    product(mmas, "scores", dp, ops.v[None, None, None, 0], ops.do[None, None, None, ring.slot])
    commit(bars.dp_full, 1)
    if cutlass.const_expr(not mmas.shape.makes_dv):
        commit(bars.do_free + ring.slot, 1)


def _query_gradients(bars: Barriers, ops: Operands, mmas: BackwardMmas):
    """dQ = dS K, or dQ^T = K^T dS^T for every 128 columns."""
    shape = mmas.shape
    ds = ops.ds[None, None, None, 0]
    if shape.dq_transposed:
        for part in range(shape.width_qk // ROWS):
            dq = cute.make_tensor(ops.tmem + shape.dq_column + part * shape.tile.tile_m, ops.dq)
            product(mmas, "dq", dq, ops.k_columns[None, None, None, part], ds)
    else:
        dq = cute.make_tensor(ops.tmem + shape.dq_column, ops.dq)
        product(mmas, "dq", dq, ds, ops.k_columns[None, None, None, 0])
    commit(bars.dq_full, 1)


@cute.jit
def multiply(bars: Barriers, ops: Operands, mmas: cutlass.Constexpr[BackwardMmas], steps: Int32):
    """Every product of a key tile; steps: query tiles of all heads of the group, at least one.

    With a single slot of Q the next S^T has to come after dK, which frees it.
    """
    shape = mmas.shape
    queries, douts, phase = ring_start(), ring_start(), Int32(0)
    early = cutlass.const_expr(shape.q_slots > 1 or not shape.makes_dk)
    cute.arch.mbarrier_wait(bars.k_full, 0)
    _scores(bars, ops, mmas, queries)
    if cutlass.const_expr(shape.makes_dk):
        cute.arch.mbarrier_wait(bars.v_full, 0)
        _gradients(bars, ops, mmas, douts)
    for step in cutlass.range(steps, unroll=1):
        more = step + 1 < steps
        next_queries, next_douts = advanced(queries, shape.q_slots), advanced(douts, shape.do_slots)
        cute.arch.mbarrier_wait(bars.p_ready, phase)
        after_wait()
        if cutlass.const_expr(shape.makes_dv):
            _add_values(bars, ops, mmas, (queries, douts), step > 0)
        if more and early:
            _scores(bars, ops, mmas, next_queries)
        if cutlass.const_expr(shape.makes_dk):
            cute.arch.mbarrier_wait(bars.ds_ready, phase)
            after_wait()
            _add_keys(bars, ops, mmas, queries, step > 0)
            if more and not early:
                _scores(bars, ops, mmas, next_queries)
            if cutlass.const_expr(shape.dq_apart):
                cute.arch.mbarrier_wait(bars.dq_free, phase ^ 1)
                after_wait()
            _query_gradients(bars, ops, mmas)
            if more:
                if cutlass.const_expr(not shape.dq_apart):
                    cute.arch.mbarrier_wait(bars.dq_free, phase)
                    after_wait()
                _gradients(bars, ops, mmas, next_douts)
        queries, douts, phase = next_queries, next_douts, phase ^ 1
    commit(bars.sums_full, 1)


@cute.jit
def _add_values(bars: Barriers, ops: Operands, mmas: cutlass.Constexpr, rings: tuple, add: Boolean):
    """dV (+)= P^T dO. Q is not needed any more where no dK is made; its row values were read before P."""
    shape = mmas.shape
    queries, douts = rings
    dv = cute.make_tensor(ops.tmem + shape.dv_column, ops.dv)
    columns = ops.do_columns[None, None, None, douts.slot]
    cute.arch.mbarrier_wait(bars.do_full + douts.slot, douts.phase)
    _add_weighted(mmas.by_keys(shape.width_v), (mmas, ops, shape.s_column), dv, columns, add)
    commit(bars.do_free + douts.slot, 1)
    if cutlass.const_expr(not shape.makes_dk):
        commit(bars.q_free + queries.slot, 1)


@cute.jit
def _add_keys(bars: Barriers, ops: Operands, mmas: cutlass.Constexpr, queries: Ring, add: Boolean):
    """dK (+)= dS^T Q."""
    shape = mmas.shape
    dk = cute.make_tensor(ops.tmem + shape.dk_column, ops.dk)
    columns = ops.q_columns[None, None, None, queries.slot]
    _add_weighted(mmas.by_keys(shape.width_qk), (mmas, ops, shape.dp_column), dk, columns, add)
    commit(bars.q_free + queries.slot, 1)
