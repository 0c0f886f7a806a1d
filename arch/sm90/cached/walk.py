"""The MMA warpgroup's way through its share of the keys.

Memory is what the kernel waits for, and two CTAs share an SM: so one warpgroup, and no more overlap than P V of a tile
under the softmax of the next.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_flash.spec.plan import Plan

from ...common.numeric import NEG_INF, pack_fragment
from ...common.rowstate import RowState, reset
from ..mma import ForwardMmas, Fragments, first_column, issue_output, issue_scores, rows_view
from ..pipeline import wait_full
from ..schedule import WARPGROUP
from ..softmax import cap_scores, finish, rescale_if_any, softmax_step
from .pipeline import ZEROED, KeyPipelines
from .shares import CacheSizes, Rows, Share


class CacheMmas(ForwardMmas):
    """Q comes from registers: of its 64 rows few exist, and no shared memory is spent on it."""

    def qk(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.K, self.tile.tile_n, warpgroup.OperandSource.RMEM)


class WalkContext(NamedTuple):
    """Everything the loop needs; read-only."""

    pipes: KeyPipelines
    frags: Fragments
    s_v: cute.Tensor  # (width_v, tile_n, stages)
    state: RowState
    scale_log2: Float32
    cap_factor: Float32 | None
    thread: Int32
    limits: tuple  # ((low, low), (high, high)): keys [low, high) are seen by the thread's rows


class Walk:
    """Of one Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile, self.mask, self.softcap, self.dtype = plan.tile, plan.mask, plan.softcap, dtype
        self.width_qk = plan.head_dim
        self.mmas = CacheMmas(plan.tile, plan.head_dim_v, dtype)

    def open(self, s_k: cute.Tensor, s_v: cute.Tensor) -> Fragments:
        tile, qk, pv = self.tile, self.mmas.qk(), self.mmas.pv()
        mine_qk, mine_pv = qk.get_slice(0), pv.get_slice(0)
        packed = cute.make_rmem_tensor((tile.tile_n // 4,), Int32)
        q_packed = cute.make_rmem_tensor((self.width_qk // 4,), Int32)

        def operand(registers: cute.Tensor, steps: int, slots: tuple) -> cute.Tensor:
            layout = cute.make_layout(((2, 2, 2), 1, steps, *slots), stride=((1, 2, 4), 0, 8, *(0 for _ in slots)))
            return cute.make_tensor(cute.recast_ptr(registers.iterator, dtype=self.dtype), layout)

        return Fragments(
            q=operand(q_packed, self.width_qk // 16, (1,)),
            k=qk.make_fragment_B(mine_qk.partition_B(s_k)),
            v=pv.make_fragment_B(mine_pv.partition_B(s_v)),
            s=cute.make_rmem_tensor(mine_qk.partition_shape_C((tile.tile_m, tile.tile_n)), Float32),
            p=operand(packed, tile.tile_n // 16, ()),
            p_packed=packed,
            o=cute.make_rmem_tensor(mine_pv.partition_shape_C((tile.tile_m, self.mmas.width_v)), Float32),
        )

    @cute.jit
    def read_q(self, q: cute.Tensor, frags: Fragments, share: Share, rows: Rows, thread: Int32):
        """q (batch, seqlen_q, heads_q, head_dim): the thread's pairs of columns, 0 where there is no row or column."""
        words = cute.make_tensor(cute.recast_ptr(frags.q.iterator, dtype=Int32), cute.make_layout(self.width_qk // 4))
        words.fill(0)
        for r in cutlass.range_constexpr(2):
            if rows.exist[r] != 0:
                start = cute.domain_offset((share.batch, rows.token[r], rows.head[r], first_column(thread)), q).iterator
                pairs = cute.make_tensor(
                    cute.recast_ptr(start.align(4), dtype=Int32), cute.make_layout(self.width_qk // 2)
                )
                whole = q.shape[3] == self.width_qk
                for eight in cutlass.range_constexpr(self.width_qk // 8):
                    if whole | (8 * eight < q.shape[3]):
                        words[4 * (eight // 2) + 2 * (eight % 2) + r] = pairs[4 * eight]

    def limits(self, share: Share, rows: Rows, sizes: CacheSizes) -> tuple:
        """((low, low), (high, high)) of both rows."""
        low, high = [], []
        for r in range(2):
            diagonal = rows.token[r] + share.seqlen_k - sizes.seqlen_q
            last = share.seqlen_k
            if self.mask.right:
                reach = Int32(1) if self.mask.causal else sizes.right + 1
                last = cutlass.min(last, diagonal + reach)
            low.append(diagonal - sizes.left if self.mask.left else Int32(0))
            high.append(last)
        return tuple(low), tuple(high)

    @cute.jit
    def run(self, context: WalkContext, share: Share):
        """P V of a tile runs under the softmax of the next one. Afterwards O is divided by the row sums."""
        frags, pipes, state = context.frags, context.pipes, context.state
        frags.o.fill(0.0)
        reset(state)
        k_ring, v_ring = (
            pipelines.make_pipeline_state(pipelines.PipelineUserType.Consumer, self.tile.stages) for _ in range(2)
        )
        if share.first < share.last:
            wait_full(pipes.k, k_ring)
            issue_scores(self.mmas, frags, 0, k_ring.index)
            warpgroup.wait_group(0)
            pipes.k.consumer_release(k_ring)
            k_ring.advance()
            self.probabilities(context, share, share.first)
            pack_fragment(frags.s, frags.p_packed, self.dtype)
            for tile in cutlass.range(share.first + 1, share.last, unroll=1):
                wait_full(pipes.k, k_ring)
                issue_scores(self.mmas, frags, 0, k_ring.index)
                wait_full(pipes.v, v_ring)
                issue_output(self.mmas, frags, v_ring.index)
                warpgroup.wait_group(1)
                pipes.k.consumer_release(k_ring)
                self.probabilities(context, share, tile)
                warpgroup.wait_group(0)
                pipes.v.consumer_release(v_ring)
                pack_fragment(frags.s, frags.p_packed, self.dtype)
                rescale_if_any(frags.o, state)
                k_ring.advance()
                v_ring.advance()
            wait_full(pipes.v, v_ring)
            keys = share.seqlen_k - (share.last - 1) * self.tile.tile_n
            if keys < self.tile.tile_n:
                self.zero_rows(context, v_ring.index, keys)
            issue_output(self.mmas, frags, v_ring.index)
            warpgroup.wait_group(0)
        finish(frags.o, state)

    @cute.jit
    def probabilities(self, context: WalkContext, share: Share, tile: Int32):
        scores = context.frags.s
        if cutlass.const_expr(self.softcap):
            cap_scores(scores, context.cap_factor)
        low, high = context.limits
        column = tile * self.tile.tile_n + first_column(context.thread)
        view = rows_view(scores)
        if tile >= share.whole_last:
            for r in cutlass.range_constexpr(2):
                _keep(view, r, lambda offset, end: offset < end, high[r] - column)
        if cutlass.const_expr(self.mask.left):
            hidden = [low[r] - column for r in range(2)]
            if tile < share.whole_first:
                for r in cutlass.range_constexpr(2):
                    _keep(view, r, lambda offset, end: offset >= end, hidden[r])
        softmax_step(scores, context.state, context.scale_log2, True)

    @cute.jit
    def zero_rows(self, context: WalkContext, slot: Int32, keys: Int32):
        """Rows of V from the slot's `keys` on: their probability is 0, and 0 times what lies there may be NaN."""
        rows = context.s_v[None, None, slot]  # (width_v, tile_n)
        for i in cutlass.range(context.thread, self.mmas.width_v // 2 * self.tile.tile_n, WARPGROUP, unroll=1):
            column, key = i % (self.mmas.width_v // 2), i // (self.mmas.width_v // 2)
            if key >= keys:
                rows[2 * column, key] = self.dtype(0.0)
                rows[2 * column + 1, key] = self.dtype(0.0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=ZEROED, number_of_threads=WARPGROUP)


def _keep(view: cute.Tensor, row: int, where, end: Int32):
    """Scores of a row stay where `where(offset from the thread's first column, end)`."""
    for c in range(cute.size(view, mode=[1])):
        view[row, c] = Float32(cutlass.select_(where(8 * (c // 2) + c % 2, end), view[row, c], Float32(NEG_INF)))
