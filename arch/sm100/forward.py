"""Forward on Blackwell: memory and barriers are opened, then each warp takes its role. Not yet run on silicon.

FlashAttention-4 (arXiv 2603.05451), section 3.1: products accumulate in tensor memory, so that softmax threads own whole
rows and hold nothing else; two query tiles alternate on the tensor cores; a correction warpgroup takes the rescaling of
O off the softmax, and does it only where a maximum grew much. Key tiles that only the second query tile sees are not
given to the first.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.blocks import KeyTiles, key_tiles
from ..common.numeric import LOG2_E
from ..common.order import WorkTile, head_by_head, longest_first, tile_count
from ..common.rowstate import inverse_total, make_row_state
from .correction import CorrectionContext, correct_step, receive_factor
from .epilogue import OutputRoom, await_stores, output_to_smem, store_lse, store_output
from .load import LoadContext, TmaSource, load_tile, tile_copy
from .mask import visible_keys
from .memory import ForwardLayouts, ForwardShape, forward_layouts, forward_storage
from .mma import ForwardMmas, MmaContext, make_fragments, multiply_tile
from .pipeline import after_wait, barrier_count, before_arrive, open_barriers, ring_start
from .schedule import ROWS, WARPGROUP, forward_schedule
from .softmax import SoftmaxContext, SoftmaxPlan, send_factor, softmax_step
from .tiles import TMEM_COLUMNS, emulated_pairs


class Sources(NamedTuple):
    """What the kernel reads and writes through TMA."""

    q: TmaSource  # (seqlen_q, head_dim, heads_q, batch)
    k: TmaSource  # (seqlen_k, head_dim, heads_kv, batch)
    v: TmaSource  # (head_dim_v, seqlen_k, heads_kv, batch)
    o: TmaSource  # (seqlen_q, head_dim_v, heads_q, batch)


class Sizes(NamedTuple):
    batch: Int32
    heads_q: Int32
    heads_kv: Int32
    seqlen_q: Int32
    seqlen_k: Int32


class Room(NamedTuple):
    """Shared and tensor memory as the roles see it."""

    bars: tuple
    q: cute.Tensor  # (mma, 1, width_qk / 16, query_tiles)
    k: cute.Tensor  # (mma, 1, key_chunk / 16, slots)
    v: cute.Tensor  # (mma, 1, value_chunk / 16, slots)
    o: cute.Tensor  # (128, width_v, query_tiles)
    factors: cute.Tensor  # (128, query_tiles)
    tmem: cute.Pointer


class ForwardSm100:
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile = plan.tile
        self.shape = ForwardShape(plan.tile, plan.head_dim, plan.head_dim_v)
        self.causal = plan.mask.causal
        self.dtype = dtype
        self.schedule = forward_schedule(plan.tile)
        self.mmas = ForwardMmas(self.shape, dtype)
        self.softmax_plan = SoftmaxPlan(self.shape, dtype, emulated_pairs(plan.arch, plan.head_dim))

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
        shape, qk, pv = self.shape, self.mmas.qk(), self.mmas.pv()
        layouts = forward_layouts(shape, qk, pv, self.dtype)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)

        def view(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        def stage(layout):
            return cute.select(layout, mode=[0, 1, 2])

        qk_tile, k_tile = (ROWS, self.tile.tile_n, shape.width_qk), (ROWS, self.tile.tile_n, shape.key_chunk)
        v_tile = (ROWS, shape.width_v, shape.value_chunk)
        rows, columns = [1, 3, 2, 0], [3, 1, 2, 0]
        o_box = (ROWS, shape.width_v)
        o_stage = cute.slice_(layouts.o, (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        sources = Sources(
            q=TmaSource(*make_tiled_tma_atom_A(load, view(q, rows), stage(layouts.q), qk_tile, qk)),
            k=TmaSource(*make_tiled_tma_atom_B(load, view(k, rows), stage(layouts.k), k_tile, qk)),
            v=TmaSource(*make_tiled_tma_atom_B(load, view(v, columns), stage(layouts.v), v_tile, pv)),
            o=TmaSource(*cpasync.make_tiled_tma_atom(store, view(o, rows), o_stage, o_box)),
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
        self.kernel(sources, lse, scale * LOG2_E, sizes, layouts).launch(
            grid=(tile_count(sizes.seqlen_q, self.tile.tile_m, sizes.heads_q, sizes.batch), 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,  # tells ptxas the register count at entry; without it setmaxnreg is ignored
            stream=stream,
        )

    @cute.jit
    def _work(self, index: Int32, sizes: Sizes) -> WorkTile:
        m_blocks = cute.ceil_div(sizes.seqlen_q, self.tile.tile_m)
        if cutlass.const_expr(not self.causal):
            return head_by_head(index, m_blocks, sizes.heads_q)
        keys = cutlass.min(sizes.seqlen_k, 1 << 20)  # beyond any L2, and the product stays within 32 bits
        kv_bytes = keys * (self.shape.width_qk + self.shape.width_v) * 2
        group = sizes.heads_q // sizes.heads_kv
        return longest_first(index, m_blocks, sizes.heads_q, sizes.batch, kv_bytes, group)

    @cute.jit
    def _tiles(self, work: WorkTile, query_tile: cutlass.Constexpr[int], sizes: Sizes) -> KeyTiles:
        """Key tiles of one query tile. At least one, so that every role has a step to take: a row that sees nothing of
        it ends with a sum of 0."""
        row_start = (work.m_block * self.shape.query_tiles + query_tile) * ROWS
        tiles = key_tiles(row_start, ROWS, self.tile.tile_n, sizes.seqlen_q, sizes.seqlen_k, self.causal)
        return KeyTiles(tiles.first, cutlass.max(tiles.last, 1), tiles.unmasked)

    @cute.jit
    def _steps(self, work: WorkTile, sizes: Sizes) -> tuple[Int32, Int32]:
        """Key tiles of the work tile, and how many of them query tile 0 does not see: 0 or 1, the first ones."""
        steps = self._tiles(work, self.shape.query_tiles - 1, sizes).last
        return steps, steps - self._tiles(work, 0, sizes).last

    @cute.kernel
    def kernel(
        self, sources: Sources, lse: cute.Tensor | None, scale_log2: Float32, sizes: Sizes, layouts: ForwardLayouts
    ):
        shape, schedule, slots = self.shape, self.schedule, self.tile.stages
        barriers = barrier_count(shape.query_tiles, slots)
        storage = SmemAllocator().allocate(forward_storage(shape, layouts, barriers, self.dtype))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bars = open_barriers(storage.barriers.data_ptr(), shape.query_tiles, slots)
        if warp == schedule.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address.data_ptr())
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.mbarrier_init_fence()
        before_arrive()
        cute.arch.sync_threads()
        after_wait()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address.data_ptr())
        o_room = storage.q if cutlass.const_expr(shape.shared_output) else storage.o
        room = Room(
            bars=bars,
            q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
            k=storage.ring.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
            v=storage.ring.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
            o=o_room.get_tensor(layouts.o.outer, swizzle=layouts.o.inner),
            factors=storage.factors.get_tensor(cute.make_layout((ROWS, shape.query_tiles))),
            tmem=tmem,
        )
        index, _, _ = cute.arch.block_idx()
        work = self._work(index, sizes)
        if warp >= schedule.mma_warp:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            if warp == schedule.load_warp:
                self.load(sources, room, work, sizes)
            if warp == schedule.mma_warp:
                self.multiply(room, work, sizes)
        elif warp >= schedule.correction_warp:
            cute.arch.setmaxregister_decrease(schedule.correction_registers)
            self.correct(sources.o, room, work, sizes)
        else:
            cute.arch.setmaxregister_increase(schedule.softmax_registers)
            if warp < 4:
                self.softmax(room, lse, scale_log2, work, sizes, 0)
            else:
                self.softmax(room, lse, scale_log2, work, sizes, shape.query_tiles - 1)
        cute.arch.sync_threads()
        if warp == schedule.mma_warp:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)

    @cute.jit
    def load(self, sources: Sources, room: Room, work: WorkTile, sizes: Sizes):
        shape = self.shape
        head_kv = work.head // (sizes.heads_q // sizes.heads_kv)
        qk, pv = self.mmas.qk().get_slice(0), self.mmas.pv().get_slice(0)
        q = sources.q.tensor[None, None, work.head, work.batch]
        k = sources.k.tensor[None, None, head_kv, work.batch]
        v = sources.v.tensor[None, None, head_kv, work.batch]
        q_tiles = cute.local_tile(q, (ROWS, shape.width_qk), (None, 0))
        k_tiles = cute.local_tile(k, (self.tile.tile_n, shape.key_chunk), (None, None))
        v_tiles = cute.local_tile(v, (shape.width_v, shape.value_chunk), (0, None))
        context = LoadContext(
            bars=room.bars,
            q=tile_copy(sources.q, room.q, qk.partition_A(q_tiles)),
            k=tile_copy(sources.k, room.k, qk.partition_B(k_tiles)),
            v=tile_copy(sources.v, room.v, pv.partition_B(v_tiles)),
        )
        steps, _ = self._steps(work, sizes)
        load_tile(context, work.m_block * shape.query_tiles, steps, ring_start(), Int32(0), shape)

    @cute.jit
    def multiply(self, room: Room, work: WorkTile, sizes: Sizes):
        context = MmaContext(room.bars, make_fragments(self.mmas, (room.q, room.k, room.v), room.tmem))
        steps, skip = self._steps(work, sizes)
        multiply_tile(context, self.mmas, steps, skip, ring_start(), (Int32(0), Int32(0), Int32(0)))

    @cute.jit
    def softmax(
        self,
        room: Room,
        lse: cute.Tensor | None,
        scale_log2: Float32,
        work: WorkTile,
        sizes: Sizes,
        query_tile: cutlass.Constexpr[int],
    ):
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        context = SoftmaxContext(
            bars=room.bars,
            tmem=room.tmem,
            state=make_row_state(1),
            factors=room.factors[None, query_tile],
            scale_log2=scale_log2,
            thread=thread,
        )
        tiles = self._tiles(work, query_tile, sizes)
        row = (work.m_block * self.shape.query_tiles + query_tile) * ROWS + thread
        keys = visible_keys(row, (sizes.seqlen_q, sizes.seqlen_k), self.causal)
        masked_end = cutlass.min(tiles.unmasked, tiles.last)
        phase = Int32(0)
        for step in cutlass.range(tiles.last - masked_end, unroll=1):
            visible = keys - (tiles.last - 1 - step) * self.tile.tile_n
            softmax_step(context, self.softmax_plan, query_tile, (phase, phase), visible)
            phase = phase ^ 1
        for _ in cutlass.range(masked_end, unroll=1):
            softmax_step(context, self.softmax_plan, query_tile, (phase, phase), None)
            phase = phase ^ 1
        send_factor(context, query_tile, phase, inverse_total(context.state.total[0]))
        if cutlass.const_expr(lse is not None):
            store_lse(lse, context.state, work, row, scale_log2)

    @cute.jit
    def correct(self, store: TmaSource, room: Room, work: WorkTile, sizes: Sizes):
        shape = self.shape
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp = cute.arch.make_warp_uniform(thread // 32)
        context = CorrectionContext(room.bars, room.tmem, room.factors, thread)
        out = OutputRoom(room.o, store)
        steps, skip = self._steps(work, sizes)
        first = last = Int32(0)  # phases of the two query tiles' factors
        for step in cutlass.range(steps, unroll=1):
            if cutlass.const_expr(shape.query_tiles == 2):
                if step >= skip:
                    correct_step(context, shape, 0, first, step > skip)
                    first = first ^ 1
            correct_step(context, shape, shape.query_tiles - 1, last, step > 0)
            last = last ^ 1
        for tile in cutlass.range_constexpr(shape.query_tiles):
            phase = last if cutlass.const_expr(tile == shape.query_tiles - 1) else first
            factor = receive_factor(context, tile, phase)
            cute.arch.mbarrier_wait(room.bars.o_full + tile, Int32(0))
            after_wait()
            output_to_smem(room.tmem, room.o[None, None, tile], shape, tile, factor, thread)
            store_output(out, work, tile, shape, warp)
        await_stores(warp)
