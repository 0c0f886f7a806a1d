"""Backward on Blackwell in pairs of CTAs, at head dims of width 128. Not yet run on silicon.

FlashAttention-4 (arXiv 2603.05451), section 3.2: two CTAs own neighbouring tiles of keys and multiply together, so that
each reads half of every B operand from shared memory. They swap half of dS, so that each sums its half of dQ over the
keys of both: half of the float32 additions.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan, Tile

from ..common import delta
from ..common.keyunits import Unit, first_key_tile, unit_count, unit_of
from ..common.order import Sizes
from .grad.epilogue import DqPlace, GradientRoom, ReduceContext, leave, reduce_step
from .grad.memory import BackwardShape, TmaSource
from .grad.pair_load import PairFeed, load_for_pair, part_copy
from .grad.pair_memory import (
    BOTH_KEYS,
    DQ_CHUNK,
    DQ_COLUMNS,
    HALF,
    ROW_SLOTS,
    PairLayouts,
    pair_layouts,
    pair_operands,
    pair_shape,
    pair_storage,
)
from .grad.pair_mma import PairMmas, make_operands, multiply_in_pairs
from .grad.pair_pipeline import PairBarriers, barrier_count, open_pair_barriers
from .grad.pair_weights import PairWeighContext, weigh_step_of_pair
from .grad.schedule import BackwardSchedule
from .grad.weights import WeighPlan
from .pipeline import after_wait, before_arrive, leads, meet, rank_in_pair
from .schedule import ROWS, WARPGROUP, WARPS_PER_GROUP
from .tiles import DQ_SLOTS, PAIR, TMEM_COLUMNS


class Sources(NamedTuple):
    """What the kernel reads and writes through TMA; modes (seqlen, width, heads, batch)."""

    k: TmaSource
    v: TmaSource
    k_columns: TmaSource
    q_rows: TmaSource
    q_columns: TmaSource
    do_rows: TmaSource
    do_columns: TmaSource
    dk: TmaSource
    dv: TmaSource


class PairedKeyTilesSm100:
    """The kernel whose pairs of CTAs own 256 keys."""

    def __init__(self, plan: Plan, dtype: type):
        self.mask, self.dtype = plan.mask, dtype
        self.shape = pair_shape(BackwardShape(plan.tile, plan.head_dim, plan.head_dim_v))
        self.both = Tile(ROWS, BOTH_KEYS)
        self.schedule = BackwardSchedule()
        self.deterministic = plan.deterministic
        self.mmas = PairMmas(self.shape, dtype)
        self.weigh_plan = WeighPlan(self.shape, dtype, plan.mask, plan.softcap)

    @cute.jit
    def launch(self, tensors: tuple, scratch: delta.Scratch, factors: tuple, bounds: tuple, stream):
        """As KeyTileSm100.launch."""
        q, k, v, do, dk, dv = tensors
        layouts = pair_layouts(self.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO), cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor, layout, box):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))
            return TmaSource(*cpasync.make_tiled_tma_atom(op, view, cute.slice_(layout, (None, None, 0)), box))

        whole, rows, columns = (ROWS, ROWS), (HALF, ROWS), (ROWS, HALF)
        sources = Sources(
            k=source(load, k, layouts.k, whole),
            v=source(load, v, layouts.k, whole),
            k_columns=source(load, k, layouts.k_columns, (BOTH_KEYS, HALF)),
            q_rows=source(load, q, layouts.rows, rows),
            q_columns=source(load, q, layouts.columns, columns),
            do_rows=source(load, do, layouts.rows, rows),
            do_columns=source(load, do, layouts.columns, columns),
            dk=source(store, dk, layouts.k, whole),
            dv=source(store, dv, layouts.k, whole),
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], *bounds)
        self.kernel(sources, scratch, factors, sizes, layouts).launch(
            grid=(PAIR * unit_count(sizes, self.both), 1, 1),
            block=(self.schedule.threads, 1, 1),
            cluster=(PAIR, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sources: Sources, scratch: delta.Scratch, factors: tuple, sizes: Sizes, layouts: PairLayouts):
        schedule = self.schedule
        storage = SmemAllocator().allocate(pair_storage(barrier_count(), self.dtype))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bars = open_pair_barriers(storage.barriers.data_ptr())
        if warp == schedule.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address.data_ptr(), is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.mbarrier_init_fence()
        before_arrive()
        meet(PAIR)
        after_wait()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address.data_ptr())
        if warp >= schedule.mma_warp:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            unit = self._unit(sizes)
            if warp == schedule.load_warp:
                self.load(sources, scratch, storage, (bars, layouts), unit)
            if warp == schedule.mma_warp and leads(PAIR):
                self.multiply(storage, bars, tmem, unit)
        elif warp >= schedule.first_weigh_warp:
            cute.arch.setmaxregister_increase(schedule.weigh_registers)
            unit = self._unit(sizes)
            self.weigh(storage, (bars, tmem), unit, factors, sizes)
            self.leave(sources, storage, (bars, tmem, layouts), unit, factors[0])
        else:
            cute.arch.setmaxregister_decrease(schedule.reduce_registers)
            self.reduce(storage, (bars, tmem), scratch, self._unit(sizes), sizes)
        meet(PAIR)  # products read the shared memory of both CTAs, and arrive at barriers of both
        if warp == schedule.mma_warp:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS, is_two_cta=True)

    def _unit(self, sizes: Sizes) -> Unit:
        """As KeyTileSm100._unit."""
        return unit_of(cute.arch.block_idx()[0] // PAIR, sizes, self.both, (ROWS, ROWS), self.mask)

    @cute.jit
    def load(self, sources: Sources, scratch: delta.Scratch, storage, opened: tuple, unit: Unit):
        bars, layouts = opened
        batch = unit.batch

        def copy(source, part, layout, box):
            return part_copy(source, part.get_tensor(layout.outer, swizzle=layout.inner), box, batch)

        rows, columns = (HALF, ROWS), (ROWS, HALF)
        feed = PairFeed(
            k=copy(sources.k, storage.k, layouts.k, (ROWS, ROWS)),
            v=copy(sources.v, storage.v, layouts.k, (ROWS, ROWS)),
            k_columns=copy(sources.k_columns, storage.k_columns, layouts.k_columns, (BOTH_KEYS, HALF)),
            q_rows=copy(sources.q_rows, storage.q_rows, layouts.rows, rows),
            q_columns=copy(sources.q_columns, storage.q_columns, layouts.columns, columns),
            do_rows=copy(sources.do_rows, storage.do_rows, layouts.rows, rows),
            do_columns=copy(sources.do_columns, storage.do_columns, layouts.columns, columns),
            row_values=scratch.rows[None, None, None, batch],
            s_rows=storage.rows.get_tensor(cute.make_layout((2 * ROWS, ROW_SLOTS))),
        )
        load_for_pair(bars, feed, unit, rank_in_pair())

    @cute.jit
    def multiply(self, storage, bars: PairBarriers, tmem: cute.Pointer, unit: Unit):
        layouts = pair_operands(self.mmas, self.dtype)
        parts = (
            (storage.k, layouts.keys),
            (storage.v, layouts.keys),
            (storage.k_columns, layouts.k_columns),
            (storage.q_rows, layouts.rows),
            (storage.q_columns, layouts.columns),
            (storage.do_rows, layouts.rows),
            (storage.do_columns, layouts.columns),
            (storage.ds, layouts.ds),
        )
        operands = tuple(part.get_tensor(layout.outer, swizzle=layout.inner) for part, layout in parts)
        steps = unit.tiles.count * unit.group
        if steps > 0:
            multiply_in_pairs(bars, make_operands(self.mmas, operands, tmem), self.mmas, steps)

    @cute.jit
    def weigh(self, storage, opened: tuple, unit: Unit, factors: tuple, sizes: Sizes):
        bars, tmem = opened
        thread, rank = cute.arch.thread_idx()[0] % WARPGROUP, rank_in_pair()
        context = PairWeighContext(
            bars=bars,
            tmem=tmem,
            rows=storage.rows.get_tensor(cute.make_layout((2 * ROWS, ROW_SLOTS))),
            ds=storage.ds.data_ptr(),
            factors=factors[1:],
            thread=thread,
            half=cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_GROUP - 1,
            row=rank * ROWS + thread,
            key=unit.key_block * BOTH_KEYS + rank * ROWS + thread,
            seqlens=(sizes.seqlen_q, sizes.seqlen_k),
            bounds=(sizes.left, sizes.right),
        )
        tiles = unit.tiles
        at = tiles.first
        for step in cutlass.range(tiles.count * unit.group, unroll=1):
            masked = (at < tiles.whole_first) | (at >= tiles.whole_last)
            weigh_step_of_pair(context, self.weigh_plan, (step, at * ROWS, masked))
            at += 1
            if at == tiles.last:
                at = tiles.first

    @cute.jit
    def leave(self, sources: Sources, storage, opened: tuple, unit: Unit, scale: Float32):
        """dV, by the first weighing warpgroup, and dK times the scale, by the second."""
        bars, tmem, layouts = opened
        shape, layout = self.shape, layouts.k
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        half = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_GROUP - 1
        seen = unit.tiles.count > 0
        if seen:
            cute.arch.mbarrier_wait(bars.sums_full, 0)
            after_wait()
        place = (unit.key_block * PAIR + rank_in_pair(), unit.head_kv, unit.batch)
        if half == 0:
            room = storage.v.get_tensor(layout.outer, swizzle=layout.inner)[None, None, 0]
            source = (shape.dv_column, ROWS, Float32(1.0))
            leave((tmem, thread, half), GradientRoom(room, sources.dv), source, place, seen)
        else:
            room = storage.k.get_tensor(layout.outer, swizzle=layout.inner)[None, None, 0]
            leave((tmem, thread, half), GradientRoom(room, sources.dk), (shape.dk_column, ROWS, scale), place, seen)

    @cute.jit
    def reduce(self, storage, opened: tuple, scratch: delta.Scratch, unit: Unit, sizes: Sizes):
        """This CTA's 64 columns of dQ of every tile."""
        bars, tmem = opened
        thread, rank = cute.arch.thread_idx()[0] % WARPGROUP, rank_in_pair()
        s_dq = storage.dq.get_tensor(cute.make_layout((ROWS * DQ_CHUNK, DQ_SLOTS)))
        place = DqPlace(self.shape.dp_column, DQ_COLUMNS, DQ_CHUNK, PAIR)
        context = ReduceContext(bars, tmem, s_dq, thread)
        tiles = unit.tiles
        for member in cutlass.range(unit.group, unroll=1):
            for index in cutlass.range(tiles.count, unroll=1):
                at, head = tiles.first + index, unit.head_first + member
                order = (None, 0, 0)
                if cutlass.const_expr(self.deterministic):
                    first = first_key_tile(at * ROWS, BOTH_KEYS, sizes, self.mask)
                    order = (scratch.turns[None, at, head, unit.batch], rank, unit.key_block - first)
                sums = cute.domain_offset((rank * (ROWS * DQ_COLUMNS),), scratch.dq[None, at, head, unit.batch])
                reduce_step(context, place, sums, member * tiles.count + index, order)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
