"""Forward on Hopper: memory and pipelines are opened, then each warp takes its role.

FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2: a producer warp feeds a K/V ring by TMA; MMA warpgroups take
turns on the tensor cores (ping-pong), and inside one the softmax of tile j runs under its own P V of tile j + 1.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.blocks import KeyTiles, key_tiles, never_none, part_of, window_tiles
from ..common.combine import launch_combine
from ..common.numeric import LOG2_E, pack_fragment
from ..common.order import WorkTile, head_by_head, longest_first, rounds_of, tile_count
from ..common.rowstate import RowState, make_row_state, reset, settle
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
from .load import Loads, TmaSource, load_first, load_keys, load_last, tile_copy
from .mask import mask_scores, mask_window
from .memory import ForwardLayouts, forward_layouts, forward_storage
from .mma import ForwardMmas, Fragments, issue_output, issue_scores, make_fragments
from .pipeline import (
    ForwardPipelines,
    Turn,
    forward_states,
    grant_first_turn,
    open_forward,
    pass_turn,
    turn_of,
    wait_full,
    wait_turn,
)
from .queue import SLOTS, WORDS, Ticket, TicketRing, following_unit, open_tickets, publish, receive, ticket_states
from .schedule import WARPGROUP, forward_schedule
from .softmax import cap_scores, finish, rescale_if_any, rescale_output, softmax_step
from .tiles import o_apart, persistent_keys, q_slots, skips_rescale


import os
DRAW_LEAD = 1  # key tiles still to be loaded when the next unit is drawn


class Sources(NamedTuple):
    """What the kernel reads and writes through TMA."""

    q: TmaSource  # (seqlen_q, head_dim, heads_q, batch)
    k: TmaSource  # (seqlen_k, head_dim, heads_kv, batch)
    v: TmaSource  # (head_dim_v, seqlen_k, heads_kv, batch)
    o: TmaSource | None  # (seqlen_q, head_dim_v, heads_q, batch)


class Sizes(NamedTuple):
    batch: Int32
    heads_q: Int32
    heads_kv: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    left: Int32 | None = None  # of a window
    right: Int32 | None = None


class Unit(NamedTuple):
    """What a CTA works on at a time: a query tile, or one split of its keys."""

    work: WorkTile
    row_start: Int32
    split: Int32
    tiles: KeyTiles


class MmaContext(NamedTuple):
    """Everything an MMA warpgroup needs in its loop; read-only."""

    pipes: ForwardPipelines
    tickets: TicketRing
    frags: Fragments
    state: RowState
    done: RowState  # of the unit whose output is about to leave
    scale_log2: Float32
    thread: Int32  # among the MMA threads
    turn: Turn
    seqlens: tuple
    bounds: tuple  # (left, right) of a window
    cap_factor: Float32 | None  # what raw scores are multiplied with inside a softcap


class ForwardSm90:
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile = plan.tile
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.causal = plan.mask.causal
        self.mask, self.windowed, self.softcap = plan.mask, plan.mask.windowed, plan.softcap
        self.dtype = dtype
        self.schedule = forward_schedule(plan.tile, plan.head_dim_v)
        self.mmas = ForwardMmas(plan.tile, plan.head_dim_v, dtype)
        self.max_ctas = plan.ctas
        self.persistent_keys = persistent_keys(plan.head_dim, plan.head_dim_v, str(plan.mask))
        self.skips_rescale = skips_rescale(plan.tile, plan.head_dim, plan.head_dim_v, str(plan.mask))
        self.o_apart = o_apart(plan.tile, plan.head_dim, plan.head_dim_v)
        self.q_slots = q_slots(plan.tile, plan.head_dim, plan.head_dim_v)
        self.carries = self.q_slots > 1
        self.early_q = os.environ.get("X_EQ","0")=="1" and not self.carries
        self.output_shape = OutputShape(plan.head_dim_v, self.schedule.mma_threads)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        o: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor | None,  # (batch, heads_q, seqlen_q)
        scale: Float32,
        stream,
    ):
        self.launch((q, k, v, o), lse, None, None, (scale, None, None, None), stream)

    @cute.jit
    def launch(
        self,
        tensors: tuple,
        lse: cute.Tensor | None,
        o_partial: cute.Tensor | None,
        counter: cute.Tensor | None,
        numbers: tuple,
        stream,
    ):
        """`numbers`: (scale, left, right, softcap), the last three None in a plain Plan."""
        q, k, v, o = tensors
        scale, left, right, softcap = numbers
        tile, layouts = self.tile, forward_layouts(self.tile, self.width_qk, self.width_v, self.dtype, self.q_slots)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor, modes, layout, box):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
            return TmaSource(*cpasync.make_tiled_tma_atom(op, view, cute.slice_(layout, (None, None, 0)), box))

        sources = Sources(
            q=source(load, q, [1, 3, 2, 0], layouts.q, (tile.tile_m, self.width_qk)),
            k=source(load, k, [1, 3, 2, 0], layouts.k, (tile.tile_n, self.width_qk)),
            v=source(load, v, [3, 1, 2, 0], layouts.v, (self.width_v, tile.tile_n)),
            o=source(store, o, [1, 3, 2, 0], layouts.o, (64, self.width_v)) if self.o_apart else None,
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        splits = 1 if cutlass.const_expr(o_partial is None) else o_partial.shape[0]
        scale_log2, cap_factor = scale * LOG2_E, None
        if cutlass.const_expr(self.softcap):
            scale_log2, cap_factor = softcap * LOG2_E, 2.0 * scale_log2 / softcap
        out = None if self.o_apart else o
        self.kernel(sources, (lse, o_partial, counter, out), scale_log2, cap_factor, sizes, layouts).launch(
            grid=(self._ctas(sizes, splits, counter is not None), 1, 1),
            block=(self.schedule.threads, 1, 1),
            stream=stream,
        )

    @cute.jit
    def _ctas(self, sizes: Sizes, splits: Int32, drawn: cutlass.Constexpr[bool]) -> Int32:
        units = self._units(sizes, splits)
        stay = cutlass.min(units, self.max_ctas)
        if cutlass.const_expr(drawn):
            return stay
        return stay if sizes.seqlen_k <= self.persistent_keys else units

    def _units(self, sizes: Sizes, splits: Int32) -> Int32:
        return splits * tile_count(sizes.seqlen_q, self.tile.tile_m, sizes.heads_q, sizes.batch)

    @cute.jit
    def _ticket(self, index: Int32, sizes: Sizes, splits: Int32) -> Ticket:
        m_blocks, group = cute.ceil_div(sizes.seqlen_q, self.tile.tile_m), sizes.heads_q // sizes.heads_kv
        if cutlass.const_expr(self.causal and not self.windowed):
            keys = cutlass.min(sizes.seqlen_k, 1 << 20)  # beyond any L2, and the product stays within 32 bits
            kv_bytes = keys * (self.width_qk + self.width_v) * 2
            work = longest_first(index // splits, m_blocks, sizes.heads_q, sizes.batch, kv_bytes, group)
        else:
            work = head_by_head(index // splits, m_blocks, sizes.heads_q)
        return Ticket(Int32(index < self._units(sizes, splits)), work, index % splits)

    @cute.jit
    def _unit(self, ticket: Ticket, sizes: Sizes, splits: Int32) -> Unit:
        tile, work = self.tile, ticket.work
        row_start = work.m_block * tile.tile_m
        if cutlass.const_expr(self.windowed):  # its keys are never split
            bounds = (sizes.left, sizes.right)
            tiles = window_tiles(row_start, tile, (sizes.seqlen_q, sizes.seqlen_k), bounds, self.mask)
        else:
            tiles = key_tiles(row_start, tile.tile_m, tile.tile_n, sizes.seqlen_q, sizes.seqlen_k, self.causal)
            tiles = part_of(tiles, ticket.split, splits)
        tiles = never_none(tiles, cute.ceil_div(sizes.seqlen_k, tile.tile_n))
        return Unit(work, row_start, ticket.split, tiles)

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        results: tuple,  # (lse, o_partial, counter, out); where keys are split, lse is state_partial (splits, ..., 2)
        scale_log2: Float32,
        cap_factor: Float32 | None,
        sizes: Sizes,
        layouts: ForwardLayouts,
    ):
        tile, schedule = self.tile, self.schedule
        lse, o_partial, counter, out = results
        storage = SmemAllocator().allocate(forward_storage(layouts, tile.stages, self.dtype, self.o_apart))
        smem = (
            storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
            storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
            storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
        )
        words = storage.tickets.get_tensor(cute.make_layout((WORDS, SLOTS)))
        tickets = open_tickets(storage.ticket_barriers.data_ptr(), words, schedule.mma_threads)
        s_o = None
        if cutlass.const_expr(self.o_apart):
            s_o = storage.o.get_tensor(layouts.o.outer, swizzle=layouts.o.inner)
        pipes = open_forward(storage, layouts, (self.q_slots, tile.stages), self.dtype, schedule)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        splits = Int32(1) if cutlass.const_expr(o_partial is None) else o_partial.shape[0]
        if warp < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp == 0:
                self.load_role((pipes, tickets), sources, smem, sizes, splits, counter)
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            group = warp // 4 - 1
            context = MmaContext(
                pipes=pipes,
                tickets=tickets,
                frags=make_fragments(self.mmas, smem, group),
                state=make_row_state(2),
                done=make_row_state(2),
                scale_log2=scale_log2,
                thread=thread - WARPGROUP,
                turn=turn_of(group, schedule),
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
                cap_factor=cap_factor,
            )
            room = OutputRoom(s_o, sources.o)
            self.mma_role(context, room, (lse, o_partial, out), sizes, splits)

    @cute.jit
    def load_role(
        self, pipes: tuple, sources: Sources, smem: tuple, sizes: Sizes, splits: Int32, counter: cute.Tensor | None
    ):
        pipes, tickets = pipes
        units = self._units(sizes, splits)
        rounds = rounds_of(units)
        drawn = sizes.seqlen_k > self.persistent_keys
        group = sizes.heads_q // sizes.heads_kv
        s_q, s_k, s_v = smem
        q_box, k_box = (self.tile.tile_m, self.width_qk), (self.tile.tile_n, self.width_qk)
        v_box = (self.width_v, self.tile.tile_n)
        states = forward_states(pipelines.PipelineUserType.Producer, self.q_slots, self.tile.stages)
        ticket_state = ticket_states(pipelines.PipelineUserType.Producer)
        ticket, step = self._ticket(rounds.unit(0), sizes, splits), Int32(0)
        ticket_state = publish(tickets, ticket_state, ticket)
        while ticket.live != 0:
            unit = self._unit(ticket, sizes, splits)
            work, head_kv, tiles = unit.work, unit.work.head // group, unit.tiles
            loads = Loads(
                tile_copy(sources.q, s_q, q_box, (work.m_block, 0), work.head, work.batch),
                tile_copy(sources.k, s_k, k_box, (None, 0), head_kv, work.batch),
                tile_copy(sources.v, s_v, v_box, (0, None), head_kv, work.batch),
            )
            states = load_first(pipes, states, loads, tiles)
            # as late as the answer can still be there in time: who is ready first shall draw first
            late = cutlass.min(tiles.first + int(os.environ.get('X_LEAD','1')), tiles.last - 1)
            states = load_keys(pipes, states, loads, late, tiles.last - 1)
            ticket = self._ticket(following_unit(rounds, step, units, counter, drawn), sizes, splits)
            ticket_state = publish(tickets, ticket_state, ticket)
            states = load_keys(pipes, states, loads, tiles.first, late)
            states = load_last(pipes, states, loads, tiles)
            step += 1

    @cute.jit
    def mma_role(self, context: MmaContext, room: OutputRoom, results: tuple, sizes: Sizes, splits: Int32):
        """`results`: (lse, o_partial, out), see kernel.

        Where Q has two slots, a CTA's query tiles run into each other: the first scores of the next are issued with the
        last P V of this one, as inside a tile, and their softmax runs under it.
        """
        states = forward_states(pipelines.PipelineUserType.Consumer, self.q_slots, self.tile.stages)
        ticket_state = ticket_states(pipelines.PipelineUserType.Consumer)
        grant_first_turn(context.turn, self.schedule)
        ticket, ticket_state = receive(context.tickets, ticket_state)
        unit, live = self._unit(ticket, sizes, splits), ticket.live
        states = self.enter(context, states, unit)
        while live != 0:
            states = self.walk(context, states, unit)
            ticket, ticket_state = receive(context.tickets, ticket_state)
            following = self._unit(ticket, sizes, splits)
            if cutlass.const_expr(self.carries):
                if ticket.live != 0:
                    states = self.cross(context, states, following)
                else:
                    states = self.leave(context, states)
                self.hand_out(context, room, results, unit)
            elif ticket.live != 0:
                states = self.step_over(context, states, (unit, following), room, results)
            else:
                states = self.leave(context, states)
                self.hand_out(context, room, results, unit)
            unit, live = following, ticket.live
        if cutlass.const_expr(self.o_apart):
            wait_output(context.thread)

    @cute.jit
    def hand_out(self, context: MmaContext, room: OutputRoom, results: tuple, unit: Unit):
        """O and LSE, or a split's share of them, leave; O starts anew."""
        frags, state, thread, tile_m = context.frags, context.done, context.thread, self.tile.tile_m
        lse, o_partial, out = results
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
                store_output(frags.o, room, unit.work, thread, self.output_shape)
            else:
                rows = out[unit.work.batch, None, unit.work.head, None]
                store_direct(frags.o, rows, thread, unit.row_start, self.dtype)
        frags.o.fill(0.0)

    @cute.jit
    def enter(self, context: MmaContext, states: tuple, unit: Unit):
        """The first scores of a unit, with nothing else in flight. -> the states, moved on; so below."""
        pipes, frags = context.pipes, context.frags
        q_state, k_state, v_state = states
        frags.o.fill(0.0)
        reset(context.state)
        pipes.q.consumer_wait(q_state)
        wait_full(pipes.k, k_state)
        issue_scores(self.mmas, frags, q_state.index, k_state.index)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        if cutlass.const_expr(self.early_q):
            if unit.tiles.last - 1 == unit.tiles.first:
                pipes.q.consumer_release(q_state)
        k_state.advance()
        self.probabilities(context, unit.row_start, unit.tiles.last - 1, True)
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        return q_state, k_state, v_state

    @cute.jit
    def walk(self, context: MmaContext, states: tuple, unit: Unit):
        """The other key tiles of the unit, from the last to the first; P V of the first stays to be done."""
        q_state, k_state, v_state = states
        tiles = unit.tiles
        masked_end = cutlass.min(tiles.unmasked, tiles.last - 1)
        if cutlass.const_expr(self.causal or self.windowed):  # a full mask hides keys of the last tile only
            for step in cutlass.range(tiles.last - 1 - masked_end, unroll=1):
                self.step(context, (q_state, k_state, v_state), (unit.row_start, tiles.last - 2 - step, tiles.first), True)
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
        wait_full(context.pipes.v, v_state)
        issue_output(self.mmas, context.frags, v_state.index)
        warpgroup.wait_group(0)
        context.pipes.v.consumer_release(v_state)
        v_state.advance()
        settle(context.state, context.done)
        return q_state, k_state, v_state

    @cute.jit
    def cross(self, context: MmaContext, states: tuple, following: Unit):
        """The last P V of a unit and the first scores of the following one."""
        pipes, frags = context.pipes, context.frags
        q_state, k_state, v_state = states
        pipes.q.consumer_release(q_state)
        q_state.advance()
        wait_full(pipes.q, q_state)
        wait_full(pipes.k, k_state)
        wait_turn(context.turn, self.schedule)
        issue_scores(self.mmas, frags, q_state.index, k_state.index)
        wait_full(pipes.v, v_state)
        issue_output(self.mmas, frags, v_state.index)
        pass_turn(context.turn, self.schedule)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        k_state.advance()
        settle(context.state, context.done)
        reset(context.state)
        self.probabilities(context, following.row_start, following.tiles.last - 1, True)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        v_state.advance()
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        return q_state, k_state, v_state

    @cute.jit
    def step_over(self, context: MmaContext, states: tuple, units: tuple, room: OutputRoom, results: tuple):
        """The same where Q has one slot: the next Q arrives under the last P V, and O leaves under the first scores."""
        pipes, frags = context.pipes, context.frags
        unit, following = units
        q_state, k_state, v_state = states
        if cutlass.const_expr(not self.early_q):
            pipes.q.consumer_release(q_state)
        q_state.advance()
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
        if cutlass.const_expr(self.early_q):
            if following.tiles.last - 1 == following.tiles.first:
                pipes.q.consumer_release(q_state)
        k_state.advance()
        self.probabilities(context, following.row_start, following.tiles.last - 1, True)
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        return q_state, k_state, v_state

    @cute.jit
    def probabilities(self, context: MmaContext, row_start: Int32, key_tile: Int32, masked: bool):
        scores = context.frags.s
        if cutlass.const_expr(self.softcap):
            cap_scores(scores, context.cap_factor)
        if cutlass.const_expr(masked):
            key_start = key_tile * self.tile.tile_n
            if cutlass.const_expr(self.windowed):
                place = (row_start, key_start)
                mask_window(scores, context.thread, place, context.seqlens, context.bounds, self.mask, self.tile)
            else:
                mask_scores(scores, context.thread, row_start, key_start, context.seqlens, self.causal)
        softmax_step(scores, context.state, context.scale_log2, masked)

    @cute.jit
    def step(self, context: MmaContext, states: tuple, place: tuple, masked: bool):
        """Scores of a key tile and O += P V of the one before are in flight together; the softmax runs under P V.

        `place`: (row_start, key_tile).
        """
        pipes, frags = context.pipes, context.frags
        q_state, k_state, v_state = states
        wait_full(pipes.k, k_state)
        wait_turn(context.turn, self.schedule)
        issue_scores(self.mmas, frags, q_state.index, k_state.index)
        wait_full(pipes.v, v_state)
        issue_output(self.mmas, frags, v_state.index)
        pass_turn(context.turn, self.schedule)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        if cutlass.const_expr(self.early_q):
            if place[1] == place[2]:
                pipes.q.consumer_release(q_state)
        self.probabilities(context, place[0], place[1], masked)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        if cutlass.const_expr(self.skips_rescale):
            rescale_if_any(frags.o, context.state)
        else:
            rescale_output(frags.o, context.state)


class BoundedForwardSm90(ForwardSm90):
    """The same kernel for Plans that are not plain: a window's bounds and a softcap arrive beside the scale."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        left: Int32,
        right: Int32,
        softcap: Float32,
        stream,
    ):
        self.launch((q, k, v, o), lse, None, None, (scale, left, right, softcap), stream)


class SplitForwardSm90(ForwardSm90):
    """The same kernel for query tiles too few to fill the GPU: several CTAs share one, each with a run of keys."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        o_partial: cute.Tensor,  # (splits, batch, heads_q, seqlen_q, width_v) float32
        state_partial: cute.Tensor,  # (splits, batch, heads_q, seqlen_q, 2) float32
        stream,
    ):
        self.launch((q, k, v, o), state_partial, o_partial, None, (scale, None, None, None), stream)
        launch_combine(o_partial, state_partial, o, lse, stream)


class DrawnForwardSm90(ForwardSm90):
    """The same kernel for query tiles of unequal length: beyond `persistent_keys`, CTAs draw the next one."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        counter: cute.Tensor,  # (1,) int32, zero before and after
        stream,
    ):
        self.launch((q, k, v, o), lse, None, counter, (scale, None, None, None), stream)
