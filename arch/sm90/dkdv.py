"""dK and dV of wide heads on Hopper, in a kernel of their own: a CTA takes 64 keys at a time, walks their query tiles.

The accumulators of dQ find no room beside dK and dV here, and every 64 keys would add a tile of dQ to memory: S and dP
are computed once more instead (dq.py). So nothing is added in memory, and the result is bitwise repeatable.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from .backward import BackwardSm90, MmaContext
from .epilogue import store_direct
from .grad.mask import mask_transposed
from .grad.memory import wide_layouts
from .grad.mma import issue
from .grad.pipeline import DS_STORED
from .grad.weights import capped_probabilities, probabilities, score_gradients, store_packed
from .grad.wide_mma import WideMmas, make_wide_accumulators, make_wide_operands
from .pipeline import wait_full
from .schedule import WARPGROUP

WARPGROUPS = 2


class KeyGradientsSm90(BackwardSm90):
    """One Plan's kernel. Everything read here comes from the Plan."""

    makes_dq = False

    def make_mmas(self):
        return WideMmas(self.tile, self.width_qk, self.width_v, WARPGROUPS, self.dtype)

    def layouts(self) -> NamedTuple:
        return wide_layouts(self.tile, self.width_qk, self.width_v, WARPGROUPS, self.dtype)

    def operands(self, rooms: NamedTuple, group: Int32) -> NamedTuple:
        return make_wide_operands(self.mmas, rooms, group)

    def accumulators(self) -> NamedTuple:
        return make_wide_accumulators(self.mmas)

    def leave(self, acc: cute.Tensor, rows: cute.Tensor, thread: Int32, row_start: Int32, width: int):
        """A warpgroup's columns of dK or dV. rows: (seqlen_k, head_dim)."""
        column = cute.arch.make_warp_uniform(thread // WARPGROUP) * (width // WARPGROUPS)
        beyond = cute.make_layout((rows.shape[0], rows.shape[1] - column), stride=rows.stride)
        there = cute.make_tensor(cute.domain_offset((0, column), rows).iterator, beyond)
        store_direct(acc, there, thread % WARPGROUP, row_start, self.dtype)

    @cute.jit
    def step(self, context: MmaContext, states: tuple, turn: tuple, masked, last):
        """One query tile. `turn`: (tile, first key); after the `last` one K and V are given back.

        One tile after the other: dK and dV of a tile, issued behind the next one's scores, hold up its softmax.
        """
        pipes = context.pipes
        kv_state, q_state, do_state = states
        self.issue_scores(context, q_state, do_state)
        self.form_weights(context, q_state, turn, masked)
        if last:
            pipes.k.consumer_release(kv_state)
            pipes.v.consumer_release(kv_state)
        self.issue_gradients(context, q_state, do_state, q_state.index)
        warpgroup.wait_group(1)
        pipes.q.consumer_release(q_state)
        warpgroup.wait_group(0)
        pipes.do.consumer_release(do_state)

    @cute.jit
    def issue_scores(self, context: MmaContext, q_state, do_state):
        """S^T and dP^T, a commit group each."""
        pipes, ops, acc = context.pipes, context.ops, context.acc
        wait_full(pipes.q, q_state)
        q, do = ops.q[None, None, None, q_state.index], ops.do[None, None, None, do_state.index]
        issue(self.mmas.scores(), acc.s, ops.k[None, None, None, 0], q, False)
        wait_full(pipes.do, do_state)
        issue(self.mmas.scores(), acc.dp, ops.v[None, None, None, 0], do, False)

    @cute.jit
    def issue_gradients(self, context: MmaContext, q_state, do_state, slot: Int32):
        """dK, then dV, a commit group each: Q is asked for before dO, so its slot is given back first."""
        ops, acc = context.ops, context.acc
        q_columns = ops.q_columns[None, None, None, q_state.index]
        do_columns = ops.do_columns[None, None, None, do_state.index]
        issue(self.mmas.by_keys(self.width_qk), acc.dk, ops.ds[None, None, None, slot], q_columns, True)
        issue(self.mmas.by_keys(self.width_v), acc.dv, ops.p[None, None, None, slot], do_columns, True)

    @cute.jit
    def form_weights(self, context: MmaContext, q_state, turn: tuple, masked):
        """P^T and dS^T into shared memory, when S^T and dP^T are there. `turn`: (tile, first key)."""
        acc, tile_m, slot = context.acc, self.tile.tile_m, q_state.index
        thread, group = context.thread % WARPGROUP, context.group
        columns = tile_m // WARPGROUPS
        rows = cute.local_tile(context.s_rows[None, q_state.index], (columns,), (None,))  # (columns, 2 * warpgroups)
        lse = self.values_of(rows[None, group], thread)
        warpgroup.wait_group(1)
        if masked:
            at, key_start = turn
            place = (at * tile_m + group * columns, key_start)
            mask_transposed(acc.s, thread, place, context.seqlens, context.bounds, self.mask)
        if cutlass.const_expr(self.softcap):
            capped_probabilities(acc.s, acc.p_packed, lse, context.factors, self.dtype)
        else:
            probabilities(acc.s, acc.p_packed, lse, context.factors[0], self.dtype)
        if cutlass.const_expr(self.tile.ahead > 0):
            self.store_weights(acc.p_packed, context.rooms.p[None, None, slot], context.thread)
        delta = self.values_of(rows[None, WARPGROUPS + group], thread)
        warpgroup.wait_group(0)
        score_gradients(acc.s, acc.dp, acc.ds_packed, delta, self.dtype)
        if cutlass.const_expr(self.tile.ahead == 0):
            self.store_weights(acc.p_packed, context.rooms.p[None, None, slot], context.thread)
        self.store_weights(acc.ds_packed, context.rooms.ds[None, None, slot], context.thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_STORED, number_of_threads=self.schedule.mma_threads)

    def store_weights(self, packed: cute.Tensor, smem: cute.Tensor, thread: Int32):
        """This warpgroup's queries of P^T or dS^T. smem: (tile_n, tile_m)."""
        store_packed(packed, smem, self.mmas.scores(), (self.tile.tile_n, self.tile.tile_m), thread, False)
