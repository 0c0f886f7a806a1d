"""Forward on Blackwell: memory and barriers are opened, then each warp takes its role. Not yet run on silicon.

FlashAttention-4 (arXiv 2603.05451), section 3.1: products accumulate in tensor memory, so that softmax threads own
whole rows and hold nothing else; two query tiles alternate on the tensor cores; a correction warpgroup takes the
rescaling of O off the softmax, and does it only where a maximum grew much. Key tiles that only the second query tile
sees are not given to the first. Under a full mask two CTAs of a cluster may multiply together.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.blocks import KeyTiles, key_tiles, part_of, window_tiles
from ..common.entry import ForwardEntry
from ..common.numeric import LOG2_E, fresh
from ..common.order import Rounds, WorkTile, head_by_head, longest_first, rounds_of, tile_count
from ..common.rowstate import inverse_total, make_row_state, reset
from .correction import CorrectionContext, CorrectionState, correct_pair, correct_single, receive_factor
from .epilogue import OutputRoom, await_stores, output_to_smem, store_lse, store_output, store_partial, store_state
from .load import LoadContext, TileCopy, TmaSource, gather_row, load_tile, tile_copy
from .mask import Visible, visible_keys
from .memory import ForwardLayouts, ForwardShape, forward_layouts, forward_storage
from .mma import ForwardMmas, MmaContext, MmaState, make_fragments, multiply_pair, multiply_single
from .pipeline import (
    O_STORED,
    after_wait,
    barrier_count,
    before_arrive,
    leads,
    meet,
    open_barriers,
    rank_in_pair,
    ring_start,
)
from .schedule import ROWS, WARPGROUP, WARPS_PER_GROUP, Run, forward_schedule
from .softmax import SoftmaxContext, SoftmaxPlan, SoftmaxSlots, send_factor, softmax_step
from .tiles import PACKED, PAIR, TMEM_COLUMNS, emulated_pairs, pair_tile


class Sources(NamedTuple):
    """What the kernel reads and writes through TMA."""

    q: TmaSource | cute.Tensor  # (seqlen_q, head_dim, heads_q, batch); packed: (batch, seqlen_q, heads_q, head_dim)
    k: TmaSource  # (seqlen_k, head_dim, heads_kv, batch)
    v: TmaSource  # (head_dim_v, seqlen_k, heads_kv, batch)
    o: TmaSource  # (seqlen_q, head_dim_v, heads_q, batch)


class Sizes(NamedTuple):
    batch: Int32
    heads_q: Int32
    heads_kv: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    splits: Int32 | None = None  # CTAs that share the keys of a query tile
    bounds: tuple = (None, None)  # left and right of a window, where Plan.mask has them

    @property
    def lengths(self) -> tuple[Int32, Int32]:
        return self.seqlen_q, self.seqlen_k


class Unit(NamedTuple):
    """What a CTA works on at a time."""

    work: WorkTile
    split: Int32 | None


class Softening(NamedTuple):
    """How a score becomes an exponent, in log2."""

    scale_log2: Float32  # of the score, or of its tanh
    cap_slope: Float32 | None = None  # see SoftmaxContext


class Results(NamedTuple):
    """What leaves without TMA."""

    lse: cute.Tensor | None  # (batch, heads_q, seqlen_q)
    o_partial: cute.Tensor | None = None  # (splits, batch, heads_q, seqlen_q, width_v) float32
    state_partial: cute.Tensor | None = None  # (splits, batch, heads_q, seqlen_q, 2) float32


class Room(NamedTuple):
    """Shared and tensor memory as the roles see it."""

    bars: tuple
    q: cute.Tensor  # (mma, 1, width_qk / 16, query_tiles)
    q_rows: cute.Tensor | None  # the same as (128, width_qk), where rows are packed
    k: cute.Tensor  # (mma, 1, key_chunk / 16, slots)
    v: cute.Tensor  # (mma, 1, value_chunk / 16, slots)
    o: cute.Tensor  # (128, width_v, query_tiles)
    factors: cute.Tensor  # (128, query_tiles)
    tmem: cute.Pointer


class ForwardSm100(ForwardEntry):
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type, ctas: int = 1):
        widths = plan.head_dim, plan.head_dim_v
        self.tile = plan.tile if ctas == 1 else pair_tile(plan.tile, *widths)
        self.shape = ForwardShape(self.tile, *widths, ctas, plan.variant == PACKED)
        # where O takes Q's room, a CTA cannot take a second work tile
        self.max_ctas = 0 if self.shape.shared_output else plan.ctas // ctas * ctas
        self.mask = plan.mask
        self.dtype = dtype
        self.schedule = forward_schedule(plan.tile)
        self.mmas = ForwardMmas(self.shape, dtype)
        self.query_mmas = ForwardMmas(replace(self.shape, ctas=1), dtype)  # each CTA loads its own query rows
        self.softmax_plan = SoftmaxPlan(self.shape, dtype, emulated_pairs(plan.arch, plan.head_dim))

    def run(self, tensors: tuple, lse: cute.Tensor | None, numbers: tuple, counter: None, stream):
        self.launch(tensors, Results(lse), Softening(numbers[0] * LOG2_E), (None, None), stream)

    @cute.jit
    def launch(self, tensors: tuple, results: Results, softening: Softening, bounds: tuple, stream):
        q, k, v, o = tensors
        shape, qk, pv = self.shape, self.mmas.qk(), self.mmas.pv()
        layouts = forward_layouts(shape, qk, pv, self.dtype)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup(shape.ctas))

        def view(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        def stage(layout):
            return cute.select(layout, mode=[0, 1, 2])

        qk_tile = (ROWS, self.tile.tile_n, shape.width_qk)
        k_tile = (shape.mma_rows, self.tile.tile_n, shape.key_chunk)
        v_tile = (shape.mma_rows, shape.width_v, shape.value_chunk)
        rows, columns = [1, 3, 2, 0], [3, 1, 2, 0]
        o_box = (ROWS, shape.width_v)
        o_stage = cute.slice_(layouts.o, (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_source = q
        if cutlass.const_expr(not shape.packed):
            q_mma = self.query_mmas.qk()
            q_source = TmaSource(*make_tiled_tma_atom_A(load, view(q, rows), stage(layouts.q), qk_tile, q_mma))
        sources = Sources(
            q=q_source,
            k=TmaSource(*make_tiled_tma_atom_B(load, view(k, rows), stage(layouts.k), k_tile, qk)),
            v=TmaSource(*make_tiled_tma_atom_B(load, view(v, columns), stage(layouts.v), v_tile, pv)),
            o=TmaSource(*cpasync.make_tiled_tma_atom(store, view(o, rows), o_stage, o_box)),
        )
        splits = None if cutlass.const_expr(results.o_partial is None) else results.o_partial.shape[0]
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], splits, bounds)
        ctas = self._count(sizes) * shape.ctas
        self.kernel(sources, results, softening, sizes, layouts).launch(
            grid=(cutlass.min(ctas, self.max_ctas) if cutlass.const_expr(self.max_ctas > 0) else ctas, 1, 1),
            block=(self.schedule.threads, 1, 1),
            cluster=(shape.ctas, 1, 1) if cutlass.const_expr(shape.ctas > 1) else None,
            min_blocks_per_mp=1,  # tells ptxas the register count at entry; without it setmaxnreg is ignored
            stream=stream,
        )

    def _count(self, sizes: Sizes) -> Int32:
        """Units: work tiles, or their shares; of a pair, two neighbouring work tiles of a head."""
        rows, heads = self._rows_and_heads(sizes)
        tiles = tile_count(rows, self.tile.tile_m * self.shape.ctas, heads, sizes.batch)
        return tiles if sizes.splits is None else tiles * sizes.splits

    def _rounds(self, sizes: Sizes) -> Rounds:
        """Units of this CTA."""
        if self.max_ctas > 0:
            return rounds_of(self._count(sizes), self.shape.ctas)
        return Rounds(cute.arch.block_idx()[0] // self.shape.ctas, cute.arch.grid_dim()[0] // self.shape.ctas, 1)

    def _unit_of(self, rounds: Rounds, turn: Int32, sizes: Sizes) -> Unit:
        index = rounds.unit(turn) if self.max_ctas > 0 else rounds.block
        sizes = Sizes(*(fresh(size) for size in sizes[:5]), sizes.splits)
        if self.shape.ctas > 1:
            work = self._work(index, sizes)
            return Unit(WorkTile(PAIR * work.m_block + rank_in_pair(), work.head, work.batch), None)
        if sizes.splits is None:
            return Unit(self._work(index, sizes), None)
        return Unit(self._work(index // sizes.splits, sizes), index % sizes.splits)

    def _rows_and_heads(self, sizes: Sizes) -> tuple[Int32, Int32]:
        """Query rows that share K and V, and how many such runs of rows a batch has."""
        if not self.shape.packed:
            return sizes.seqlen_q, sizes.heads_q
        return sizes.seqlen_q * (sizes.heads_q // sizes.heads_kv), sizes.heads_kv

    def _row_of(self, work: WorkTile, row: Int32, sizes: Sizes) -> tuple[WorkTile, Int32]:
        """The head that a row of a work tile belongs to, and its number there. Packed, row r of the run is row
        r // group of the group's head r % group."""
        if not self.shape.packed:
            return work, row
        group = sizes.heads_q // sizes.heads_kv
        return WorkTile(work.m_block, work.head * group + row % group, work.batch), row // group

    @cute.jit
    def _work(self, index: Int32, sizes: Sizes) -> WorkTile:
        if cutlass.const_expr(self.shape.packed):
            rows, heads = self._rows_and_heads(sizes)
            return head_by_head(index, cute.ceil_div(rows, ROWS), heads)
        m_blocks = cute.ceil_div(sizes.seqlen_q, self.tile.tile_m * self.shape.ctas)
        if cutlass.const_expr(self.mask.left or not self.mask.right):
            return head_by_head(index, m_blocks, sizes.heads_q)
        keys = cutlass.min(sizes.seqlen_k, 1 << 20)  # beyond any L2, and the product stays within 32 bits
        kv_bytes = keys * (self.shape.width_qk + self.shape.width_v) * 2
        group = sizes.heads_q // sizes.heads_kv
        return longest_first(index, m_blocks, sizes.heads_q, sizes.batch, kv_bytes, group)

    @cute.jit
    def _tiles(self, unit: Unit, query_tile: Int32, sizes: Sizes) -> KeyTiles:
        """Key tiles of one query tile. At least one, so that every role has a step to take: a row that sees nothing of
        it ends with a sum of 0. Under a left bound the second query tile starts where the first one does."""
        start, lengths = unit.work.m_block * self.tile.tile_m, sizes.lengths
        row_start = (unit.work.m_block * self.shape.query_tiles + query_tile) * ROWS
        if cutlass.const_expr(self.mask.windowed):
            tile = replace(self.tile, tile_m=ROWS)
            tiles = window_tiles(row_start, tile, lengths, sizes.bounds, self.mask)
            first = window_tiles(start, tile, lengths, sizes.bounds, self.mask).first
            return KeyTiles(first, cutlass.max(tiles.last, first + 1), tiles.unmasked, tiles.whole)
        tiles = self._key_tiles(row_start, sizes)
        if cutlass.const_expr(unit.split is None):
            return KeyTiles(tiles.first, cutlass.max(tiles.last, 1), tiles.unmasked)
        part = part_of(tiles, unit.split, sizes.splits)
        return KeyTiles(part.first, cutlass.max(part.last, part.first + 1), part.unmasked)

    def _key_tiles(self, row_start: Int32, sizes: Sizes) -> KeyTiles:
        """Of the query tile from row_start on, under a mask without bounds."""
        rows = ROWS
        if self.shape.packed:
            group = sizes.heads_q // sizes.heads_kv
            row_start, end = row_start // group, (row_start + ROWS - 1) // group + 1
            rows = cutlass.min(end, sizes.seqlen_q) - row_start
        return key_tiles(row_start, rows, self.tile.tile_n, *sizes.lengths, self.mask.causal)

    @cute.jit
    def _run(self, unit: Unit, sizes: Sizes) -> Run:
        tiles = self._tiles(unit, self.shape.query_tiles - 1, sizes)
        return Run(tiles.last, tiles.last - tiles.first, tiles.last - self._tiles(unit, 0, sizes).last)

    @cute.jit
    def _keys(self, unit: Unit, row: Int32, sizes: Sizes) -> Visible:
        """What a row sees of the unit. A split without a key tile of its own visits one, and sees nothing of it."""
        keys = visible_keys(row, sizes.lengths, self.mask, sizes.bounds)
        if cutlass.const_expr(unit.split is None):
            return keys
        tiles = self._key_tiles(unit.work.m_block * ROWS, sizes)
        end = part_of(tiles, unit.split, sizes.splits).last * self.tile.tile_n
        return Visible(keys.first, cutlass.min(keys.end, end))

    @cute.kernel
    def kernel(self, sources: Sources, results: Results, softening: Softening, sizes: Sizes, layouts: ForwardLayouts):
        shape, schedule, two = self.shape, self.schedule, self.shape.ctas == PAIR
        barriers = barrier_count(shape.query_tiles, self.tile.stages)
        storage = SmemAllocator().allocate(forward_storage(shape, layouts, barriers, self.dtype))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bars = open_barriers(storage.barriers.data_ptr(), shape)
        if warp == schedule.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address.data_ptr(), is_two_cta=two)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two)
        cute.arch.mbarrier_init_fence()
        before_arrive()
        meet(shape.ctas)
        after_wait()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address.data_ptr())
        o_room = storage.q if cutlass.const_expr(shape.shared_output) else storage.o
        room = Room(
            bars=bars,
            q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
            q_rows=storage.q.get_tensor(layouts.q_rows.outer, swizzle=layouts.q_rows.inner) if shape.packed else None,
            k=storage.ring.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
            v=storage.ring.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
            o=o_room.get_tensor(layouts.o.outer, swizzle=layouts.o.inner),
            factors=storage.factors.get_tensor(cute.make_layout((ROWS, shape.query_tiles))),
            tmem=tmem,
        )
        if warp >= schedule.mma_warp:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            if warp == schedule.load_warp:
                self.load(sources, room, sizes)
            if warp == schedule.mma_warp and leads(shape.ctas):
                self.multiply(room, sizes)
        elif warp >= schedule.correction_warp:
            cute.arch.setmaxregister_decrease(schedule.correction_registers)
            self.correct(sources.o, room, results, sizes)
        else:
            cute.arch.setmaxregister_increase(schedule.softmax_registers)
            self.softmax(sources.q, room, results, softening, sizes)
        meet(shape.ctas)  # a pair: products read the shared memory of both CTAs, and arrive at barriers of both
        if warp == schedule.mma_warp:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS, is_two_cta=two)

    @cute.jit
    def load(self, sources: Sources, room: Room, sizes: Sizes):
        shape, ring, phase = self.shape, ring_start(), Int32(0)
        half = rank_in_pair() if cutlass.const_expr(shape.ctas > 1) else 0
        qk, pv = self.mmas.qk().get_slice(half), self.mmas.pv().get_slice(half)
        rounds = self._rounds(sizes)
        for turn in cutlass.range(rounds.count, unroll=1):
            unit = self._unit_of(rounds, turn, sizes)
            work = unit.work
            head_kv = work.head
            if cutlass.const_expr(not shape.packed):
                head_kv = work.head // (sizes.heads_q // sizes.heads_kv)
            k = sources.k.tensor[None, None, head_kv, work.batch]
            v = sources.v.tensor[None, None, head_kv, work.batch]
            k_tiles = cute.local_tile(k, (self.tile.tile_n, shape.key_chunk), (None, None))
            v_tiles = cute.local_tile(v, (shape.width_v, shape.value_chunk), (0, None))
            context = LoadContext(
                bars=room.bars,
                q=None if shape.packed else self._query_copy(sources.q, room, work),
                k=tile_copy(sources.k, room.k, qk.partition_B(k_tiles)),
                v=tile_copy(sources.v, room.v, pv.partition_B(v_tiles)),
            )
            run = self._run(unit, sizes)
            ring = load_tile(context, work.m_block * shape.query_tiles, run, ring, phase, shape)
            phase = phase ^ 1

    def _query_copy(self, source: TmaSource, room: Room, work: WorkTile) -> TileCopy:
        q = source.tensor[None, None, work.head, work.batch]
        q_tiles = cute.local_tile(q, (ROWS, self.shape.width_qk), (None, 0))
        return tile_copy(source, room.q, self.query_mmas.qk().get_slice(0).partition_A(q_tiles))

    @cute.jit
    def multiply(self, room: Room, sizes: Sizes):
        context = MmaContext(room.bars, make_fragments(self.mmas, (room.q, room.k, room.v), room.tmem))
        state = MmaState(ring_start(), Int32(0), (Int32(0), Int32(0)))
        rounds = self._rounds(sizes)
        for turn in cutlass.range(rounds.count, unroll=1):
            run = self._run(self._unit_of(rounds, turn, sizes), sizes)
            if cutlass.const_expr(self.shape.query_tiles == 2):
                state = multiply_pair(context, self.mmas, run.steps, run.skip, state)
            else:
                state = multiply_single(context, self.mmas, run.steps, state)

    @cute.jit
    def softmax(self, query: TmaSource | cute.Tensor, room: Room, results: Results, softening: Softening, sizes: Sizes):
        query_tile = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_GROUP
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        slots = SoftmaxSlots(query_tile, query_tile, Int32(0), Int32(0))
        state = make_row_state(1)
        rounds = self._rounds(sizes)
        for turn in cutlass.range(rounds.count, unroll=1):
            unit = self._unit_of(rounds, turn, sizes)
            context = SoftmaxContext(
                bars=room.bars,
                tmem=room.tmem,
                tile=query_tile,
                state=state,
                factors=room.factors[None, query_tile],
                scale_log2=softening.scale_log2,
                thread=thread,
                cap_slope=softening.cap_slope,
            )
            reset(state)
            row = (unit.work.m_block * self.shape.query_tiles + query_tile) * ROWS + thread
            work, row = self._row_of(unit.work, row, sizes)
            if cutlass.const_expr(self.shape.packed):
                real = row < sizes.seqlen_q
                source = query[work.batch, cutlass.min(row, sizes.seqlen_q - 1), work.head, None]
                gather_row(source, room.q_rows, room.bars, thread, real)
            slots = self.attend(context, self._tiles(unit, query_tile, sizes), self._keys(unit, row, sizes), slots)
            send_factor(context, slots.factor_phase, inverse_total(state.total[0]))
            slots = SoftmaxSlots(slots.first, slots.s, slots.s_phase, slots.factor_phase ^ 1)
            if cutlass.const_expr(results.state_partial is not None):
                states = results.state_partial[unit.split, None, None, None, None]
                store_state(states, state, work, row, softening.scale_log2)
            elif cutlass.const_expr(results.lse is not None):
                store_lse(results.lse, state, work, row, softening.scale_log2)

    @cute.jit
    def attend(self, context: SoftmaxContext, tiles: KeyTiles, keys: Visible, slots: SoftmaxSlots) -> SoftmaxSlots:
        """One query tile over all its key tiles, from the last to the first."""
        masked_end = cutlass.min(tiles.unmasked, tiles.last)
        whole = tiles.first
        if cutlass.const_expr(self.mask.left):
            masked_end = cutlass.max(masked_end, tiles.first)
            whole = cutlass.min(cutlass.max(tiles.whole, tiles.first), masked_end)
        for step in cutlass.range(tiles.last - masked_end, unroll=1):
            visible = keys.of_tile((tiles.last - 1 - step) * self.tile.tile_n)
            slots = softmax_step(context, self.softmax_plan, slots, visible)
        for _ in cutlass.range(masked_end - whole, unroll=1):
            slots = softmax_step(context, self.softmax_plan, slots, None)
        if cutlass.const_expr(self.mask.left):
            for step in cutlass.range(whole - tiles.first, unroll=1):
                visible = keys.of_tile((whole - 1 - step) * self.tile.tile_n)
                slots = softmax_step(context, self.softmax_plan, slots, visible)
        return slots

    @cute.jit
    def correct(self, store: TmaSource, room: Room, results: Results, sizes: Sizes):
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp = cute.arch.make_warp_uniform(thread // 32)
        context = CorrectionContext(room.bars, room.tmem, room.factors, thread)
        state = CorrectionState((Int32(0), Int32(0)), Int32(0), ring_start())
        rounds = self._rounds(sizes)
        for turn in cutlass.range(rounds.count, unroll=1):
            unit = self._unit_of(rounds, turn, sizes)
            run = self._run(unit, sizes)
            if cutlass.const_expr(self.shape.query_tiles == 2):
                state = correct_pair(context, self.shape, run.steps, run.skip, state)
            else:
                state = correct_single(context, self.shape, run.steps, state)
            if cutlass.const_expr(results.o_partial is None):
                state = self.leave(context, OutputRoom(room.o, store), unit.work, state, warp)
            else:
                state = self.leave_partial(context, results.o_partial, unit, sizes, state)
        if cutlass.const_expr(results.o_partial is None):
            await_stores(warp)

    @cute.jit
    def leave(
        self, context: CorrectionContext, out: OutputRoom, work: WorkTile, state: CorrectionState, warp: Int32
    ) -> CorrectionState:
        """The finished query tiles of a work tile."""
        shape, bars, factors = self.shape, context.bars, list(state.factors)
        thread = fresh(context.thread)
        await_stores(warp)  # of the work tile before
        cute.arch.barrier(barrier_id=O_STORED, number_of_threads=WARPGROUP)
        for tile in cutlass.range_constexpr(shape.query_tiles):
            factor = receive_factor(context, tile, factors[tile])
            factors[tile] = factors[tile] ^ 1
            cute.arch.mbarrier_wait(bars.o_full + tile, state.o_phase)
            after_wait()
            output_to_smem(context.tmem, out.smem[None, None, tile], shape, tile, factor, thread)
            store_output(out, work, tile, shape, warp)
        return CorrectionState(tuple(factors), state.o_phase ^ 1, state.slot)

    @cute.jit
    def leave_partial(
        self, context: CorrectionContext, o_partial: cute.Tensor, unit: Unit, sizes: Sizes, state: CorrectionState
    ) -> CorrectionState:
        """The finished single query tile of one split, straight to global memory."""
        factor_phase, unused = state.factors
        factor = receive_factor(context, 0, factor_phase)
        cute.arch.mbarrier_wait(context.bars.o_full, state.o_phase)
        after_wait()
        work, row = self._row_of(unit.work, unit.work.m_block * ROWS + context.thread, sizes)
        real = row < o_partial.shape[3]
        target = o_partial[unit.split, work.batch, work.head, cutlass.min(row, o_partial.shape[3] - 1), None]
        store_partial(context.tmem, target, self.shape, factor, (context.thread, real))
        return CorrectionState((factor_phase ^ 1, unused), state.o_phase ^ 1, state.slot)
