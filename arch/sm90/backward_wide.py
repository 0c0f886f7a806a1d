"""Backward of heads of 129 to 192 columns on Hopper, in one kernel: as backward.py, with 96 keys a CTA.

Five products instead of the seven of two kernels (backward_apart.py). dK and dV of 96 keys take 144 registers of a
thread; S and dP have queries for rows, so that LSE and delta are two values of a thread. P and dS go through shared
memory, where both warpgroups read all of them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cute_flash.spec.plan import Tile

from ..common.entry import BoundedEntry, PackedBoundedEntry, PackedEntry
from .backward import BackwardSm90, MmaContext
from .epilogue import store_transposed
from .grad.epilogue import hand_over_dq
from .grad.memory import TransposedLayouts, transposed_layouts
from .grad.mma import issue
from .grad.pipeline import DS_STORED, tell_read, wait_read
from .grad.transposed_mma import (
    BLOCK,
    TransposedAccumulators,
    TransposedMmas,
    TransposedOperands,
    issue_blocks,
    issue_dq_halves,
    make_transposed_accumulators,
    make_transposed_operands,
    pieces,
)
from .grad.weights import gradients_by_rows, row_values, store_packed, weights_by_rows
from .mask import mask_scores, mask_window
from .pipeline import wait_full
from .schedule import WARPGROUP
from .tiles import wide_do_slots


class WideBackwardSm90(BackwardSm90):
    """One Plan's kernel. Everything read here comes from the Plan."""

    def make_mmas(self) -> TransposedMmas:
        return TransposedMmas(self.tile, self.width_qk, self.width_v, self.dtype)

    @property
    def slots(self) -> tuple[int, int]:
        return self.tile.stages, wide_do_slots(self.width_v)

    def layouts(self) -> TransposedLayouts:
        widths = (self.width_qk, self.width_v, self.mmas.dq_columns)
        return transposed_layouts(self.tile, widths, self.slots[1], self.dtype)

    def operands(self, rooms: NamedTuple, group: Int32) -> TransposedOperands:
        return make_transposed_operands(self.mmas, rooms, group)

    def accumulators(self) -> TransposedAccumulators:
        return make_transposed_accumulators(self.mmas)

    @cute.jit
    def mma_role(self, context: MmaContext, units: tuple, targets: tuple, scale: Float32):
        group = cute.arch.make_warp_uniform(context.thread // WARPGROUP)
        tell_read(1 - group)
        BackwardSm90.mma_role(self, context, units, targets, scale)
        wait_read(group)

    @cute.jit
    def leave(self, acc: cute.Tensor, rows: cute.Tensor, thread: Int32, row_start: Int32, width: cutlass.Constexpr):
        """A warpgroup's pieces of dK^T or dV^T. rows: (seqlen_k, head_dim)."""
        found = pieces(self.mmas, acc, width, cute.arch.make_warp_uniform(thread // WARPGROUP))
        for i in cutlass.range_constexpr(len(found)):
            place = (row_start + found[i].key, found[i].block * BLOCK)
            store_transposed(found[i].acc, rows, thread % WARPGROUP, place, self.dtype)

    @cute.jit
    def step(self, context: MmaContext, states: tuple, turn: tuple, masked, last):
        """One query tile. `turn`: (tile, first key); after the `last` one K and V are given back.

        P is formed under dP. dQ leaves under other products; where dO has one slot, dV comes before it, so that the
        next dO is asked for early (d=192 without: 2/3 of the speed). Where it has two, a warpgroup's own half of dS
        comes from registers: +4.6% at (192, 128) full 16384, -1.7% at d=192.
        """
        pipes, ops, acc = context.pipes, context.ops, context.acc
        kv_state, q_state, do_state = states
        thread, group = context.thread % WARPGROUP, context.group
        wait_full(pipes.q, q_state)
        issue(self.mmas.scores(), acc.s, ops.q[None, None, None, q_state.index], ops.k[None, None, None, 0], False)
        wait_full(pipes.do, do_state)
        issue(self.mmas.scores(), acc.dp, ops.do[None, None, None, do_state.index], ops.v[None, None, None, 0], False)
        lse, delta = row_values(context.s_rows[None, q_state.index], thread, self.tile.tile_m)
        warpgroup.wait_group(1)
        if masked:
            at, key_start = turn
            self.hide(context, thread, (at * self.tile.tile_m, key_start + group * self.mmas.keys))
        weights_by_rows(acc.s, acc.p_packed, lse, context.factors, self.dtype)
        wait_read(group)
        self.store_weights(acc.p_packed, context.rooms.p, context.thread)
        warpgroup.wait_group(0)
        if last:
            pipes.v.consumer_release(kv_state)
        gradients_by_rows(acc.s, acc.dp, acc.ds_packed, delta, self.dtype)
        self.store_weights(acc.ds_packed, context.rooms.ds, context.thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_STORED, number_of_threads=self.schedule.mma_threads)
        if cutlass.const_expr(self.slots[1] > 1):
            issue_dq_halves(self.mmas, ops, acc, group)
            self.issue_values(context, do_state.index, group)
            self.leave_dq(context, (kv_state, q_state), group, last)
            self.issue_keys(context, q_state.index, group)
            warpgroup.wait_group(1)
            pipes.do.consumer_release(do_state)
        else:
            self.issue_values(context, do_state.index, group)
            ds_rows, k_columns = ops.ds_rows[None, None, None, 0], ops.k_columns[None, None, None, 0]
            issue(self.mmas.dq(), acc.dq, ds_rows, k_columns, False)
            warpgroup.wait_group(1)
            pipes.do.consumer_release(do_state)
            self.issue_keys(context, q_state.index, group)
            self.leave_dq(context, (kv_state, q_state), group, last)
        warpgroup.wait_group(0)
        tell_read(1 - group)
        pipes.q.consumer_release(q_state)

    @cute.jit
    def hide(self, context: MmaContext, thread: Int32, place: tuple):
        """`place`: (first row, first key) of the warpgroup's scores."""
        if cutlass.const_expr(self.mask.windowed):
            part = Tile(self.tile.tile_m, self.mmas.keys, self.tile.stages)
            mask_window(context.acc.s, thread, place, context.seqlens, context.bounds, self.mask, part)
        else:
            mask_scores(context.acc.s, thread, *place, context.seqlens, self.mask.causal)

    @cute.jit
    def leave_dq(self, context: MmaContext, states: tuple, group: Int32, last):
        """When all products but those issued last are there. `states`: of K and V, and of Q."""
        kv_state, q_state = states
        warpgroup.wait_group(1)
        if last:
            context.pipes.k.consumer_release(kv_state)
        hand_over_dq(context.acc.dq, context.s_dq, group, self.full(q_state, group), context.thread)

    @cute.jit
    def issue_values(self, context: MmaContext, slot: Int32, group: Int32):
        """dV^T += dO^T P."""
        ops, found = context.ops, pieces(self.mmas, context.acc.dv, self.width_v, group)
        weights = ops.p[None, None, None, 0], ops.p_part[None, None, None, 0]
        issue_blocks(self.mmas, found, ops.do_blocks[None, None, None, None, slot], weights)

    @cute.jit
    def issue_keys(self, context: MmaContext, slot: Int32, group: Int32):
        """dK^T += Q^T dS."""
        ops, found = context.ops, pieces(self.mmas, context.acc.dk, self.width_qk, group)
        weights = ops.ds[None, None, None, 0], ops.ds_part[None, None, None, 0]
        issue_blocks(self.mmas, found, ops.q_blocks[None, None, None, None, slot], weights)

    def store_weights(self, packed: cute.Tensor, smem: cute.Tensor, thread: Int32):
        """This warpgroup's keys of P or dS, transposed. smem: (tile_n, tile_m, 1)."""
        by_rows = cute.make_tensor(smem.iterator, cute.select(smem.layout, mode=[1, 0]))
        shape = (self.tile.tile_m, self.tile.tile_n)
        store_packed(packed, by_rows, self.mmas.scores(), shape, thread, True)


class BoundedWideBackwardSm90(BoundedEntry, WideBackwardSm90):
    """For a Plan that is not plain."""


class PackedWideBackwardSm90(PackedEntry, WideBackwardSm90):
    """For packed sequences."""


class PackedBoundedWideBackwardSm90(PackedBoundedEntry, WideBackwardSm90):
    """Both."""
