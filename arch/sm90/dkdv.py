"""dK and dV of wide heads on Hopper, in a kernel of their own: a CTA owns 64 keys, walks the query tiles that see them.

The accumulators of dQ find no room beside dK and dV here, and every 64 keys would add a tile of dQ to memory: S and dP
are computed once more instead (dq.py). So nothing is added in memory, and the result is bitwise repeatable.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.keyunits import Unit, unit_of
from ..common.order import Sizes
from .grad.epilogue import GradientRoom, store_columns
from .grad.load import Feed, load_role, prefetch_descriptors, tile_copy
from .grad.mask import mask_transposed
from .grad.memory import TmaSource, WideLayouts, wide_layouts, wide_storage
from .grad.mma import issue
from .grad.pipeline import DS_STORED, OPERANDS_DEAD, BackwardPipelines, backward_states, open_backward
from .grad.schedule import LOAD_WARP, backward_schedule
from .grad.weights import capped_probabilities, probabilities, score_gradients
from .grad.wide_mma import WideAccumulators, WideMmas, WideOperands, make_wide_accumulators, make_wide_operands
from .pipeline import wait_full
from .schedule import WARPGROUP

WARPGROUPS = 2


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
    ops: WideOperands
    acc: WideAccumulators
    s_rows: cute.Tensor  # (2 * tile_m, stages)
    weights: tuple  # (P^T, dS^T), each (tile_n, tile_m, slots)
    factors: tuple  # (what the exponent takes scores times, what goes inside a softcap)
    thread: Int32  # among the MMA threads
    key_start: Int32
    seqlens: tuple
    bounds: tuple  # (left, right) of a window


class KeyGradientsSm90:
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile = plan.tile
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.mask, self.softcap = plan.mask, plan.softcap
        self.dtype, self.kind = dtype, (dtype, plan.tile.tile_m)
        self.schedule = backward_schedule(WARPGROUPS)
        self.mmas = WideMmas(plan.tile, plan.head_dim, plan.head_dim_v, WARPGROUPS, dtype)

    @cute.jit
    def launch(self, moved: tuple, rows: cute.Tensor, numbers: tuple, sizes: Sizes, stream):
        """`moved`: (q, k, v, do, dk, dv), through TMA; `rows`: see common/delta.py; `numbers`: (scale, factors)."""
        q, k, v, do, dk, dv = moved
        scale, factors = numbers
        tile = self.tile
        layouts = wide_layouts(tile, self.width_qk, self.width_v, WARPGROUPS, self.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor, layout, rows, width):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))
            box = cute.slice_(layout, (None, None, 0))
            return TmaSource(*cpasync.make_tiled_tma_atom(op, view, box, (rows, width)))

        sources = Sources(
            q=source(load, q, layouts.q, tile.tile_m, self.width_qk),
            k=source(load, k, layouts.k, tile.tile_n, self.width_qk),
            v=source(load, v, layouts.v, tile.tile_n, self.width_v),
            do=source(load, do, layouts.do, tile.tile_m, self.width_v),
            dk=source(store, dk, layouts.dk, tile.tile_n, self.width_qk // WARPGROUPS),
            dv=source(store, dv, layouts.dv, tile.tile_n, self.width_v // WARPGROUPS),
        )
        key_blocks = cute.ceil_div(sizes.seqlen_k, tile.tile_n)
        self.kernel(sources, rows, scale, factors, sizes, layouts).launch(
            grid=(key_blocks * sizes.heads_kv * sizes.batch, 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        rows: cute.Tensor,
        scale: Float32,
        factors: tuple,
        sizes: Sizes,
        layouts: WideLayouts,
    ):
        tile, schedule = self.tile, self.schedule
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch_descriptors(warp_index, (sources.k, sources.q, sources.v, sources.do))
        storage = SmemAllocator().allocate(wide_storage(layouts, tile, self.dtype))

        def room(part, layout):
            return part.get_tensor(layout.outer, swizzle=layout.inner)

        s_k, s_v = room(storage.k, layouts.k), room(storage.v, layouts.v)
        s_q, s_do = room(storage.q, layouts.q), room(storage.do, layouts.do)
        s_p, s_ds = room(storage.p, layouts.weights), room(storage.ds, layouts.weights)
        s_rows = storage.rows.get_tensor(cute.make_layout((2 * tile.tile_m, tile.stages)))
        pipes = open_backward(storage, layouts, tile, self.dtype, schedule)

        unit = unit_of(cute.arch.block_idx()[0], sizes, tile, (self.width_qk, self.width_v), self.mask)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp_index == LOAD_WARP:
                boxes = (tile.tile_m, self.width_qk), (tile.tile_m, self.width_v)
                feed = Feed(
                    k=tile_copy(sources.k, s_k, (tile.tile_n, self.width_qk), unit.batch),
                    v=tile_copy(sources.v, s_v, (tile.tile_n, self.width_v), unit.batch),
                    q=tile_copy(sources.q, s_q, boxes[0], unit.batch),
                    do=tile_copy(sources.do, s_do, boxes[1], unit.batch),
                    row_values=rows[None, None, None, unit.batch],
                    s_rows=s_rows,
                )
                load_role(pipes, feed, unit, tile.stages)
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            group = warp_index // 4 - 1
            context = MmaContext(
                pipes=pipes,
                ops=make_wide_operands(self.mmas, (s_k, s_v, s_q, s_do, s_p, s_ds), group),
                acc=make_wide_accumulators(self.mmas),
                s_rows=s_rows,
                weights=(s_p, s_ds),
                factors=factors,
                thread=thread - WARPGROUP,
                key_start=unit.key_block * tile.tile_n,
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
            )
            self.mma_role(context, unit)
            cute.arch.barrier(barrier_id=OPERANDS_DEAD, number_of_threads=schedule.mma_threads)
            acc, place = context.acc, (unit.key_block, unit.head_kv, unit.batch)
            dv_room = GradientRoom(room(storage.v, layouts.dv), sources.dv)
            store_columns(acc.dv, dv_room, place, thread - WARPGROUP, self.width_v // WARPGROUPS)
            acc.dk.store(acc.dk.load() * scale)
            dk_room = GradientRoom(room(storage.k, layouts.dk), sources.dk)
            store_columns(acc.dk, dk_room, place, thread - WARPGROUP, self.width_qk // WARPGROUPS)
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def mma_role(self, context: MmaContext, unit: Unit):
        """One tile after the other: dK and dV of a tile, issued behind the next one's scores, hold up its softmax."""
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
                self.issue_scores(context, q_state, do_state)
                self.form_weights(context, q_state, (at, step % 2, masked))
                self.issue_gradients(context, q_state, do_state, step % 2)
                warpgroup.wait_group(1)
                pipes.q.consumer_release(q_state)
                warpgroup.wait_group(0)
                pipes.do.consumer_release(do_state)
                q_state.advance()
                do_state.advance()
                at += 1
                if at == tiles.last:
                    at = tiles.first

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
    def form_weights(self, context: MmaContext, q_state, turn: tuple):
        """P^T and dS^T into shared memory, when S^T and dP^T are there. `turn`: (tile, slot, is it masked)."""
        acc, tile_m = context.acc, self.tile.tile_m
        at, slot, masked = turn
        thread, group = context.thread % WARPGROUP, cute.arch.make_warp_uniform(context.thread // WARPGROUP)
        columns = tile_m // WARPGROUPS
        rows = cute.local_tile(context.s_rows[None, q_state.index], (columns,), (None,))  # (columns, 2 * warpgroups)
        warpgroup.wait_group(1)
        if masked:
            place = (at * tile_m + group * columns, context.key_start)
            mask_transposed(acc.s, thread, place, context.seqlens, context.bounds, self.mask)
        if cutlass.const_expr(self.softcap):
            capped_probabilities(acc.s, acc.p_packed, rows[None, group], thread, context.factors, self.kind)
        else:
            probabilities(acc.s, acc.p_packed, rows[None, group], thread, context.factors[0], self.kind)
        warpgroup.wait_group(0)
        score_gradients(acc.s, acc.dp, acc.ds_packed, rows[None, WARPGROUPS + group], thread, self.kind)
        self.store_weights(acc.p_packed, context.weights[0][None, None, slot], context.thread)
        self.store_weights(acc.ds_packed, context.weights[1][None, None, slot], context.thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_STORED, number_of_threads=self.schedule.mma_threads)

    def store_weights(self, packed: cute.Tensor, smem: cute.Tensor, thread: Int32):
        """This warpgroup's queries of P^T or dS^T, by stmatrix. smem: (tile_n, tile_m)."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        mma = self.mmas.scores()
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        shape = mma.get_slice(0).partition_shape_C((self.tile.tile_n, self.tile.tile_m))
        rounded = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=self.dtype), cute.make_layout(shape))
        cute.copy(atom, copy.retile(rounded), copy.partition_D(smem))
