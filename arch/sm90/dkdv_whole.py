"""dK and dV where dQ has a kernel of its own (dq.py) and a warpgroup's registers hold all columns of its 64 keys.

A CTA owns 128 keys. Nothing passes between its warpgroups: P^T and dS^T are A operands without leaving the registers.
"""

from collections.abc import Iterable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from .backward import BackwardSm90, MmaContext
from .grad.mask import mask_transposed
from .grad.memory import key_layouts
from .grad.mma import (
    BackwardMmas,
    KeyAccumulators,
    KeyOperands,
    as_operand,
    block_of,
    issue,
    make_key_accumulators,
    make_key_operands,
    part_of,
)
from .grad.pipeline import as_words, hold
from .grad.weights import capped_probabilities, exponentials, score_gradients, weights_and_gradients
from .pipeline import wait_full
from .schedule import ROWS_PER_WARPGROUP


class WholeKeyGradientsSm90(BackwardSm90):
    """One Plan's kernel. Everything read here comes from the Plan."""

    makes_dq = False

    def make_mmas(self):
        return BackwardMmas(self.tile, self.width_qk, self.width_v, self.width_dq, self.dtype, dp_parts=2)

    def layouts(self) -> NamedTuple:
        return key_layouts(self.tile, self.width_qk, self.width_v, self.dtype)

    def operands(self, rooms: NamedTuple, group: Int32) -> NamedTuple:
        return make_key_operands(self.mmas, rooms, group)

    def accumulators(self) -> NamedTuple:
        return make_key_accumulators(self.mmas)

    @cute.jit
    def step(self, context: MmaContext, states: tuple, turn: tuple, masked, last):
        """One query tile. `turn`: (tile, first key); after the `last` one K and V are given back."""
        if cutlass.const_expr(self.tile.skips):
            if self.hides(context, turn):
                self.step_over(context, states, last)
            else:
                self.step_through(context, states, turn, masked, last)
        else:
            self.step_through(context, states, turn, masked, last)

    def hides(self, context: MmaContext, turn: tuple):
        """Does the diagonal hide all keys of the warpgroup from all rows of a query tile?"""
        at, key_start = turn
        seqlen_q, seqlen_k = context.seqlens
        last_seen = (at + 1) * self.tile.tile_m - 1 + seqlen_k - seqlen_q
        return key_start + context.group * ROWS_PER_WARPGROUP > last_seen

    @cute.jit
    def step_over(self, context: MmaContext, states: tuple, last):
        """A query tile that sees none of the warpgroup's keys."""
        pipes = context.pipes
        kv_state, q_state, do_state = states
        wait_full(pipes.q, q_state)
        wait_full(pipes.do, do_state)
        if last:
            pipes.k.consumer_release(kv_state)
            pipes.v.consumer_release(kv_state)
        pipes.do.consumer_release(do_state)
        pipes.q.consumer_release(q_state)

    @cute.jit
    def step_through(self, context: MmaContext, states: tuple, turn: tuple, masked, last):
        """See step."""
        pipes, ops, acc, thread = context.pipes, context.ops, context.acc, context.thread
        kv_state, q_state, do_state = states
        rows = cute.local_tile(context.s_rows[None, q_state.index], (self.tile.tile_m,), (None,))  # (tile_m, 2)
        wait_full(pipes.q, q_state)
        issue(self.mmas.scores(), acc.s, ops.k[None, None, None, 0], ops.q[None, None, None, q_state.index], False)
        lse = self.values_of(rows[None, 0], thread)
        wait_full(pipes.do, do_state)
        self.issue_dp(ops, acc, do_state, 0)
        warpgroup.wait_group(1)
        if last:
            pipes.k.consumer_release(kv_state)
        if masked:
            at, key_start = turn
            place = (at * self.tile.tile_m, key_start)
            mask_transposed(acc.s, thread, place, context.seqlens, context.bounds, self.mask)
        if cutlass.const_expr(self.softcap):
            capped_probabilities(acc.s, acc.p_packed, lse, context.factors, self.dtype)
        else:
            exponentials(acc.s, lse, context.factors[0])
        if cutlass.const_expr(self.tile.ahead > 0):
            formed = acc.p_packed if self.softcap else as_words(acc.s)
            hold(formed, cute.size(formed))
        for part in cutlass.range_constexpr(self.mmas.dp_parts):
            mine = cute.local_tile(rows[None, 1], (self.tile.tile_m // self.mmas.dp_parts,), (part,))
            delta = self.values_of(mine, thread)
            warpgroup.wait_group(0)
            self.form_gradients(acc, delta, part)
            if cutlass.const_expr(part + 1 < self.mmas.dp_parts):
                self.issue_dp(ops, acc, do_state, part + 1)
        if last:
            pipes.v.consumer_release(kv_state)
        do_columns = ops.do_columns[None, None, None, do_state.index]
        issue(self.mmas.by_keys(self.width_v), acc.dv, as_operand(acc.p_packed, self.dtype), do_columns, True)
        q_columns = ops.q_columns[None, None, None, q_state.index]
        issue(self.mmas.by_keys(self.width_qk), acc.dk, as_operand(acc.ds_packed, self.dtype), q_columns, True)
        warpgroup.wait_group(1)
        pipes.do.consumer_release(do_state)
        warpgroup.wait_group(0)
        pipes.q.consumer_release(q_state)

    def issue_dp(self, ops: KeyOperands, acc: KeyAccumulators, do_state, part: int):
        issue(self.mmas.gradients(), acc.dp, ops.v[None, None, None, 0], block_of(ops.do, part, do_state.index), False)

    def form_gradients(self, acc: KeyAccumulators, delta: Iterable, part: int):
        """Of one part of the columns: dS, and P where it is not there yet, rounded."""
        parts = self.mmas.dp_parts
        weights, p_packed, ds_packed = (part_of(t, part, parts) for t in (acc.s, acc.p_packed, acc.ds_packed))
        if cutlass.const_expr(self.softcap):
            score_gradients(weights, acc.dp, ds_packed, delta, self.dtype)
        else:
            weights_and_gradients(weights, acc.dp, (p_packed, ds_packed), delta, self.dtype)
