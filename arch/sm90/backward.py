"""Backward on Hopper: a CTA owns a tile of keys, walks the query tiles that see it, and keeps dK and dV in registers.

FlashAttention-2 (arXiv 2307.08691), algorithm 2, with FlashAttention-3's (arXiv 2407.08608) division of labour: a warp
feeds Q and dO by TMA, MMA warpgroups recompute P, and another warp adds each tile of dQ to global memory. The query
heads of a group are walked by one CTA, so dK and dV need no addition in memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common import delta
from ..common.entry import BoundedEntry, PlainEntry
from ..common.keyunits import Unit, first_key_tile, unit_of
from ..common.numeric import LOG2_E
from ..common.order import Sizes
from .grad import convert
from .grad.epilogue import GradientRoom, add_dq, hand_over_dq, store_rows
from .grad.load import Feed, load_role, prefetch_descriptors, tile_copy
from .grad.mask import mask_transposed
from .grad.memory import BackwardLayouts, TmaSource, backward_layouts, backward_storage
from .grad.mma import Accumulators, BackwardMmas, Operands, as_operand, issue, make_accumulators, make_operands
from .grad.pipeline import (
    DQ_EMPTY,
    DQ_THREADS,
    DS_STORED,
    OPERANDS_DEAD,
    BackwardPipelines,
    backward_states,
    open_backward,
)
from .grad.schedule import FIRST_ADD_WARP, LOAD_WARP, backward_schedule
from .grad.weights import capped_probabilities, probabilities, score_gradients
from .pipeline import wait_full
from .schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .tiles import dq_width


class Sources(NamedTuple):
    """What the kernel reads and writes through TMA; modes (seqlen, width, heads, batch)."""

    q: TmaSource
    k: TmaSource
    v: TmaSource
    do: TmaSource
    dk: TmaSource
    dv: TmaSource


class MmaContext(NamedTuple):
    """Everything an MMA warpgroup needs in its loop; read-only."""

    pipes: BackwardPipelines
    ops: Operands
    acc: Accumulators
    s_rows: cute.Tensor  # (2 * tile_m, stages)
    s_ds: cute.Tensor  # (tile_m, tile_n, slots)
    s_dq: cute.Tensor  # (elements, warpgroups)
    factors: tuple  # (what the exponent takes scores times, what goes inside a softcap)
    thread: Int32  # among the MMA threads
    key_start: Int32
    seqlens: tuple
    bounds: tuple  # (left, right) of a window


class BackwardSm90(PlainEntry):
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile = plan.tile
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.mask, self.softcap = plan.mask, plan.softcap
        self.dtype, self.kind = dtype, (dtype, plan.tile.tile_m)
        self.schedule = backward_schedule(plan.tile.tile_n // ROWS_PER_WARPGROUP)
        self.deterministic = plan.deterministic
        self.width_dq = dq_width(plan.head_dim, plan.tile)
        self.mmas = BackwardMmas(plan.tile, plan.head_dim, plan.head_dim_v, self.width_dq, dtype)

    @cute.jit
    def launch(self, tensors: tuple, others: tuple, numbers: tuple, memory: cute.Tensor, stream):
        """Three kernels; see common/entry.py."""
        q, k, v, do, dq, dk, dv = tensors
        o, lse, dlse = others
        scale, left, right, softcap = numbers
        tile, widths = self.tile, (self.width_qk, self.width_v, self.width_dq)
        layouts = backward_layouts(tile, widths, self.mmas.dq_columns, self.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor, layout, rows, width):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))
            box = cute.slice_(layout, (None, None, 0))
            return TmaSource(*cpasync.make_tiled_tma_atom(op, view, box, (rows, width)))

        sources = Sources(
            q=source(load, q, layouts.q, tile.tile_m, self.width_qk),
            k=source(load, k, layouts.k, tile.tile_n, self.width_dq),
            v=source(load, v, layouts.v, tile.tile_n, self.width_v),
            do=source(load, do, layouts.do, tile.tile_m, self.width_v),
            dk=source(store, dk, layouts.dk, ROWS_PER_WARPGROUP, self.width_qk),
            dv=source(store, dv, layouts.dv, ROWS_PER_WARPGROUP, self.width_v),
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        row_blocks = cute.ceil_div(sizes.seqlen_q, tile.tile_m)
        by_row_tile = (row_blocks, sizes.heads_q, sizes.batch)
        parts = self.schedule.mma_warpgroups if self.deterministic else 0
        scratch = delta.scratch_of(memory, by_row_tile, tile.tile_m, self.width_dq, parts)
        delta.prepare_kernel(do, o, lse, dlse, scratch, tile.tile_m, self.width_v).launch(
            grid=by_row_tile, block=(delta.THREADS, 1, 1), stream=stream
        )
        factors = (scale * LOG2_E, None)
        if cutlass.const_expr(self.softcap):
            factors = (softcap * LOG2_E, 2.0 * LOG2_E * scale / softcap)
        key_blocks = cute.ceil_div(sizes.seqlen_k, tile.tile_n)
        self.kernel(sources, scratch, scale, factors, sizes, layouts).launch(
            grid=(key_blocks * sizes.heads_kv * sizes.batch, 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )
        shape = (tile.tile_m, self.mmas.dq_columns)
        convert.convert_kernel(scratch.dq, dq, scale, shape).launch(
            grid=by_row_tile, block=(convert.THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        scratch: delta.Scratch,
        scale: Float32,
        factors: tuple,
        sizes: Sizes,
        layouts: BackwardLayouts,
    ):
        tile, schedule = self.tile, self.schedule
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch_descriptors(warp_index, (sources.k, sources.q, sources.v, sources.do))
        storage = SmemAllocator().allocate(backward_storage(layouts, tile, self.width_dq, self.dtype))

        def room(part, layout):
            return part.get_tensor(layout.outer, swizzle=layout.inner)

        s_k, s_v = room(storage.k, layouts.k), room(storage.v, layouts.v)
        s_q, s_do, s_ds = room(storage.q, layouts.q), room(storage.do, layouts.do), room(storage.ds, layouts.ds)
        s_rows = storage.rows.get_tensor(cute.make_layout((2 * tile.tile_m, tile.stages)))
        parts = (ROWS_PER_WARPGROUP * self.mmas.dq_columns, schedule.mma_warpgroups)
        s_dq = storage.dq.get_tensor(cute.make_layout(parts))
        pipes = open_backward(storage, layouts, tile, self.dtype, schedule)

        unit = unit_of(cute.arch.block_idx()[0], sizes, tile, (self.width_qk, self.width_v), self.mask)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp_index == LOAD_WARP:
                boxes = (tile.tile_m, self.width_qk), (tile.tile_m, self.width_v)
                feed = Feed(
                    k=tile_copy(sources.k, s_k, (tile.tile_n, self.width_dq), unit.batch),
                    v=tile_copy(sources.v, s_v, (tile.tile_n, self.width_v), unit.batch),
                    q=tile_copy(sources.q, s_q, boxes[0], unit.batch),
                    do=tile_copy(sources.do, s_do, boxes[1], unit.batch),
                    row_values=scratch.rows[None, None, None, unit.batch],
                    s_rows=s_rows,
                )
                load_role(pipes, feed, unit, tile.stages)
            elif warp_index < FIRST_ADD_WARP + schedule.mma_warpgroups:
                self.add_role(s_dq, scratch, unit, warp_index - FIRST_ADD_WARP, sizes)
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            context = MmaContext(
                pipes=pipes,
                ops=make_operands(self.mmas, (s_k, s_v, s_q, s_do, s_ds), warp_index // 4 - 1),
                acc=make_accumulators(self.mmas),
                s_rows=s_rows,
                s_ds=s_ds,
                s_dq=s_dq,
                factors=factors,
                thread=thread - WARPGROUP,
                key_start=unit.key_block * tile.tile_n,
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
            )
            self.mma_role(context, unit)
            rooms = (
                GradientRoom(room(storage.k, layouts.dk), sources.dk),
                GradientRoom(room(storage.v, layouts.dv), sources.dv),
            )
            self.leave(context.acc, rooms, unit, thread - WARPGROUP, scale)

    @cute.jit
    def add_role(self, s_dq: cute.Tensor, scratch: delta.Scratch, unit: Unit, group: Int32, sizes: Sizes):
        tiles = unit.tiles
        if tiles.count > 0:
            cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
        for member in cutlass.range(unit.group, unroll=1):
            for step in cutlass.range(tiles.count, unroll=1):
                at, head = tiles.first + step, unit.head_first + member
                parts = cute.make_tensor(scratch.dq[None, at, head, unit.batch].iterator, s_dq.layout)
                more = (member + 1 < unit.group) | (step + 1 < tiles.count)
                order = (None, 0)
                if cutlass.const_expr(self.deterministic):
                    first = first_key_tile(at * self.tile.tile_m, self.tile.tile_n, sizes, self.mask)
                    order = (scratch.turns[None, at, head, unit.batch], unit.key_block - first)
                add_dq(s_dq, parts, group, more, order)

    @cute.jit
    def mma_role(self, context: MmaContext, unit: Unit):
        pipes, acc = context.pipes, context.acc
        k_state, v_state, q_state, do_state = backward_states(pipelines.PipelineUserType.Consumer, self.tile.stages)
        acc.dk.fill(0.0)
        acc.dv.fill(0.0)
        tiles, steps = unit.tiles, unit.tiles.count * unit.group
        if steps > 0:
            wait_full(pipes.k, k_state)
            wait_full(pipes.v, v_state)
            at = tiles.first
            for step in cutlass.range(steps, unroll=1):
                masked = (at < tiles.whole_first) | (at >= tiles.whole_last)
                self.step(context, q_state, do_state, (at, step % 2, masked))
                q_state.advance()
                do_state.advance()
                at += 1
                if at == tiles.last:
                    at = tiles.first

    @cute.jit
    def step(self, context: MmaContext, q_state, do_state, turn: tuple):
        """One query tile. `turn`: (tile, slot of dS, is it masked).

        P is formed under dP, and dQ leaves under dK. dV is issued when dS is done: before, its matmuls would stand in
        the way of dS in the warp's order while the tensor cores work for another warpgroup.
        """
        pipes, ops, acc, thread = context.pipes, context.ops, context.acc, context.thread
        at, ds_slot, masked = turn
        wait_full(pipes.q, q_state)
        q, do = ops.q[None, None, None, q_state.index], ops.do[None, None, None, do_state.index]
        issue(self.mmas.scores(), acc.s, ops.k[None, None, None, 0], q, False)
        wait_full(pipes.do, do_state)
        issue(self.mmas.scores(), acc.dp, ops.v[None, None, None, 0], do, False)
        warpgroup.wait_group(1)
        if masked:
            place = (at * self.tile.tile_m, context.key_start)
            mask_transposed(acc.s, thread, place, context.seqlens, context.bounds, self.mask)
        rows = cute.local_tile(context.s_rows[None, q_state.index], (self.tile.tile_m,), (None,))  # (tile_m, 2)
        if cutlass.const_expr(self.softcap):
            capped_probabilities(acc.s, acc.p_packed, rows[None, 0], thread, context.factors, self.kind)
        else:
            probabilities(acc.s, acc.p_packed, rows[None, 0], thread, context.factors[0], self.kind)
        warpgroup.wait_group(0)
        score_gradients(acc.s, acc.dp, acc.ds_packed, rows[None, 1], thread, self.kind)
        self.store_ds(acc, context.s_ds[None, None, ds_slot], thread)
        do_columns = ops.do_columns[None, None, None, do_state.index]
        issue(self.mmas.by_keys(self.width_v), acc.dv, as_operand(acc.p_packed, self.dtype), do_columns, True)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_STORED, number_of_threads=self.schedule.mma_threads)
        ds, k_columns = ops.ds[None, None, None, ds_slot], ops.k_columns[None, None, None, 0]
        issue(self.mmas.dq(), acc.dq, ds, k_columns, False)
        warpgroup.wait_group(1)
        pipes.do.consumer_release(do_state)
        q_columns = ops.q_columns[None, None, None, q_state.index]
        issue(self.mmas.by_keys(self.width_qk), acc.dk, as_operand(acc.ds_packed, self.dtype), q_columns, True)
        warpgroup.wait_group(1)
        hand_over_dq(acc.dq, context.s_dq, thread)
        warpgroup.wait_group(0)
        pipes.q.consumer_release(q_state)

    def store_ds(self, acc: Accumulators, s_ds: cute.Tensor, thread: Int32):
        """This warpgroup's keys of dS^T, by stmatrix. s_ds: (tile_m, tile_n)."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.mmas.scores()).get_slice(thread)
        by_keys = cute.make_tensor(s_ds.iterator, cute.select(s_ds.layout, mode=[1, 0]))
        rounded = cute.make_tensor(cute.recast_ptr(acc.ds_packed.iterator, dtype=self.dtype), acc.s.layout)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(by_keys))

    @cute.jit
    def leave(self, acc: Accumulators, rooms: tuple, unit: Unit, thread: Int32, scale: Float32):
        """dV, then dK times the scale."""
        dk_room, dv_room = rooms
        cute.arch.barrier(barrier_id=OPERANDS_DEAD, number_of_threads=self.schedule.mma_threads)
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        place = (unit.key_block * self.schedule.mma_warpgroups + group, unit.head_kv, unit.batch)
        store_rows(acc.dv, dv_room, place, thread, self.width_v)
        acc.dk.store(acc.dk.load() * scale)
        store_rows(acc.dk, dk_room, place, thread, self.width_qk)
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class BoundedBackwardSm90(BoundedEntry, BackwardSm90):
    """For a Plan that is not plain."""
