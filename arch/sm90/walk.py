"""An MMA warpgroup's way through its units.

Scores of a key tile and O += P V of the one before are in flight together, and the softmax runs under P V. That holds
inside a query tile and, where shared memory has room for two of Q, from one query tile to the next.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

from ..common.numeric import is_result, pack_fragment
from ..common.order import Sizes
from ..common.ragged import only_rows
from ..common.rowstate import RowState, reset, settle
from .epilogue import (
    OutputRoom,
    OutputShape,
    store_direct,
    store_lse,
    store_output,
    store_partial,
    store_state,
    wait_output,
)
from .mask import mask_scores, mask_window
from .mma import ForwardMmas, Fragments, first_half, issue_output, issue_scores
from .pipeline import ForwardPipelines, Turn, forward_states, grant_first_turn, pass_turn, wait_full, wait_turn
from .queue import TicketRing, receive, ticket_states
from .schedule import forward_schedule
from .softmax import cap_scores, finish, rescale_if_any, rescale_output, softmax_step
from .tiles import o_apart, q_slots
from .units import Unit, Units


class MmaContext(NamedTuple):
    """Everything an MMA warpgroup needs in its loop; read-only."""

    pipes: ForwardPipelines
    tickets: TicketRing
    frags: Fragments
    state: RowState
    done: RowState  # of the unit whose output is about to leave
    scale_log2: Float32
    thread: Int32  # among the MMA threads
    group: Int32  # which MMA warpgroup it is of
    turn: Turn
    seqlens: tuple
    bounds: tuple  # (left, right) of a window
    cap_factor: Float32 | None  # what raw scores are multiplied with inside a softcap


class Walk:
    """Of one Plan."""

    def __init__(self, plan: Plan, units: Units, dtype: type):
        self.tile, self.mask, self.softcap, self.dtype, self.units = plan.tile, plan.mask, plan.softcap, dtype, units
        self.packed = plan.form == PACKED
        self.schedule = forward_schedule(plan.tile, plan.head_dim_v)
        self.mmas = ForwardMmas(plan.tile, plan.head_dim_v, dtype)
        self.o_apart = o_apart(plan.tile, plan.head_dim, plan.head_dim_v)
        self.q_slots = q_slots(plan.tile, plan.head_dim, plan.head_dim_v)
        self.carries = self.q_slots > 1
        self.output_shape = OutputShape(plan.head_dim_v, self.schedule.mma_threads)

    @cute.jit
    def run(self, context: MmaContext, room: OutputRoom, results: tuple, sizes: Sizes, splits: Int32):
        """`results`: (lse, o_partial, out), see the kernel."""
        states = forward_states(pipelines.PipelineUserType.Consumer, self.q_slots, self.tile.stages)
        ticket_state = ticket_states(pipelines.PipelineUserType.Consumer)
        grant_first_turn(context.turn, self.schedule)
        ticket, ticket_state = receive(context.tickets, ticket_state, self.packed)
        unit = self.units.of_warpgroup(self.units.unit(ticket, sizes, splits), context.group, sizes)
        live = ticket.live
        if cutlass.const_expr(self.packed):
            if live != 0:  # how many units there are is not known where the grid is chosen
                states = self.enter(self.at(context, unit), states, unit)
        else:
            states = self.enter(context, states, unit)
        while live != 0:
            states = self.through(self.at(context, unit), states, unit)
            ticket, ticket_state = receive(context.tickets, ticket_state, self.packed)
            following = self.units.of_warpgroup(self.units.unit(ticket, sizes, splits), context.group, sizes)
            if cutlass.const_expr(self.carries):
                if ticket.live != 0:
                    states = self.cross_over(self.at(context, following), states, following)
                else:
                    states = self.leave(context, states)
                self.hand_out(context, room, results, unit)
            elif ticket.live != 0:
                states = self.step_over(self.at(context, following), states, (unit, following), room, results)
            else:
                states = self.leave(context, states)
                self.hand_out(context, room, results, unit)
            unit, live = following, ticket.live
        if cutlass.const_expr(self.o_apart):
            wait_output(context.thread)

    def at(self, context: MmaContext, unit: Unit) -> MmaContext:
        """Lengths are the sequence's own where several are packed."""
        if not self.packed:
            return context
        return context._replace(seqlens=(unit.place.q.count, unit.place.k.count))

    @cute.jit
    def hand_out(self, context: MmaContext, room: OutputRoom, results: tuple, unit: Unit):
        """O and LSE, or a split's share of them, leave; O starts anew."""
        frags, state, thread, tile_m = context.frags, context.done, context.thread, self.tile.tile_m
        lse, o_partial, out = results
        place = unit.work.batch
        if cutlass.const_expr(self.packed):
            place = unit.place.q
            lse = None if lse is None else only_rows(lse, 2, place)
            out = None if out is None else only_rows(out, 1, place)
        finish(frags.o, state)
        if cutlass.const_expr(o_partial is not None):
            state_partial = lse[unit.split, None, None, None, None]
            store_state(state_partial, state, unit.work, thread, tile_m, context.scale_log2)
            partial = o_partial[unit.split, unit.work.batch, unit.work.head, None, None]
            store_partial(frags.o, partial, thread, unit.row_start)
        else:
            if cutlass.const_expr(lse is not None):
                store_lse(lse, state, unit.work, thread, tile_m, context.scale_log2)
            if cutlass.const_expr(self.o_apart):
                store_output(frags.o, room, (unit.work, place), thread, self.output_shape)
            else:
                rows = out[unit.work.batch, None, unit.work.head, None]
                store_direct(frags.o, rows, thread, unit.row_start, self.dtype)
        frags.o.fill(0.0)

    @cute.jit
    def enter(self, context: MmaContext, states: tuple, unit: Unit):
        """The first scores of a unit, with nothing else in flight. -> the states, moved on; so below."""
        pipes, frags = context.pipes, context.frags
        q_state, k_state, v_state = self.skip_keys(context, states, unit)
        frags.o.fill(0.0)
        reset(context.state)
        pipes.q.consumer_wait(q_state)
        wait_full(pipes.k, k_state)
        issue_scores(self.mmas, frags, q_state.index, k_state.index)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self.release_q_after(pipes, q_state, (unit.row_start, unit.tiles.last - 1, unit.tiles.first))
        k_state.advance()
        self.probabilities(context, unit.row_start, unit.tiles.last - 1, True)
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        return self.skip_values(context, (q_state, k_state, v_state), unit)

    @cute.jit
    def skip_keys(self, context: MmaContext, states: tuple, unit: Unit):
        """K of the tile left out goes back unread, and its turn to the next warpgroup."""
        q_state, k_state, v_state = states
        if cutlass.const_expr(self.tile.skips):
            k_state = self._skip_keys(context, k_state, unit.skips)
        return q_state, k_state, v_state

    @cute.jit
    def _skip_keys(self, context: MmaContext, k_state, skips: Int32):
        if skips != 0:
            wait_turn(context.turn, self.schedule)
            pass_turn(context.turn, self.schedule)
            wait_full(context.pipes.k, k_state)
            context.pipes.k.consumer_release(k_state)
            k_state.advance()
        return k_state

    @cute.jit
    def skip_values(self, context: MmaContext, states: tuple, unit: Unit):
        """And its V, once the values of the unit before are used."""
        q_state, k_state, v_state = states
        if cutlass.const_expr(self.tile.skips):
            v_state = self._skip_values(context, v_state, unit.skips)
        return q_state, k_state, v_state

    @cute.jit
    def _skip_values(self, context: MmaContext, v_state, skips: Int32):
        if skips != 0:
            wait_full(context.pipes.v, v_state)
            context.pipes.v.consumer_release(v_state)
            v_state.advance()
        return v_state

    @cute.jit
    def through(self, context: MmaContext, states: tuple, unit: Unit):
        """The other key tiles of the unit, from the last to the first; P V of the first stays to be done."""
        q_state, k_state, v_state = states
        tiles = unit.tiles
        masked_end = cutlass.min(tiles.unmasked, tiles.last - 1)
        if cutlass.const_expr(self.mask.left or self.mask.right):  # a full mask hides keys of the last tile only
            for step in cutlass.range(tiles.last - 1 - masked_end, unroll=1):
                self.step(
                    context, (q_state, k_state, v_state), (unit.row_start, tiles.last - 2 - step, tiles.first), True
                )
                k_state.advance()
                v_state.advance()
        whole = tiles.first
        if cutlass.const_expr(self.mask.left):
            whole = cutlass.min(tiles.whole, masked_end)
        for step in cutlass.range(masked_end - whole, unroll=1):
            self.step(context, (q_state, k_state, v_state), (unit.row_start, masked_end - 1 - step, tiles.first), False)
            k_state.advance()
            v_state.advance()
        if cutlass.const_expr(self.mask.left):
            for step in cutlass.range(whole - tiles.first, unroll=1):
                self.step(context, (q_state, k_state, v_state), (unit.row_start, whole - 1 - step, tiles.first), True)
                k_state.advance()
                v_state.advance()
        return q_state, k_state, v_state

    @cute.jit
    def leave(self, context: MmaContext, states: tuple):
        """The last P V of a unit, with nothing else in flight."""
        q_state, k_state, v_state = states
        if cutlass.const_expr(self.tile.late):
            self.rescale(context.frags, context)
        wait_full(context.pipes.v, v_state)
        issue_output(self.mmas, context.frags, v_state.index)
        warpgroup.wait_group(0)
        context.pipes.v.consumer_release(v_state)
        v_state.advance()
        settle(context.state, context.done)
        return q_state, k_state, v_state

    @cute.jit
    def cross_over(self, context: MmaContext, states: tuple, following: Unit):
        if cutlass.const_expr(self.tile.halves):
            return self._cross_by_halves(context, states, following)
        return self.cross(context, states, following, False)

    @cute.jit
    def _cross_by_halves(self, context: MmaContext, states: tuple, following: Unit):
        if following.halves != 0:
            states = self.cross(context, states, following, True)
        else:
            states = self.cross(context, states, following, False)
        return states

    @cute.jit
    def cross(self, context: MmaContext, states: tuple, following: Unit, half: cutlass.Constexpr[bool]):
        """The last P V of a unit and the first scores of the following one."""
        pipes, frags = context.pipes, context.frags
        q_state, k_state, v_state = self.skip_keys(context, states, following)
        pipes.q.consumer_release(q_state)
        q_state.advance()
        wait_full(pipes.q, q_state)
        self.issue_both(context, (q_state, k_state, v_state), half)
        k_read = k_state.clone()
        k_state.advance()
        settle(context.state, context.done)
        reset(context.state)
        witnesses = self.probabilities(context, following.row_start, following.tiles.last - 1, True, half)
        self.release_k_after(pipes, k_read, witnesses)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        v_state.advance()
        self.pack(frags, half)
        return self.skip_values(context, (q_state, k_state, v_state), following)

    @cute.jit
    def release_k_after(self, pipes: ForwardPipelines, k_state, witnesses: list):
        """Not before the witnesses are there, which they are for certain: an arrival and the wait for P V stay in
        order, so that ptxas leaves so much of the softmax before the wait, under P V."""
        if cutlass.const_expr(self.tile.ahead > 0):
            there = pipes.k.is_signaling_thread
            for witness in witnesses:
                there = there & is_result(witness)
            replace(pipes.k, is_signaling_thread=there).consumer_release(k_state)

    def release_q_after(self, pipes: ForwardPipelines, q_state, place: tuple):
        """With one slot the next Q is wanted at once: after the last scores of a unit, not after their softmax."""
        if not self.carries:
            self._release_q_if_last(pipes, q_state, place)

    @cute.jit
    def _release_q_if_last(self, pipes: ForwardPipelines, q_state, place: tuple):
        if place[1] == place[2]:
            pipes.q.consumer_release(q_state)

    @cute.jit
    def step_over(self, context: MmaContext, states: tuple, units: tuple, room: OutputRoom, results: tuple):
        """The same where Q has one slot: the next Q arrives under the last P V, and O leaves under the first scores."""
        pipes, frags = context.pipes, context.frags
        unit, following = units
        q_state, k_state, v_state = self.skip_keys(context, states, following)
        q_state.advance()
        if cutlass.const_expr(self.tile.late):
            self.rescale(frags, context)
        wait_full(pipes.v, v_state)
        issue_output(self.mmas, frags, v_state.index)
        wait_full(pipes.q, q_state)
        wait_full(pipes.k, k_state)
        issue_scores(self.mmas, frags, q_state.index, k_state.index)
        warpgroup.wait_group(1)
        pipes.v.consumer_release(v_state)
        v_state.advance()
        settle(context.state, context.done)
        reset(context.state)
        self.hand_out(context, room, results, unit)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self.release_q_after(pipes, q_state, (following.row_start, following.tiles.last - 1, following.tiles.first))
        k_state.advance()
        self.probabilities(context, following.row_start, following.tiles.last - 1, True)
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        return self.skip_values(context, (q_state, k_state, v_state), following)

    def pack(self, frags: Fragments, half: bool):
        """P in 16 bits; of a half, zeros beside it, so that P V need not know."""
        if half:
            frags.p_packed.fill(0)
            packed = cute.make_tensor(frags.p_packed.iterator, cute.make_layout(self.tile.tile_n // 8))
            pack_fragment(first_half(frags.s), packed, self.dtype)
        else:
            pack_fragment(frags.s, frags.p_packed, self.dtype)

    @cute.jit
    def probabilities(
        self,
        context: MmaContext,
        row_start: Int32,
        key_tile: Int32,
        masked: bool,
        half: cutlass.Constexpr[bool] = False,
    ):
        scores = first_half(context.frags.s) if cutlass.const_expr(half) else context.frags.s
        if cutlass.const_expr(self.softcap):
            cap_scores(scores, context.cap_factor)
        if cutlass.const_expr(masked):
            key_start = key_tile * self.tile.tile_n
            if cutlass.const_expr(self.mask.windowed):
                place = (row_start, key_start)
                mask_window(scores, context.thread, place, context.seqlens, context.bounds, self.mask, self.tile)
            else:
                mask_scores(scores, context.thread, row_start, key_start, context.seqlens, self.mask.causal)
        return softmax_step(scores, context.state, context.scale_log2, masked, self.tile)

    @cute.jit
    def step(self, context: MmaContext, states: tuple, place: tuple, masked: bool):
        """`place`: (row_start, key_tile, the unit's first key tile)."""
        pipes, frags = context.pipes, context.frags
        q_state, k_state, v_state = states
        self.issue_both(context, (q_state, k_state, v_state))
        self.release_q_after(pipes, q_state, place)
        witnesses = self.probabilities(context, place[0], place[1], masked)
        self.release_k_after(pipes, k_state, witnesses)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        if cutlass.const_expr(not self.tile.late):
            self.rescale(frags, context)

    @cute.jit
    def issue_both(self, context: MmaContext, states: tuple, half: cutlass.Constexpr[bool] = False):
        """Scores of a key tile and P V of the one before; afterwards the scores are there and P V is in flight."""
        pipes, frags = context.pipes, context.frags
        q_state, k_state, v_state = states
        wait_full(pipes.k, k_state)
        wait_turn(context.turn, self.schedule)
        issue_scores(self.mmas, frags, q_state.index, k_state.index, half)
        if cutlass.const_expr(self.tile.late):
            self.rescale(frags, context)
        wait_full(pipes.v, v_state)
        issue_output(self.mmas, frags, v_state.index)
        pass_turn(context.turn, self.schedule)
        warpgroup.wait_group(1)
        if cutlass.const_expr(self.tile.ahead == 0):
            pipes.k.consumer_release(k_state)

    @cute.jit
    def rescale(self, frags: Fragments, context: MmaContext):
        """Of O, before the next P V: under the next scores where that is measured to be better, else at once."""
        if cutlass.const_expr(self.tile.votes):
            rescale_if_any(frags.o, context.state)
        else:
            rescale_output(frags.o, context.state)
