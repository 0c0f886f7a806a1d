"""dQ of wide heads on Hopper, in a kernel of its own: a CTA owns 128 query rows and walks the key tiles that they see.

S and dP are computed once more (dkdv.py has them too); dS is the A operand of dQ += dS K without leaving the registers,
and dQ stays in them until the end.

Nothing here comes from the kernel for dK and dV but what that one has waited for before it lets this one start: CTAs
take a multiprocessor as soon as the other kernel leaves it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.blocks import KeyTiles, key_tiles, never_none, window_tiles
from ..common.delta import Scratch, value_place
from ..common.numeric import NEG_INF, exp2, pack_fragment
from ..common.order import Sizes, head_by_head, longest_first, tile_count
from .epilogue import store_direct
from .grad.load import Sources, fetch, prefetch_descriptors, sources_of, tile_copy
from .grad.memory import RowLayouts, rooms_of, row_layouts, storage_of, transposed
from .grad.mma import as_operand, issue
from .grad.pipeline import BackwardPipelines, as_words, hold, open_backward, row_states
from .grad.queue import UnitRing, announce, draw, open_units, receive, unit_states
from .grad.schedule import backward_schedule
from .grad.weights import capped_weights
from .mask import mask_scores, mask_window
from .mma import first_row, rows_view
from .pipeline import wait_full
from .schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .tiles import DQ_TILE

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM


class MmaContext(NamedTuple):
    """Everything an MMA warpgroup needs in its loop; read-only."""

    pipes: BackwardPipelines
    ring: UnitRing
    q: cute.Tensor  # descriptors: A of S
    do: cute.Tensor  # A of dP
    k: cute.Tensor  # B of S
    v: cute.Tensor  # B of dP
    k_columns: cute.Tensor  # B of dQ
    s: cute.Tensor  # registers: ((2, 2, tile_n / 8), 1, 1)
    dp: cute.Tensor  # the same shape
    ds_packed: cute.Tensor  # (tile_n / 4,) Int32
    dq: cute.Tensor  # ((2, 2, width_qk / 8), 1, 1)
    factors: tuple  # (what the exponent takes scores times, what goes inside a softcap)
    thread: Int32  # among the MMA threads
    group: Int32  # the warpgroup, of these
    seqlens: tuple
    bounds: tuple  # (left, right) of a window


class QueryGradientsSm90:
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile, self.value_tile_m, self.max_ctas = DQ_TILE, plan.tile.tile_m, plan.ctas
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.mask, self.softcap = plan.mask, plan.softcap
        self.dtype, self.holds, self.skips = dtype, plan.tile.ahead > 0, plan.tile.skips
        self.schedule = backward_schedule(self.tile.tile_m // ROWS_PER_WARPGROUP)

    def scores_mma(self) -> cute.TiledMma:
        """Of S and of dP: (tile_m, tile_n) from shared memory."""
        layout, shape = (self.schedule.mma_warpgroups, 1, 1), (ROWS_PER_WARPGROUP, self.tile.tile_n)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_MAJOR, K_MAJOR, Float32, layout, shape, SMEM)

    def dq_mma(self) -> cute.TiledMma:
        """(tile_m, width_qk), A from registers."""
        layout, shape = (self.schedule.mma_warpgroups, 1, 1), (ROWS_PER_WARPGROUP, self.width_qk)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_MAJOR, MN_MAJOR, Float32, layout, shape, RMEM)

    @cute.jit
    def launch(self, moved: tuple, scratch: Scratch, numbers: tuple, sizes: Sizes, stream):
        """`moved`: (q, k, v, do, dq); `numbers`: (scale, factors)."""
        q, k, v, do, dq = moved
        scale, factors = numbers
        tile, layouts = self.tile, row_layouts(self.tile, self.width_qk, self.width_v, self.dtype)
        sources = sources_of((q, k, v, do), layouts, tile, (self.width_qk, self.width_qk, self.width_v))
        self.kernel(sources, (scratch, dq), scale, factors, sizes, layouts).launch(
            grid=(cutlass.min(self.count(sizes), self.max_ctas), 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def count(self, sizes: Sizes) -> Int32:
        """Of units."""
        return tile_count(sizes.seqlen_q, self.tile.tile_m, sizes.heads_q, sizes.batch)

    @cute.jit
    def unit(self, index: Int32, sizes: Sizes) -> tuple:
        """(work tile, its key tiles) of the index-th."""
        tile, m_blocks = self.tile, cute.ceil_div(sizes.seqlen_q, self.tile.tile_m)
        if cutlass.const_expr(self.mask.causal and not self.mask.left):
            keys = cutlass.min(sizes.seqlen_k, 1 << 20)  # beyond any L2, and the product stays within 32 bits
            kv_bytes = keys * (self.width_qk + self.width_v) * 2
            group = sizes.heads_q // sizes.heads_kv
            work = longest_first(index, m_blocks, sizes.heads_q, sizes.batch, kv_bytes, group)
        else:
            work = head_by_head(index, m_blocks, sizes.heads_q)
        row_start = work.m_block * tile.tile_m
        if cutlass.const_expr(self.mask.windowed):
            bounds = (sizes.left, sizes.right)
            tiles = window_tiles(row_start, tile, (sizes.seqlen_q, sizes.seqlen_k), bounds, self.mask)
        else:
            causal = self.mask.causal
            tiles = key_tiles(row_start, tile.tile_m, tile.tile_n, sizes.seqlen_q, sizes.seqlen_k, causal)
        return work, never_none(tiles, cute.ceil_div(sizes.seqlen_k, tile.tile_n))

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        results: tuple,  # (scratch, dq)
        scale: Float32,
        factors: tuple,
        sizes: Sizes,
        layouts: RowLayouts,
    ):
        tile, schedule = self.tile, self.schedule
        scratch, dq = results
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch_descriptors(warp_index, (sources.q, sources.k, sources.do, sources.v))
        storage = SmemAllocator().allocate(storage_of(layouts, self.dtype, 0, {}))
        rooms = rooms_of(storage, layouts)
        ring = open_units(storage.unit_barriers.data_ptr(), storage.units.data_ptr(), schedule.mma_warps)
        pipes = open_backward(storage, layouts, 0, self.dtype, schedule)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp_index == 0:
                self.load_role((pipes, ring), sources, rooms, scratch.counters, sizes)
                cute.arch.griddepcontrol_wait()  # whoever waits for this kernel waits for the one before, too
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            first = (warp_index // 4 - 1) * WARPGROUP
            scores, products = self.scores_mma(), self.dq_mma()
            part, dq_part = scores.get_slice(first), products.get_slice(first)
            context = MmaContext(
                pipes=pipes,
                ring=ring,
                q=scores.make_fragment_A(part.partition_A(rooms.q)),
                do=scores.make_fragment_A(part.partition_A(rooms.do)),
                k=scores.make_fragment_B(part.partition_B(rooms.k)),
                v=scores.make_fragment_B(part.partition_B(rooms.v)),
                k_columns=products.make_fragment_B(dq_part.partition_B(transposed(rooms.k))),
                s=cute.make_rmem_tensor(part.partition_shape_C((tile.tile_m, tile.tile_n)), Float32),
                dp=cute.make_rmem_tensor(part.partition_shape_C((tile.tile_m, tile.tile_n)), Float32),
                ds_packed=cute.make_rmem_tensor((tile.tile_n // 4,), Int32),
                dq=cute.make_rmem_tensor(dq_part.partition_shape_C((tile.tile_m, self.width_qk)), Float32),
                factors=factors,
                thread=thread - WARPGROUP,
                group=warp_index // 4 - 1,
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
            )
            self.mma_role(context, (scratch.rows, dq), scale)

    @cute.jit
    def row_values(self, rows: cute.Tensor, ticket: tuple, thread: Int32, seqlen_q: Int32) -> tuple:
        """(LSE in base 2, delta) of the thread's two rows, a pair each. rows: see Scratch."""
        live, m_block, head, batch = ticket[:4]
        lse, delta = [], []
        for r in cutlass.range_constexpr(2):
            row = m_block * self.tile.tile_m + first_row(thread) + 8 * r
            tile, within = row // self.value_tile_m, value_place(row % self.value_tile_m, self.value_tile_m)
            value, shift = Float32(-NEG_INF), Float32(0.0)
            if row < seqlen_q and live != 0:
                value = rows[within, tile, head, batch]
                shift = rows[self.value_tile_m + within, tile, head, batch]
            lse.append(value)
            delta.append(shift)
        return (lse[0], lse[1]), (delta[0], delta[1])

    @cute.jit
    def load_role(self, edges: tuple, sources: Sources, rooms: RowLayouts, counters: cute.Tensor, sizes: Sizes):
        """`edges`: (pipelines, ring of units)."""
        pipes, ring = edges
        tile, group = self.tile, sizes.heads_q // sizes.heads_kv
        states = row_states(pipelines.PipelineUserType.Producer, tile.stages)
        ticket_state, count = unit_states(pipelines.PipelineUserType.Producer), self.count(sizes)
        index = cute.arch.block_idx()[0]
        while index < count:
            work, tiles = self.unit(index, sizes)
            ticket = (Int32(1), work.m_block, work.head, work.batch, tiles.first, tiles.last, tiles.unmasked)
            if cutlass.const_expr(tiles.whole is not None):
                ticket = (*ticket, tiles.whole)
            ticket_state = announce(ring, ticket_state, ticket)
            copies = (
                tile_copy(sources.q, rooms.q, (tile.tile_m, self.width_qk), work.batch),
                tile_copy(sources.do, rooms.do, (tile.tile_m, self.width_v), work.batch),
                tile_copy(sources.k, rooms.k, (tile.tile_n, self.width_qk), work.batch),
                tile_copy(sources.v, rooms.v, (tile.tile_n, self.width_v), work.batch),
            )
            states = self.feed(pipes, states, copies, (work.m_block, work.head, work.head // group), tiles)
            index = cute.arch.grid_dim()[0] + draw(counters, 1)
        announce(ring, ticket_state, (Int32(0),))

    @cute.jit
    def feed(self, pipes: BackwardPipelines, states: tuple, copies: tuple, place: tuple, tiles: KeyTiles):
        """One unit. `place`: (query tile, head, head of K and V). -> the states moved on"""
        q_state, do_state, k_state, v_state = states
        q, do, k, v = copies
        m_block, head, head_kv = place
        fetch(pipes.q, q_state, q, m_block, head)
        for step in cutlass.range(tiles.last - tiles.first, unroll=1):
            at = tiles.last - 1 - step
            fetch(pipes.k, k_state, k, at, head_kv)
            k_state.advance()
            if step == 0:
                fetch(pipes.do, do_state, do, m_block, head)
            fetch(pipes.v, v_state, v, at, head_kv)
            v_state.advance()
        q_state.advance()
        do_state.advance()
        return q_state, do_state, k_state, v_state

    @cute.jit
    def mma_role(self, context: MmaContext, results: tuple, scale: Float32):
        """`results`: (rows, dq), rows as in Scratch."""
        rows, dq = results
        thread, seqlen_q = context.thread, context.seqlens[0]
        states = row_states(pipelines.PipelineUserType.Consumer, self.tile.stages)
        ticket_state = unit_states(pipelines.PipelineUserType.Consumer)
        ticket, ticket_state = receive(context.ring, ticket_state)
        values = self.row_values(rows, ticket, thread, seqlen_q)
        while ticket[0] != 0:
            _, m_block, head, batch, first, last, unmasked, whole = ticket
            row_start = m_block * self.tile.tile_m
            states = self.through(context, states, (row_start, *values), KeyTiles(first, last, unmasked, whole))
            ticket, ticket_state = receive(context.ring, ticket_state)
            values = self.row_values(rows, ticket, thread, seqlen_q)  # arrive while dQ leaves
            context.dq.store(context.dq.load() * scale)
            store_direct(context.dq, dq[batch, None, head, None], thread, row_start, self.dtype)

    @cute.jit
    def through(self, context: MmaContext, states: tuple, place: tuple, tiles: KeyTiles):
        """One unit. `place`: (first row, LSE, delta). -> the states moved on"""
        pipes = context.pipes
        q_state, do_state, k_state, v_state = states
        context.dq.fill(0.0)
        wait_full(pipes.q, q_state)
        for step in cutlass.range(tiles.last - tiles.first, unroll=1):
            at = tiles.last - 1 - step
            if cutlass.const_expr(self.skips):
                if self.hides(context, place[0], at):
                    self.step_over(pipes, (q_state, do_state, k_state, v_state), at == tiles.first)
                else:
                    self.step(context, (q_state, do_state, k_state, v_state), place, at, tiles)
            else:
                self.step(context, (q_state, do_state, k_state, v_state), place, at, tiles)
            k_state.advance()
            v_state.advance()
        q_state.advance()
        do_state.advance()
        return q_state, do_state, k_state, v_state

    def hides(self, context: MmaContext, row_start: Int32, at: Int32):
        """Does the diagonal hide a key tile from all rows of the warpgroup?"""
        seqlen_q, seqlen_k = context.seqlens
        last_row = row_start + (context.group + 1) * ROWS_PER_WARPGROUP - 1
        return at * self.tile.tile_n > last_row + seqlen_k - seqlen_q

    @cute.jit
    def step_over(self, pipes: BackwardPipelines, states: tuple, last):
        """A key tile that none of the warpgroup's rows sees."""
        q_state, do_state, k_state, v_state = states
        wait_full(pipes.k, k_state)
        wait_full(pipes.do, do_state)
        wait_full(pipes.v, v_state)
        if last:
            pipes.q.consumer_release(q_state)
            pipes.do.consumer_release(do_state)
        pipes.v.consumer_release(v_state)
        pipes.k.consumer_release(k_state)

    @cute.jit
    def step(self, context: MmaContext, states: tuple, place: tuple, at: Int32, tiles: KeyTiles):
        """One key tile."""
        pipes = context.pipes
        q_state, do_state, k_state, v_state = states
        wait_full(pipes.k, k_state)
        k = context.k[None, None, None, k_state.index]
        issue(self.scores_mma(), context.s, context.q[None, None, None, 0], k, False)
        wait_full(pipes.do, do_state)
        wait_full(pipes.v, v_state)
        v = context.v[None, None, None, v_state.index]
        issue(self.scores_mma(), context.dp, context.do[None, None, None, 0], v, False)
        warpgroup.wait_group(1)
        self.form_weights(context, place, at, tiles)
        if cutlass.const_expr(self.holds):
            hold(as_words(context.s), cute.size(context.s))
        warpgroup.wait_group(0)
        if at == tiles.first:
            pipes.q.consumer_release(q_state)
            pipes.do.consumer_release(do_state)
        pipes.v.consumer_release(v_state)
        self.score_gradients(context, place[2])
        k_columns = context.k_columns[None, None, None, k_state.index]
        issue(self.dq_mma(), context.dq, as_operand(context.ds_packed, self.dtype), k_columns, True)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)

    @cute.jit
    def form_weights(self, context: MmaContext, place: tuple, at: Int32, tiles: KeyTiles):
        """Scores become P, or P times the slope of the softcap. `place`: see through."""
        scores, thread = context.s, context.thread
        row_start, lse_log2, _ = place
        hidden = at >= tiles.unmasked
        if cutlass.const_expr(self.mask.left):
            hidden = hidden | (at < tiles.whole)
        key_start = at * self.tile.tile_n
        if hidden:
            if cutlass.const_expr(self.mask.windowed):
                corner = (row_start, key_start)
                mask_window(scores, thread, corner, context.seqlens, context.bounds, self.mask, self.tile)
            else:
                mask_scores(scores, thread, row_start, key_start, context.seqlens, self.mask.causal)
        view = rows_view(scores)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
                if cutlass.const_expr(self.softcap):
                    _, view[r, c] = capped_weights(view[r, c], lse_log2[r], context.factors)
                else:
                    view[r, c] = exp2(view[r, c] * context.factors[0] - lse_log2[r])

    @cute.jit
    def score_gradients(self, context: MmaContext, delta: tuple):
        view, gradients = rows_view(context.s), rows_view(context.dp)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
                view[r, c] = view[r, c] * (gradients[r, c] - delta[r])
        pack_fragment(context.s, context.ds_packed, self.dtype)
