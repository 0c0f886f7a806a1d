"""dK and dV where dQ has a kernel of its own (dq.py) and a warpgroup's registers hold all columns of its 64 keys.

A CTA owns 128 keys. Nothing passes between its warpgroups: P^T and dS^T are A operands without leaving the registers.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.delta import Scratch
from ..common.keyunits import unit_count
from ..common.order import Sizes
from .backward import BackwardSm90
from .grad.load import prefetch_descriptors
from .grad.mask import mask_transposed
from .grad.memory import KeyLayouts, TmaSource, key_layouts, key_storage
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
from .grad.pipeline import BackwardPipelines, open_backward
from .grad.queue import open_units
from .grad.schedule import LOAD_WARP, backward_schedule
from .grad.weights import capped_probabilities, exponentials, score_gradients, weights_and_gradients
from .pipeline import wait_full
from .schedule import ROWS_PER_WARPGROUP, WARPGROUP


class Sources(NamedTuple):
    """What the kernel reads through TMA; modes (seqlen, width, heads, batch)."""

    q: TmaSource
    k: TmaSource
    v: TmaSource
    do: TmaSource


class MmaContext(NamedTuple):
    """Everything an MMA warpgroup needs in its loop; read-only."""

    pipes: BackwardPipelines
    ops: KeyOperands
    acc: KeyAccumulators
    s_rows: cute.Tensor  # (2 * tile_m, stages)
    factors: tuple  # (what the exponent takes scores times, what goes inside a softcap)
    thread: Int32  # among the MMA threads
    seqlens: tuple
    bounds: tuple  # (left, right) of a window


class WholeKeyGradientsSm90(BackwardSm90):
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile, self.max_ctas = plan.tile, plan.ctas
        self.width_qk, self.width_v, self.width_dq = plan.head_dim, plan.head_dim_v, plan.head_dim
        self.mask, self.softcap = plan.mask, plan.softcap
        self.dtype, self.kind = dtype, (dtype, plan.tile.tile_m)
        self.schedule = backward_schedule(plan.tile.tile_n // ROWS_PER_WARPGROUP)
        self.mmas = BackwardMmas(plan.tile, plan.head_dim, plan.head_dim_v, plan.head_dim, dtype, dp_parts=2)

    @cute.jit
    def launch(self, moved: tuple, scratch: Scratch, numbers: tuple, sizes: Sizes, stream):
        """`moved`: (q, k, v, do, dk, dv); `numbers`: (scale, factors)."""
        q, k, v, do, dk, dv = moved
        scale, factors = numbers
        tile, layouts = self.tile, key_layouts(self.tile, self.width_qk, self.width_v, self.dtype)

        def source(tensor, layout, rows, width):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))
            box = cute.slice_(layout, (None, None, 0))
            return TmaSource(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box, (rows, width)))

        sources = Sources(
            q=source(q, layouts.q, tile.tile_m, self.width_qk),
            k=source(k, layouts.k, tile.tile_n, self.width_qk),
            v=source(v, layouts.v, tile.tile_n, self.width_v),
            do=source(do, layouts.do, tile.tile_m, self.width_v),
        )
        self.kernel(sources, (scratch, dk, dv), scale, factors, sizes, layouts).launch(
            grid=(cutlass.min(unit_count(sizes, tile), self.max_ctas), 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        results: tuple,  # (scratch, dk, dv)
        scale: Float32,
        factors: tuple,
        sizes: Sizes,
        layouts: KeyLayouts,
    ):
        tile, schedule = self.tile, self.schedule
        scratch, dk, dv = results
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch_descriptors(warp_index, (sources.q, sources.v, sources.do, sources.k))
        storage = SmemAllocator().allocate(key_storage(layouts, tile, self.dtype))

        def room(part, layout):
            return part.get_tensor(layout.outer, swizzle=layout.inner)

        s_k, s_v = room(storage.k, layouts.k), room(storage.v, layouts.v)
        s_q, s_do = room(storage.q, layouts.q), room(storage.do, layouts.do)
        s_rows = storage.rows.get_tensor(cute.make_layout((2 * tile.tile_m, tile.stages)))
        ring = open_units(storage.unit_barriers.data_ptr(), storage.units.data_ptr(), schedule.mma_warps)
        units = ring, sizes.heads_q // sizes.heads_kv
        pipes = open_backward(storage, layouts, tile, self.dtype, schedule)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp_index == LOAD_WARP:
                self.load_role(pipes, units, (sources, scratch), (s_k, s_v, s_q, s_do, s_rows), sizes)
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            context = MmaContext(
                pipes=pipes,
                ops=make_key_operands(self.mmas, (s_k, s_v, s_q, s_do), warp_index // 4 - 1),
                acc=make_key_accumulators(self.mmas),
                s_rows=s_rows,
                factors=factors,
                thread=thread - WARPGROUP,
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
            )
            self.mma_role(context, units, (dk, dv), scale)

    @cute.jit
    def step(self, context: MmaContext, states: tuple, turn: tuple, masked, last):
        """One query tile. `turn`: (tile, first key); after the `last` one K and V are given back."""
        pipes, ops, acc, thread = context.pipes, context.ops, context.acc, context.thread
        kv_state, q_state, do_state = states
        wait_full(pipes.q, q_state)
        issue(self.mmas.scores(), acc.s, ops.k[None, None, None, 0], ops.q[None, None, None, q_state.index], False)
        wait_full(pipes.do, do_state)
        self.issue_dp(ops, acc, do_state, 0)
        warpgroup.wait_group(1)
        if last:
            pipes.k.consumer_release(kv_state)
        if masked:
            at, key_start = turn
            place = (at * self.tile.tile_m, key_start)
            mask_transposed(acc.s, thread, place, context.seqlens, context.bounds, self.mask)
        rows = cute.local_tile(context.s_rows[None, q_state.index], (self.tile.tile_m,), (None,))  # (tile_m, 2)
        if cutlass.const_expr(self.softcap):
            capped_probabilities(acc.s, acc.p_packed, rows[None, 0], thread, context.factors, self.kind)
        else:
            exponentials(acc.s, rows[None, 0], thread, context.factors[0], self.kind)
        for part in cutlass.range_constexpr(self.mmas.dp_parts):
            warpgroup.wait_group(0)
            self.form_gradients(acc, rows[None, 1], thread, part)
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

    def form_gradients(self, acc: KeyAccumulators, delta: cute.Tensor, thread: Int32, part: int):
        """Of one part of the columns: dS, and P where it is not there yet, rounded."""
        parts = self.mmas.dp_parts
        weights, p_packed, ds_packed = (part_of(t, part, parts) for t in (acc.s, acc.p_packed, acc.ds_packed))
        mine = cute.local_tile(delta, (self.tile.tile_m // parts,), (part,))
        if cutlass.const_expr(self.softcap):
            score_gradients(weights, acc.dp, ds_packed, mine, thread, self.kind)
        else:
            weights_and_gradients(weights, acc.dp, (p_packed, ds_packed), mine, thread, self.kind)
