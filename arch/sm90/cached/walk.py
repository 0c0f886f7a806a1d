"""The MMA warpgroup's way through its share of the keys, with keys as wgmma's rows: S^T = K Q^T and O^T = V^T P^T.

Query rows are few, and wgmma's 64 rows would be empty but for some; as columns they come in eights. A thread holds some
columns of S^T and the same ones of O^T, so that what it knows of a query row serves both. Maxima go over lanes, then
over warps through shared memory; P goes through shared memory too. P V of a tile runs under the next scores.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_flash.spec.plan import Plan

from ...common.numeric import NEG_INF, exp2, finite_or_zero, mul_rn
from ..pipeline import wait_full
from ..softmax import cap_scores
from .pipeline import MMA_WARPS, KeyPipelines, hand_to_wgmma, meet
from .shares import CacheSizes, Columns, Place, Share


@dataclass(frozen=True)
class CacheMmas:
    """Made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    tile_m: int
    dtype: type

    def _make(self, a_major: OperandMajorMode) -> cute.TiledMma:
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, a_major, OperandMajorMode.K, Float32, (1, 1, 1), (64, self.tile_m),
            warpgroup.OperandSource.SMEM,
        )  # fmt: skip

    def kq(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.K)

    def vp(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.MN)


class Fragments(NamedTuple):
    """k, q, v, p are shared-memory descriptors; the others are registers."""

    k: cute.Tensor  # (mma, 1, width_qk / 16, stages)
    q: cute.Tensor  # (mma, 1, width_qk / 16, 1)
    v: cute.Tensor  # (mma, width_v / 64, tile_n / 16, stages)
    p: cute.Tensor  # (mma, 1, tile_n / 16, 1)
    s: cute.Tensor  # ((2, 2, tile_m / 8), 1, 1) float32: scores
    o: cute.Tensor  # ((2, 2, tile_m / 8), width_v / 64, 1) float32, not yet divided by the row sum


class Room(NamedTuple):
    q: cute.Tensor  # (tile_m, width_qk)
    p: cute.Tensor  # (tile_m, tile_n)
    stats: cute.Tensor  # (tile_m, MMA warps)
    v: cute.Tensor  # (width_v, tile_n, stages)


class ColumnState(NamedTuple):
    """Of the thread's query rows."""

    maximum: cute.Tensor  # running maximum of the raw scores
    total: cute.Tensor  # running sum of exp2(scale * (score - maximum)) over this thread's keys


class WalkContext(NamedTuple):
    """Everything the loop needs; read-only."""

    pipes: KeyPipelines
    frags: Fragments
    room: Room
    state: ColumnState
    scale_log2: Float32
    cap_factor: Float32 | None
    thread: Int32
    limits: tuple  # (low, high): keys [low, high) are seen by each of the thread's query rows


