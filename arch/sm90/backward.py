"""Backward on Hopper: a CTA takes tiles of keys, walks the query tiles that see each, and keeps dK and dV in registers.

FlashAttention-2 (arXiv 2307.08691), algorithm 2, with FlashAttention-3's (arXiv 2407.08608) division of labour: a warp
feeds Q and dO by TMA, MMA warpgroups recompute P, and another warp adds each tile of dQ to global memory. The query
heads of a group are walked by one CTA, so dK and dV need no addition in memory. CTAs stay: the feeding warp draws the
next unit, a tile of keys of a head, when the last loads of one are on their way, and dK and dV leave from registers, so
that the next K, V, Q and dO arrive meanwhile. A CTA for each would pay 9500 cycles between its start and its end.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

from ..common import delta
from ..common.entry import BoundedEntry, PackedBoundedEntry, PackedEntry, PlainEntry
from ..common.keyunits import Unit, ahead_of, first_stop, next_stop
from ..common.numeric import LOG2_E
from ..common.order import Sizes
from ..common.ragged import slots_of
from .epilogue import store_direct
from .grad import convert, zeros
from .grad.epilogue import add_unit, add_unit_in_turn, hand_over_dq
from .grad.load import Feed, Sources, feed_unit, give_way, prefetch_descriptors, sources_of, tile_copy
from .grad.mask import mask_transposed
from .grad.memory import backward_layouts, rooms_of, storage_of, zeros_of
from .grad.mma import Accumulators, BackwardMmas, as_operand, issue, make_accumulators, make_operands
from .grad.pipeline import (
    DQ_FULL,
    DS_STORED,
    BackwardPipelines,
    as_words,
    backward_states,
    hold,
    in_turn_full,
    open_backward,
)
from .grad.queue import announce, draw, open_units, receive, unit_states
from .grad.schedule import ADDERS, FIRST_ADD_WARP, LOAD_WARP, ZERO_WARP, backward_schedule
from .grad.units import KeyUnits, PackedKeyUnits
from .grad.weights import (
    by_columns,
    capped_probabilities,
    exponentials,
    probabilities,
    score_gradients,
    store_packed,
    weights_and_gradients,
)
from .pipeline import wait_full
from .schedule import WARPGROUP
from .sequences import Lengths, launch_prepare, table_of
from .tiles import APART, TABLE, alternates, dq_width, heads_together, table_room


class MmaContext(NamedTuple):
    """Everything an MMA warpgroup needs in its loop; read-only."""

    pipes: BackwardPipelines
    ops: NamedTuple  # of shared memory, as descriptors
    acc: NamedTuple  # registers
    rooms: NamedTuple  # shared memory, as memory.py lays it out
    s_rows: cute.Tensor  # (2 * tile_m, stages)
    s_dq: cute.Tensor | None  # (elements, parts)
    factors: tuple  # (what the exponent takes scores times, what goes inside a softcap)
    thread: Int32  # among the MMA threads
    group: Int32  # the warpgroup, of these
    seqlens: tuple
    bounds: tuple  # (left, right) of a window
    dv_rows: cute.Tensor | None = None  # (keys, head_dim) of dV, of a unit
    shared: tuple = (None, None)  # Scratch.shares and arrived


class BackwardSm90(PlainEntry):
    """One Plan's kernel. Everything read here comes from the Plan. The kernels of wide heads that own keys derive from
    this one: they differ in what a tile's step does, in the rooms it wants and in whether they make dQ."""

    makes_dq = True
    key_units = KeyUnits

    def __init__(self, plan: Plan, dtype: type):
        self.tile, self.max_ctas = plan.tile, plan.ctas
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.width_dq = dq_width(plan.head_dim, plan.tile, plan.variant)
        self.mask, self.softcap = plan.mask, plan.softcap
        self.dtype = dtype
        self.alternate = alternates(plan.head_dim, plan.variant)
        # are parts of dQ added in a fixed order? Then units are walked so that few wait: see unit_of
        self.in_turn = plan.deterministic and plan.variant != APART
        self.packed = plan.form == PACKED
        self.units = (PackedKeyUnits if self.packed else self.key_units)(plan, self.in_turn)
        self.mmas = self.make_mmas()
        self.schedule = backward_schedule(self.mmas.warpgroups)

    def make_mmas(self):
        return BackwardMmas(self.tile, self.width_qk, self.width_v, self.width_dq, self.dtype, alternate=self.alternate)

    @property
    def slots(self) -> tuple[int, int]:
        """Of Q and of dO."""
        return self.tile.stages, self.tile.stages

    def layouts(self) -> NamedTuple:
        widths = (self.width_qk, self.width_v, self.width_dq)
        return backward_layouts(self.tile, widths, self.mmas.dq_columns, self.dtype)

    def operands(self, rooms: NamedTuple, group: Int32) -> NamedTuple:
        return make_operands(self.mmas, rooms, group)

    def accumulators(self) -> NamedTuple:
        return make_accumulators(self.mmas)

    @cute.jit
    def launch(self, tensors: tuple, others: tuple, numbers: tuple, memory: cute.Tensor, stream):
        """Three kernels; see common/entry.py."""
        q, k, v, do, dq, dk, dv = tensors
        o, lse, dlse = others
        scale, left, right, softcap = numbers
        tile = self.tile
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        row_blocks = cute.ceil_div(sizes.seqlen_q, tile.tile_m)
        by_row_tile = (row_blocks, sizes.heads_q, sizes.batch)
        parts = self.mmas.dq_parts if self.in_turn else 0
        zeroes = self.units.zeroes
        scratch = delta.scratch_of(memory, by_row_tile, tile.tile_m, self.width_dq, parts, 1, ahead=zeroes)
        scratch, ahead = self.extended(scratch, memory, sizes), None
        if cutlass.const_expr(zeroes):
            widths, most = (self.width_qk, self.width_v), heads_together(False)
            ahead = ahead_of(sizes, tile, widths, self.mask, most)
        prepared = scratch._replace(dq=None) if cutlass.const_expr(self.in_turn) else scratch  # who adds first stores
        delta.prepare_kernel(do, o, lse, dlse, prepared, tile.tile_m, self.width_v, ahead).launch(
            grid=delta.row_tile_grid(by_row_tile), block=(delta.THREADS, 1, 1), stream=stream
        )
        zeroing = zeros.Zeroing(scratch)
        units = self.units.count(zeroing, sizes)
        if cutlass.const_expr(zeroes):
            zeroing = zeros.Zeroing(scratch, ahead, sizes.heads_kv, units)
        factors = self.factors(scale, softcap)
        self.launch_keys((q, k, v, do), (zeroing, dk, dv), (scale, factors), sizes, units, stream)
        shape = (tile.tile_m, self.mmas.dq_columns)
        convert.convert_kernel(scratch.dq, dq, scale, shape, scratch.turns).launch(
            grid=delta.row_tile_grid(by_row_tile), block=(self.mmas.dq_parts * WARPGROUP, 1, 1), stream=stream
        )

    def extended(self, scratch: delta.Scratch, memory: cute.Tensor, sizes: Sizes) -> delta.Scratch:
        return scratch

    @cute.jit
    def launch_packed(self, tensors: tuple, others: tuple, numbers: tuple, starts: tuple, memory: cute.Tensor, stream):
        """Four kernels. `starts`: (cu_seqlens_q, cu_seqlens_k); `memory`: the table, then the scratch, where every
        sequence has slots of its own (common/ragged.py). Sums start as zeros in delta's kernel, but in turn."""
        q, k, v, do, dq, dk, dv = tensors
        o, lse, dlse = others
        scale, left, right, softcap = numbers
        starts_q, starts_k = starts
        tile, sequences = self.tile, starts_q.shape[0] - 1
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        table = table_of(cute.make_tensor(cute.recast_ptr(memory.iterator, dtype=Int32), memory.layout), sequences)
        launch_prepare(Lengths(starts_k, starts_q, sizes.seqlen_k, sizes.seqlen_q), table, tile.tile_n, stream)
        by_slot = (slots_of(sizes.seqlen_q, sequences, tile.tile_m), sizes.heads_q, Int32(1))
        parts = self.mmas.dq_parts if self.in_turn else 0
        room = cute.domain_offset((table_room(TABLE.elements(sequences)),), memory)
        scratch = delta.scratch_of(room, by_slot, tile.tile_m, self.width_dq, parts, 1)
        prepared = scratch._replace(dq=None) if cutlass.const_expr(self.in_turn) else scratch
        delta.prepare_kernel(do, o, lse, dlse, prepared, tile.tile_m, self.width_v, None, starts_q).launch(
            grid=delta.row_tile_grid(by_slot), block=(delta.THREADS, 1, 1), stream=stream
        )
        units = slots_of(sizes.seqlen_k, sequences, tile.tile_n) * sizes.heads_kv
        factors = self.factors(scale, softcap)
        results = (zeros.Zeroing(scratch, table=table), dk, dv)
        self.launch_keys((q, k, v, do), results, (scale, factors), sizes, units, stream)
        shape = (tile.tile_m, self.mmas.dq_columns)
        convert.convert_kernel(scratch.dq, dq, scale, shape, scratch.turns, starts_q).launch(
            grid=delta.row_tile_grid(by_slot), block=(self.mmas.dq_parts * WARPGROUP, 1, 1), stream=stream
        )

    @cute.jit
    def factors(self, scale: Float32, softcap: Float32 | None) -> tuple:
        """See MmaContext."""
        factors = (scale * LOG2_E, None)
        if cutlass.const_expr(self.softcap):
            factors = (softcap * LOG2_E, 2.0 * LOG2_E * scale / softcap)
        return factors

    @cute.jit
    def launch_keys(self, moved: tuple, results: tuple, numbers: tuple, sizes: Sizes, units: Int32, stream):
        """The kernel alone. `moved`: (q, k, v, do), through TMA; `results`: (zeroing, dk, dv); `numbers`: (scale,
        factors); `units`: at most so many."""
        scale, factors = numbers
        layouts = self.layouts()
        sources = sources_of(moved, layouts, self.tile, (self.width_qk, self.width_dq, self.width_v), self.packed)
        self.kernel(sources, results, scale, factors, sizes, layouts).launch(
            grid=(cutlass.min(units, self.max_ctas), 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        results: tuple,  # see launch_keys
        scale: Float32,
        factors: tuple,
        sizes: Sizes,
        layouts: NamedTuple,
    ):
        tile, schedule = self.tile, self.schedule
        zeroing, dk, dv = results
        makes_dq, zeroes = self.makes_dq, self.makes_dq and self.units.zeroes
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch_descriptors(warp_index, (sources.k, sources.q, sources.v, sources.do))
        floats, receivers, s_dq = {}, schedule.mma_warps, None
        if cutlass.const_expr(makes_dq):
            floats = {"dq": tile.tile_m * self.width_dq}
            receivers += self.adders
        if cutlass.const_expr(zeroes):
            floats["zeros"] = zeros_of(tile)
            receivers += 1
        storage = SmemAllocator().allocate(storage_of(layouts, self.dtype, 2 * tile.tile_m, floats))
        rooms = rooms_of(storage, layouts)
        s_rows = storage.rows.get_tensor(cute.make_layout((2 * tile.tile_m, tile.stages)))
        ring = open_units(storage.unit_barriers.data_ptr(), storage.units.data_ptr(), receivers)
        units = ring, sizes.heads_q // sizes.heads_kv
        pipes = open_backward(storage, layouts, 2 * tile.tile_m, self.dtype, schedule)
        if cutlass.const_expr(makes_dq):
            parts = (tile.tile_m * self.width_dq // self.mmas.dq_parts, self.mmas.dq_parts)
            s_dq = storage.dq.get_tensor(cute.make_layout(parts))

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            cute.arch.griddepcontrol_wait()
            if warp_index == LOAD_WARP:
                if cutlass.const_expr(not makes_dq):
                    cute.arch.griddepcontrol_launch_dependents()  # it reads what was waited for alone: see dq.py
                self.load_role(pipes, units, (sources, zeroing), (rooms, s_rows), sizes)
            else:
                if cutlass.const_expr(makes_dq):
                    if warp_index < FIRST_ADD_WARP + self.adders:
                        self.add_role(s_dq, zeroing, units, warp_index - FIRST_ADD_WARP, sizes)
                    elif warp_index == ZERO_WARP:
                        self.zero_role(zeroing, storage, ring)
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            context = MmaContext(
                pipes=pipes,
                ops=self.operands(rooms, warp_index // 4 - 1),
                acc=self.accumulators(),
                rooms=rooms,
                s_rows=s_rows,
                s_dq=s_dq,
                factors=factors,
                thread=thread - WARPGROUP,
                group=warp_index // 4 - 1,
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
                shared=(zeroing.scratch.shares, zeroing.scratch.arrived),
            )
            self.mma_role(context, units, (dk, dv), scale)

    @cute.jit
    def load_role(self, pipes: BackwardPipelines, units: tuple, origin: tuple, rooms: tuple, sizes: Sizes):
        sources, zeroing = origin
        smem, s_rows = rooms
        tile, counters = self.tile, zeroing.scratch.counters
        ring, _ = units
        states = backward_states(pipelines.PipelineUserType.Producer, self.slots)
        ticket_state, count = unit_states(pipelines.PipelineUserType.Producer), self.units.count(zeroing, sizes)
        index = draw(counters, 0)  # the first too: who has not started must not hold what others wait for
        while index < count:
            unit = self.units.at(index, zeroing, sizes)
            ticket_state = announce(ring, ticket_state, self.units.ticket(index, unit))
            if cutlass.const_expr(self.in_turn and self.mask.causal and not self.packed):
                give_way(unit.tiles.count, count, sizes, self.tile.tile_m)
            queries, keys = self.units.places(unit)
            feed = Feed(
                k=tile_copy(sources.k, smem.k, (tile.tile_n, self.width_dq), keys),
                v=tile_copy(sources.v, smem.v, (tile.tile_n, self.width_v), keys),
                q=tile_copy(sources.q, smem.q, (tile.tile_m, self.width_qk), queries),
                do=tile_copy(sources.do, smem.do, (tile.tile_m, self.width_v), queries),
                row_values=self.units.scratch(zeroing.scratch, unit).rows[None, None, None, unit.batch],
                s_rows=s_rows,
            )
            states = feed_unit(pipes, states, feed, unit, self.in_turn)
            index = draw(counters, 0)
        announce(ring, ticket_state, (Int32(0),))

    @property
    def adders(self) -> int:
        """Warps that add parts of dQ to global memory."""
        return ADDERS if self.in_turn else self.mmas.dq_parts

    def full(self, q_state, part: Int32):
        """The barrier at which a warp waits for a part of dQ of a query tile."""
        if self.in_turn:
            return in_turn_full(q_state.count * self.mmas.dq_parts + part, self.mmas.dq_parts)
        return DQ_FULL + part

    @cute.jit
    def add_role(self, s_dq: cute.Tensor, zeroing: zeros.Zeroing, units: tuple, adder: Int32, sizes: Sizes):
        """`adder`: which of the warps that add: of a part, or in turn of every third part, whichever."""
        ticket_state = unit_states(pipelines.PipelineUserType.Consumer)
        ring, group_size = units
        first = Int32(0)  # of the jobs of a unit
        owed = Int32(cutlass.select_(adder < self.mmas.dq_parts, adder, -1))  # a part whose room is free, not offered
        ticket, ticket_state = receive(ring, ticket_state)
        while ticket[0] != 0:
            unit = self.units.told(ticket, group_size, (sizes.left, sizes.right))
            scratch = self.units.scratch(zeroing.scratch, unit)
            seqlen_q, seqlen_k = self.units.seqlens(unit, (sizes.seqlen_q, sizes.seqlen_k))
            own = sizes._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            if cutlass.const_expr(self.in_turn):
                origin, jobs = (scratch, unit, own), (adder, first, owed)
                first, owed = add_unit_in_turn(s_dq, origin, jobs, self.tile, self.mask)
            else:
                if cutlass.const_expr(self.units.zeroes):
                    zeros.wait_zeroed(zeroing, unit)
                add_unit(s_dq, scratch, unit, adder)
            ticket, ticket_state = receive(ring, ticket_state)

    @cute.jit
    def zero_role(self, zeroing: zeros.Zeroing, storage: cutlass.Constexpr, ring: tuple):
        if cutlass.const_expr(self.units.zeroes):
            size = zeros_of(self.tile)
            zeros.zero_role(zeroing, storage.zeros.get_tensor(cute.make_layout(size)), ring)

    @cute.jit
    def mma_role(self, context: MmaContext, units: tuple, targets: tuple, scale: Float32):
        """`targets`: (dk, dv)."""
        dk, dv = targets
        states = backward_states(pipelines.PipelineUserType.Consumer, self.slots)
        ticket_state = unit_states(pipelines.PipelineUserType.Consumer)
        ring, group_size = units
        ticket, ticket_state = receive(ring, ticket_state)
        while ticket[0] != 0:
            unit = self.units.told(ticket, group_size, context.bounds)
            seqlens = self.units.seqlens(unit, context.seqlens)
            dv_rows = self.units.key_rows(dv, unit)
            states = self.through(context._replace(seqlens=seqlens, dv_rows=dv_rows), states, unit)
            self.hand_out(context, unit, (self.units.key_rows(dk, unit), dv_rows), scale)
            ticket, ticket_state = receive(ring, ticket_state)

    @cute.jit
    def hand_out(self, context: MmaContext, unit: Unit, rows: tuple, scale: Float32):
        """dK and dV of a unit. `rows`: (keys, head_dim) of each."""
        acc, thread, row_start = context.acc, context.thread, unit.key_block * self.tile.tile_n
        dk_rows, dv_rows = rows
        if cutlass.const_expr(not self.tile.under):
            self.leave(acc.dv, dv_rows, thread, row_start, self.width_v)
        acc.dk.store(acc.dk.load() * scale)
        self.leave(acc.dk, dk_rows, thread, row_start, self.width_qk)

    def leave(self, acc: cute.Tensor, rows: cute.Tensor, thread: Int32, row_start: Int32, width: int):
        """A warpgroup's 64 keys of dK or dV. rows: (seqlen_k, head_dim)."""
        store_direct(acc, rows, thread, row_start, self.dtype)

    @cute.jit
    def through(self, context: MmaContext, states: tuple, unit: Unit):
        """One unit. -> the states moved on"""
        pipes, acc = context.pipes, context.acc
        kv_state, q_state, do_state = states
        acc.dk.fill(0.0)
        acc.dv.fill(0.0)
        tiles, key_start = unit.tiles, unit.key_block * self.tile.tile_n
        wait_full(pipes.k, kv_state)
        wait_full(pipes.v, kv_state)
        stop, left = first_stop(unit, self.in_turn), tiles.count * unit.group
        if left == 0:
            pipes.k.consumer_release(kv_state)
            pipes.v.consumer_release(kv_state)
            if cutlass.const_expr(self.tile.under):
                self.leave(acc.dv, context.dv_rows, context.thread, key_start, self.width_v)
        for _ in cutlass.range(left, unroll=1):
            at = stop[0]
            masked = (at < tiles.whole_first) | (at >= tiles.whole_last)
            left -= 1
            self.step(context, (kv_state, q_state, do_state), (at, key_start), masked, left == 0)
            q_state.advance()
            do_state.advance()
            stop = next_stop(stop, unit, self.in_turn)
        kv_state.advance()
        return kv_state, q_state, do_state

    @cute.jit
    def step(self, context: MmaContext, states: tuple, turn: tuple, masked, last):
        """One query tile. `turn`: (tile, first key); after the `last` one K and V are given back.

        P is formed under dP, and dQ leaves under dK. dV is issued when dS is done: before, its matmuls would stand in
        the way of dS in the warp's order while the tensor cores work for another warpgroup.
        """
        pipes, ops, acc, thread = context.pipes, context.ops, context.acc, context.thread
        kv_state, q_state, do_state = states
        rows = cute.local_tile(context.s_rows[None, q_state.index], (self.tile.tile_m,), (None,))  # (tile_m, 2)
        wait_full(pipes.q, q_state)
        q, do = ops.q[None, None, None, q_state.index], ops.do[None, None, None, do_state.index]
        issue(self.mmas.scores(), acc.s, ops.k[None, None, None, 0], q, False)
        lse = self.values_of(rows[None, 0], thread)
        wait_full(pipes.do, do_state)
        issue(self.mmas.scores(), acc.dp, ops.v[None, None, None, 0], do, False)
        warpgroup.wait_group(1)
        if masked:
            at, key_start = turn
            place = (at * self.tile.tile_m, key_start)
            mask_transposed(acc.s, thread, place, context.seqlens, context.bounds, self.mask)
        formed, count = acc.p_packed, self.tile.ahead // 2
        if cutlass.const_expr(self.softcap):
            capped_probabilities(acc.s, acc.p_packed, lse, context.factors, self.dtype)
        elif cutlass.const_expr(self.mmas.dq_transposed):
            exponentials(acc.s, lse, context.factors[0])
            formed, count = as_words(acc.s), self.tile.ahead
        else:
            probabilities(acc.s, acc.p_packed, lse, context.factors[0], self.dtype)
        if cutlass.const_expr(self.tile.ahead > 0):
            hold(formed, count)
        delta = self.values_of(rows[None, 1], thread)
        warpgroup.wait_group(0)
        if last:
            pipes.v.consumer_release(kv_state)
        if cutlass.const_expr(self.mmas.dq_transposed and not self.softcap):
            weights_and_gradients(acc.s, acc.dp, (acc.p_packed, acc.ds_packed), delta, self.dtype)
        else:
            score_gradients(acc.s, acc.dp, acc.ds_packed, delta, self.dtype)
        ds_slot = q_state.index
        self.store_ds(acc, context.rooms.ds[None, None, ds_slot], thread)
        do_columns = ops.do_columns[None, None, None, do_state.index]
        issue(self.mmas.by_keys(self.width_v), acc.dv, as_operand(acc.p_packed, self.dtype), do_columns, True)
        cute.arch.fence_view_async_shared()
        ds, k_columns = ops.ds[None, None, None, ds_slot], ops.k_columns[None, None, None, 0]
        q_columns = ops.q_columns[None, None, None, q_state.index]
        if cutlass.const_expr(self.alternate):
            if context.group == ds_slot:
                cute.arch.barrier(barrier_id=DS_STORED + ds_slot, number_of_threads=self.schedule.mma_threads)
                warpgroup.wait_group(0)
                issue(self.mmas.dq(), acc.dq, ds, k_columns, False)
                warpgroup.wait_group(0)
                hand_over_dq(acc.dq, context.s_dq, Int32(0), self.full(q_state, Int32(0)), thread)
            else:
                cute.arch.barrier_arrive(barrier_id=DS_STORED + ds_slot, number_of_threads=self.schedule.mma_threads)
                warpgroup.wait_group(0)
            pipes.do.consumer_release(do_state)
            if last:
                pipes.k.consumer_release(kv_state)
            issue(self.mmas.by_keys(self.width_qk), acc.dk, as_operand(acc.ds_packed, self.dtype), q_columns, True)
        else:
            cute.arch.barrier(barrier_id=DS_STORED, number_of_threads=self.schedule.mma_threads)
            factors = (k_columns, ds) if cutlass.const_expr(self.mmas.dq_transposed) else (ds, k_columns)
            issue(self.mmas.dq(), acc.dq, *factors, False)
            warpgroup.wait_group(1)
            pipes.do.consumer_release(do_state)
            issue(self.mmas.by_keys(self.width_qk), acc.dk, as_operand(acc.ds_packed, self.dtype), q_columns, True)
            warpgroup.wait_group(1)
            if last:
                pipes.k.consumer_release(kv_state)
            hand_over_dq(acc.dq, context.s_dq, context.group, self.full(q_state, context.group), thread)
            if cutlass.const_expr(self.tile.under):
                self.leave_values(context, turn[1], last)
        warpgroup.wait_group(0)
        pipes.q.consumer_release(q_state)

    @cute.jit
    def leave_values(self, context: MmaContext, key_start: Int32, last):
        """dV of a unit, complete when dQ of its last tile is."""
        if last:
            self.leave(context.acc.dv, context.dv_rows, context.thread, key_start, self.width_v)

    def values_of(self, values: cute.Tensor, thread: Int32):
        """LSE or delta of a thread's columns: see by_columns. Early: loaded here, before the wait that follows."""
        found = by_columns(values, thread, self.tile.tile_m)
        return list(found) if self.tile.early else found

    def store_ds(self, acc: Accumulators, s_ds: cute.Tensor, thread: Int32):
        """This warpgroup's keys of dS^T. s_ds: (tile_m, tile_n)."""
        by_keys = cute.make_tensor(s_ds.iterator, cute.select(s_ds.layout, mode=[1, 0]))
        shape, transposed = (self.tile.tile_n, self.tile.tile_m), self.mmas.dq_transposed
        store_packed(acc.ds_packed, by_keys, self.mmas.scores(), shape, thread, transposed)


class BoundedBackwardSm90(BoundedEntry, BackwardSm90):
    """For a Plan that is not plain."""


class PackedBackwardSm90(PackedEntry, BackwardSm90):
    """For packed sequences."""


class PackedBoundedBackwardSm90(PackedBoundedEntry, BackwardSm90):
    """Both."""