def score_view(s: cute.Tensor) -> cute.Tensor:
    """(2 keys 8 apart, tile_m / 4 query rows) of S^T."""
    return cute.make_tensor(s.iterator, cute.make_layout((2, (2, cute.size(s) // 4)), stride=(2, (1, 4))))


def output_view(o: cute.Tensor) -> cute.Tensor:
    """(2 columns of V 8 apart, tile_m / 4 query rows, width_v / 64) of O^T."""
    blocks = cute.size(o, mode=[1])
    eights = cute.size(o) // (4 * blocks)
    layout = cute.make_layout((2, (2, eights), blocks), stride=(2, (1, 4), 4 * eights))
    return cute.make_tensor(o.iterator, layout)


def first_key(thread: Int32) -> Int32:
    """Row of S^T (of O^T: column of V) that the thread's row 0 stands for; row 1 is 8 below (PTX, wgmma D layout)."""
    return thread // 32 * 16 + thread % 32 // 4


def _over_lanes(x: Float32, combine) -> Float32:
    """Of the eight lanes that share query rows."""
    for offset in (4, 8, 16):
        x = combine(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


class Walk:
    """Of one Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile, self.mask, self.softcap, self.dtype = plan.tile, plan.mask, plan.softcap, dtype
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.mmas = CacheMmas(plan.tile.tile_m, dtype)
        self.columns = plan.tile.tile_m // 4  # query rows of a thread

    def open(self, s_q: cute.Tensor, s_p: cute.Tensor, s_k: cute.Tensor, s_v: cute.Tensor) -> Fragments:
        kq, vp = self.mmas.kq(), self.mmas.vp()
        mine_kq, mine_vp = kq.get_slice(0), vp.get_slice(0)
        return Fragments(
            k=kq.make_fragment_A(mine_kq.partition_A(s_k)),
            q=kq.make_fragment_B(mine_kq.partition_B(s_q)),
            v=vp.make_fragment_A(mine_vp.partition_A(s_v)),
            p=vp.make_fragment_B(mine_vp.partition_B(s_p)),
            s=cute.make_rmem_tensor(mine_kq.partition_shape_C((self.tile.tile_n, self.tile.tile_m)), Float32),
            o=cute.make_rmem_tensor(mine_vp.partition_shape_C((self.width_v, self.tile.tile_m)), Float32),
        )

    def state(self) -> ColumnState:
        return ColumnState(*(cute.make_rmem_tensor((self.columns,), Float32) for _ in range(2)))

    @cute.jit
    def read_q(self, q: cute.Tensor, room: cute.Tensor, place: Place, sizes: CacheSizes, thread: Int32):
        """q (batch, seqlen_q, heads_q, head_dim) -> room (tile_m, width_qk); 0 where there is no row or column."""
        for row in cutlass.range(thread // 32, self.tile.tile_m, MMA_WARPS, unroll=2):
            token, head = divmod(cutlass.min(place.row_start + row, sizes.rows - 1), sizes.by.group)
            source = q[place.batch, token, place.head * sizes.group + head, None]
            for step in cutlass.range_constexpr(self.width_qk // 32):
                column = 32 * step + thread % 32
                exists = (place.row_start + row < sizes.rows) & (column < q.shape[3])
                value = source[cutlass.min(column, q.shape[3] - 1)]
                room[row, column] = self.dtype(cutlass.select_(exists, value, self.dtype(0.0)))

    def limits(self, share: Share, columns: Columns, sizes: CacheSizes) -> tuple:
        """(low, high) of every query row of the thread."""
        low, high = [], []
        for token in columns.token:
            diagonal = token + share.seqlen_k - sizes.seqlen_q
            last = share.seqlen_k
            if self.mask.right:
                reach = Int32(1) if self.mask.causal else sizes.right + 1
                last = cutlass.min(last, diagonal + reach)
            low.append(diagonal - sizes.left if self.mask.left else Int32(0))
            high.append(last)
        return tuple(low), tuple(high)

    def rings(self) -> tuple:
        """Of K and of V."""
        return tuple(
            pipelines.make_pipeline_state(pipelines.PipelineUserType.Consumer, self.tile.stages) for _ in range(2)
        )

    @cute.jit
    def run(self, context: WalkContext, share: Share, early: cutlass.Constexpr[bool], k_ring, v_ring):
        """-> the rings moved on. Afterwards O is divided by the row sums, and the state's totals are of all keys.
        early: the first tile is loaded in any case."""
        frags, pipes, state = context.frags, context.pipes, context.state
        frags.o.fill(0.0)
        state.maximum.fill(NEG_INF)
        state.total.fill(0.0)
        hand_to_wgmma()  # Q
        if share.count > 0:
            wait_full(pipes.k, k_ring)
            self.issue_scores(frags, k_ring.index)
            warpgroup.wait_group(0)
            pipes.k.consumer_release(k_ring)
            k_ring.advance()
            self.mask_scores(context, share, share.run.first)
            self.say_maxima(context)
            self.probabilities(context)
            for number in cutlass.range(1, share.count, unroll=1):
                wait_full(pipes.k, k_ring)
                self.issue_scores(frags, k_ring.index)
                wait_full(pipes.v, v_ring)
                self.issue_output(frags, v_ring.index)
                warpgroup.wait_group(1)
                pipes.k.consumer_release(k_ring)
                self.mask_scores(context, share, share.run.tile(number))
                self.say_maxima(context)
                warpgroup.wait_group(0)
                pipes.v.consumer_release(v_ring)
                self.probabilities(context)
                k_ring.advance()
                v_ring.advance()
            wait_full(pipes.v, v_ring)
            keys = share.seqlen_k - share.run.tile(share.count - 1) * self.tile.tile_n
            if keys < self.tile.tile_n:
                self.zero_rows(context, v_ring.index, keys)
            self.issue_output(frags, v_ring.index)
            warpgroup.wait_group(0)
            pipes.v.consumer_release(v_ring)
            v_ring.advance()
        elif cutlass.const_expr(early):  # what is still on its way must not find shared memory in other use
            wait_full(pipes.k, k_ring)
            wait_full(pipes.v, v_ring)
        self.finish(context)
        return k_ring, v_ring

    @cute.jit
    def issue_scores(self, frags: Fragments, slot: Int32):
        """One commit group. The caller waits; so below."""
        mma, k = self.mmas.kq(), frags.k[None, None, None, slot]
        mma.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for step in cutlass.range_constexpr(cute.size(k, mode=[2])):
            cute.gemm(mma, frags.s, k[None, None, step], frags.q[None, None, step, 0], frags.s)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def issue_output(self, frags: Fragments, slot: Int32):
        mma, v = self.mmas.vp(), frags.v[None, None, None, slot]
        mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for step in cutlass.range_constexpr(cute.size(v, mode=[2])):
            cute.gemm(mma, frags.o, v[None, None, step], frags.p[None, None, step, 0], frags.o)
        warpgroup.commit_group()

    @cute.jit
    def mask_scores(self, context: WalkContext, share: Share, tile: Int32):
        scores = context.frags.s
        if cutlass.const_expr(self.softcap):
            cap_scores(scores, context.cap_factor)
        low, high = context.limits
        key, view = tile * self.tile.tile_n + first_key(context.thread), score_view(scores)
        masked = tile >= share.whole_last
        if cutlass.const_expr(self.mask.left):
            masked = masked | (tile < share.whole_first)
        if masked:
            for c in cutlass.range_constexpr(self.columns):
                for r in cutlass.range_constexpr(2):
                    seen = key + 8 * r < high[c]
                    if cutlass.const_expr(self.mask.left):
                        seen = seen & (key + 8 * r >= low[c])
                    view[r, c] = Float32(cutlass.select_(seen, view[r, c], Float32(NEG_INF)))

    @cute.jit
    def say_maxima(self, context: WalkContext):
        """Of the warp's 16 keys."""
        view = score_view(context.frags.s)
        self._say(context, [cute.arch.fmax(view[0, c], view[1, c]) for c in range(self.columns)], cute.arch.fmax)

    @cute.jit
    def _say(self, context: WalkContext, values: list, combine: cutlass.Constexpr):
        thread, stats = context.thread, context.room.stats
        values = [_over_lanes(value, combine) for value in values]
        if thread % 32 < 4:
            for c in cutlass.range_constexpr(self.columns):
                stats[8 * (c // 2) + 2 * (thread % 4) + c % 2, thread // 32] = values[c]

    def _heard(self, context: WalkContext, column: int, combine) -> Float32:
        """What the warps said of a query row of the thread."""
        row = context.room.stats[8 * (column // 2) + 2 * (context.thread % 4) + column % 2, None]
        value = row[0]
        for w in range(1, MMA_WARPS):
            value = combine(value, row[w])
        return value

    @cute.jit
    def probabilities(self, context: WalkContext):
        """P = exp2(scale * (S - maximum)) into shared memory; O and totals are rescaled. P V is not in flight."""
        state, thread, s_p = context.state, context.thread, context.room.p
        scores, output = score_view(context.frags.s), output_view(context.frags.o)
        meet()  # all have said their maxima, and are done with the P before
        key = first_key(thread)
        heard = [self._heard(context, c, cute.arch.fmax) for c in range(self.columns)]
        for c in cutlass.range_constexpr(self.columns):
            maximum = cute.arch.fmax(state.maximum[c], heard[c])
            subtrahend = finite_or_zero(mul_rn(maximum, context.scale_log2))
            rescale = exp2(mul_rn(state.maximum[c], context.scale_log2) - subtrahend)
            p = [exp2(scores[r, c] * context.scale_log2 - subtrahend) for r in range(2)]
            for r in cutlass.range_constexpr(2):
                s_p[8 * (c // 2) + 2 * (thread % 4) + c % 2, key + 8 * r] = p[r].to(self.dtype)
            state.maximum[c] = maximum
            state.total[c] = state.total[c] * rescale + (p[0] + p[1])
            for block in cutlass.range_constexpr(self.width_v // 64):
                for r in cutlass.range_constexpr(2):
                    output[r, c, block] = output[r, c, block] * rescale
        hand_to_wgmma()  # P

    @cute.jit
    def finish(self, context: WalkContext):
        """Sums over lanes and warps, then the one division of a row."""
        state, output = context.state, output_view(context.frags.o)
        meet()  # the last maxima are read
        self._say(context, [state.total[c] for c in range(self.columns)], lambda a, b: a + b)
        meet()
        for c in cutlass.range_constexpr(self.columns):
            total = self._heard(context, c, lambda a, b: a + b)
            state.total[c] = total
            inverse = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
            for block in cutlass.range_constexpr(self.width_v // 64):
                for r in cutlass.range_constexpr(2):
                    output[r, c, block] = output[r, c, block] * inverse

    @cute.jit
    def zero_rows(self, context: WalkContext, slot: Int32, keys: Int32):
        """Rows of V from the slot's `keys` on: their probability is 0, and 0 times what lies there may be NaN."""
        rows = context.room.v[None, None, slot]  # (width_v, tile_n)
        for key in cutlass.range(keys + context.thread // 32, self.tile.tile_n, MMA_WARPS, unroll=1):
            for step in cutlass.range_constexpr(self.width_v // 32):
                rows[32 * step + context.thread % 32, key] = self.dtype(0.0)
        hand_to_wgmma()
