"""Backward on Blackwell: a CTA owns a tile of keys, walks the query tiles that see it, and keeps dK and dV in tensor
memory. Not yet run on silicon.

FlashAttention-2 (arXiv 2307.08691), algorithm 2, as FlashAttention-4 (arXiv 2603.05451), section 3.2, lays it out: S
and dP are computed transposed, so that P^T and dS^T are operands in tensor memory. The query heads of a group are
walked by one CTA, so dK and dV need no addition in memory; dQ is summed in float32 in global memory by bulk
additions.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common import delta
from ..common.entry import BoundedEntry, PlainEntry
from ..common.keyunits import Unit, first_key_tile, unit_count, unit_of
from ..common.numeric import LOG2_E
from ..common.order import Sizes
from .backward_pair import PairedKeyTilesSm100
from .grad import convert
from .grad.epilogue import DqPlace, GradientRoom, ReduceContext, leave, reduce_step
from .grad.load import Feed, load_role, tile_copy
from .grad.memory import BackwardLayouts, BackwardShape, TmaSource, backward_layouts, backward_storage, operand_layouts
from .grad.mma import BackwardMmas, make_operands, multiply
from .grad.pipeline import Barriers, barrier_count, open_barriers
from .grad.schedule import BackwardSchedule
from .grad.weights import WeighContext, WeighPlan, weigh_step
from .pipeline import after_wait, before_arrive, ring_start
from .schedule import ROWS, WARPGROUP, WARPS_PER_GROUP
from .tiles import DQ_SLOTS, PAIR, PAIRS, TMEM_COLUMNS, backward_pairs_pay, backward_parts, backward_turns


class Sources(NamedTuple):
    """What the kernel reads and writes through TMA; modes (seqlen, width, heads, batch)."""

    q: TmaSource
    k: TmaSource
    v: TmaSource
    do: TmaSource
    dk: TmaSource
    dv: TmaSource


class Room(NamedTuple):
    """Shared and tensor memory as the roles see it."""

    bars: Barriers
    k: cute.Tensor  # (128, width_qk, 1)
    v: cute.Tensor | None  # (128, width_v, 1); this and ds and dq: None where no dK is made
    q: cute.Tensor  # (tile_m, width_qk, q slots)
    do: cute.Tensor  # (tile_m, width_v, do slots)
    ds: cute.Tensor | None  # (128 keys, tile_m, 1)
    rows: cute.Tensor  # (2 * tile_m, q slots)
    dq: cute.Tensor | None  # (128 * chunk, slots)
    dk: cute.Tensor  # as k, in its room
    dv: cute.Tensor  # (128, width_v, 1), in the room of V, or of K
    tmem: cute.Pointer


class KeyTileSm100:
    """The kernel that owns a tile of keys, or of two such the one that makes a part; see tiles.py."""

    def __init__(self, plan: Plan, dtype: type, part: str):
        self.tile, self.mask = plan.tile, plan.mask
        self.shape = BackwardShape(plan.tile, plan.head_dim, plan.head_dim_v, part)
        self.dtype = dtype
        self.schedule = BackwardSchedule()
        self.deterministic = plan.deterministic
        self.mmas = BackwardMmas(self.shape, dtype)
        self.weigh_plan = WeighPlan(self.shape, dtype, plan.mask, plan.softcap)

    @cute.jit
    def launch(self, tensors: tuple, scratch: delta.Scratch, factors: tuple, bounds: tuple, stream):
        """factors: (scale, what the exponent takes scores times, what goes inside a softcap)."""
        q, k, v, do, dk, dv = tensors
        shape = self.shape
        tile_m = self.tile.tile_m
        layouts = backward_layouts(shape, self.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor, layout, rows, width):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))
            box = cute.slice_(layout, (None, None, 0))
            return TmaSource(*cpasync.make_tiled_tma_atom(op, view, box, (rows, width)))

        sources = Sources(
            q=source(load, q, layouts.q, tile_m, shape.width_qk),
            k=source(load, k, layouts.k, ROWS, shape.width_qk),
            v=source(load, v, layouts.v, ROWS, shape.width_v),
            do=source(load, do, layouts.do, tile_m, shape.width_v),
            dk=source(store, dk, layouts.k, ROWS, shape.width_qk),
            dv=source(store, dv, layouts.v, ROWS, shape.width_v),
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], *bounds)
        self.kernel(sources, scratch, factors, sizes, layouts).launch(
            grid=(unit_count(sizes, self.tile), 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,  # tells ptxas the register count at entry; without it setmaxnreg is ignored
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sources: Sources, scratch: delta.Scratch, factors: tuple, sizes: Sizes, layouts: BackwardLayouts):
        shape, schedule = self.shape, self.schedule
        storage = SmemAllocator().allocate(backward_storage(shape, layouts, barrier_count(shape), self.dtype))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bars = open_barriers(storage.barriers.data_ptr(), shape)
        if warp == schedule.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address.data_ptr())
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.mbarrier_init_fence()
        before_arrive()
        cute.arch.sync_threads()
        after_wait()
        room = self._room(storage, layouts, bars)
        if warp >= schedule.mma_warp:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            unit = self._unit(sizes)
            if warp == schedule.load_warp:
                self.load(sources, scratch, room, unit)
            if warp == schedule.mma_warp:
                self.multiply(storage, room, unit)
        elif warp >= schedule.first_weigh_warp:
            cute.arch.setmaxregister_increase(schedule.weigh_registers)
            unit = self._unit(sizes)
            self.weigh(room, unit, factors, sizes)
            self.leave(sources, room, unit, factors[0])
        else:
            cute.arch.setmaxregister_decrease(schedule.reduce_registers)
            if cutlass.const_expr(shape.makes_dk):
                self.reduce(room, scratch, self._unit(sizes), sizes)
        cute.arch.sync_threads()
        if warp == schedule.mma_warp:
            cute.arch.dealloc_tmem(room.tmem, TMEM_COLUMNS)

    def _unit(self, sizes: Sizes) -> Unit:
        """Worked out in every role. Known before they part, it would lie in uniform registers through all of them, and
        ptxas runs out of these (20 bytes spilled at (128, 96) under a window)."""
        widths = self.shape.width_qk, self.shape.width_v
        return unit_of(cute.arch.block_idx()[0], sizes, self.tile, widths, self.mask)

    def _room(self, storage, layouts: BackwardLayouts, bars: Barriers) -> Room:
        shape = self.shape

        def rows_of(part, layout):
            return part.get_tensor(layout.outer, swizzle=layout.inner)

        dk, made = rows_of(storage.k, layouts.k), shape.makes_dk
        chunks = cute.make_layout((ROWS * shape.dq_chunk, DQ_SLOTS))
        return Room(
            bars=bars,
            k=dk,
            v=rows_of(storage.v, layouts.v) if made else None,
            q=rows_of(storage.q, layouts.q),
            do=rows_of(storage.do, layouts.do),
            ds=rows_of(storage.ds, layouts.ds) if made else None,
            rows=storage.rows.get_tensor(cute.make_layout((2 * self.tile.tile_m, shape.q_slots))),
            dq=storage.dq.get_tensor(chunks) if made else None,
            dk=dk,
            dv=rows_of(storage.v if made else storage.k, layouts.v),
            tmem=cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address.data_ptr()),
        )

    @cute.jit
    def load(self, sources: Sources, scratch: delta.Scratch, room: Room, unit: Unit):
        shape, batch, tile_m = self.shape, unit.batch, self.tile.tile_m
        feed = Feed(
            k=tile_copy(sources.k, room.k, (ROWS, shape.width_qk), batch),
            v=tile_copy(sources.v, room.v, (ROWS, shape.width_v), batch) if shape.makes_dk else None,
            q=tile_copy(sources.q, room.q, (tile_m, shape.width_qk), batch),
            do=tile_copy(sources.do, room.do, (tile_m, shape.width_v), batch),
            row_values=scratch.rows[None, None, None, batch],
            s_rows=room.rows,
        )
        load_role(room.bars, feed, unit, shape)

    @cute.jit
    def multiply(self, storage, room: Room, unit: Unit):
        layouts = operand_layouts(self.shape, self.mmas, self.dtype)
        made = self.shape.makes_dk
        v, ds = (storage.v, storage.ds) if made else (storage.k, storage.k)  # not read where no dK is made
        rooms = (storage.k, v, storage.q, storage.do, ds, storage.k, storage.q, storage.do)
        operands = tuple(
            part.get_tensor(layout.outer, swizzle=layout.inner) for part, layout in zip(rooms, layouts, strict=True)
        )
        steps = unit.tiles.count * unit.group
        if steps > 0:
            multiply(room.bars, make_operands(self.mmas, operands, room.tmem), self.mmas, steps)

    @cute.jit
    def weigh(self, room: Room, unit: Unit, factors: tuple, sizes: Sizes):
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        half = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_GROUP - 1
        context = WeighContext(
            bars=room.bars,
            tmem=room.tmem,
            rows=room.rows,
            ds=room.ds[None, None, 0] if self.shape.makes_dk else None,
            factors=factors[1:],
            thread=thread,
            half=half,
            key=unit.key_block * self.tile.tile_n + thread,
            seqlens=(sizes.seqlen_q, sizes.seqlen_k),
            bounds=(sizes.left, sizes.right),
        )
        tiles, queries = unit.tiles, ring_start()
        at = tiles.first
        for step in cutlass.range(tiles.count * unit.group, unroll=1):
            masked = (at < tiles.whole_first) | (at >= tiles.whole_last)
            queries = weigh_step(context, self.weigh_plan, queries, (step, at * self.tile.tile_m, masked))
            at += 1
            if at == tiles.last:
                at = tiles.first

    @cute.jit
    def leave(self, sources: Sources, room: Room, unit: Unit, scale: Float32):
        """dV, by the first weighing warpgroup, and dK times the scale, by the second."""
        shape = self.shape
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        half = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_GROUP - 1
        seen = unit.tiles.count > 0
        if seen:
            cute.arch.mbarrier_wait(room.bars.sums_full, 0)
            after_wait()
        place = (unit.key_block, unit.head_kv, unit.batch)
        if half == 0:
            if cutlass.const_expr(shape.makes_dv):
                dv = GradientRoom(room.dv[None, None, 0], sources.dv)
                leave((room.tmem, thread, half), dv, (shape.dv_column, shape.width_v, Float32(1.0)), place, seen)
        else:
            if cutlass.const_expr(shape.makes_dk):
                dk = GradientRoom(room.dk[None, None, 0], sources.dk)
                leave((room.tmem, thread, half), dk, (shape.dk_column, shape.width_qk, scale), place, seen)

    @cute.jit
    def reduce(self, room: Room, scratch: delta.Scratch, unit: Unit, sizes: Sizes):
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        context = ReduceContext(room.bars, room.tmem, room.dq, thread)
        place = DqPlace(self.shape.dq_column, self.shape.dq_columns, self.shape.dq_chunk)
        tiles = unit.tiles
        for member in cutlass.range(unit.group, unroll=1):
            for index in cutlass.range(tiles.count, unroll=1):
                at, head = tiles.first + index, unit.head_first + member
                order = (None, 0, 0)
                if cutlass.const_expr(self.deterministic):
                    first = first_key_tile(at * self.tile.tile_m, self.tile.tile_n, sizes, self.mask)
                    order = (scratch.turns[None, at, head, unit.batch], 0, unit.key_block - first)
                sums = scratch.dq[None, at, head, unit.batch]
                reduce_step(context, place, sums, member * tiles.count + index, order)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class BackwardSm100(PlainEntry):
    """One Plan's kernels. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.kernels = tuple(KeyTileSm100(plan, dtype, part) for part in backward_parts(plan.variant))
        self.pair = PairedKeyTilesSm100(plan, dtype) if plan.variant == PAIRS else None
        self.tile_m, self.widths = plan.tile.tile_m, (plan.head_dim, plan.head_dim_v)
        self.softcap, self.deterministic = plan.softcap, plan.deterministic

    @cute.jit
    def launch(self, tensors: tuple, others: tuple, numbers: tuple, memory: cute.Tensor, stream):
        """Three kernels or four; see common/entry.py. Where a Plan has pairs, the keys of a call decide."""
        q, k, v, do, dq, dk, dv = tensors
        o, lse, dlse = others
        scale, left, right, softcap = numbers
        width_qk, width_v = self.widths
        by_row_tile = (cute.ceil_div(q.shape[1], self.tile_m), q.shape[2], q.shape[0])
        turns = backward_turns(self.pair is not None) if self.deterministic else 0
        scratch = delta.scratch_of(memory, by_row_tile, self.tile_m, width_qk, turns)
        delta.prepare_kernel(do, o, lse, dlse, scratch, self.tile_m, width_v).launch(
            grid=delta.row_tile_grid(by_row_tile), block=(delta.THREADS, 1, 1), stream=stream
        )
        factors = (scale, scale * LOG2_E, None)
        if cutlass.const_expr(self.softcap):
            factors = (scale, softcap * LOG2_E, 2.0 * LOG2_E * scale / softcap)
        tensors = (q, k, v, do, dk, dv)
        if cutlass.const_expr(self.pair is not None):
            if backward_pairs_pay(k.shape[1]):
                self.pair.launch(tensors, scratch, factors, (left, right), stream)
                self._convert(scratch.dq, dq, scale, delta.row_tile_grid(by_row_tile), PAIR, stream)
            else:
                self._launch_alone(tensors, scratch, factors, (left, right), stream)
                self._convert(scratch.dq, dq, scale, delta.row_tile_grid(by_row_tile), 1, stream)
        else:
            self._launch_alone(tensors, scratch, factors, (left, right), stream)
            self._convert(scratch.dq, dq, scale, delta.row_tile_grid(by_row_tile), 1, stream)

    @cute.jit
    def _launch_alone(self, tensors: tuple, scratch: delta.Scratch, factors: tuple, bounds: tuple, stream):
        for kernel in self.kernels:
            kernel.launch(tensors, scratch, factors, bounds, stream)

    @cute.jit
    def _convert(
        self, sums: cute.Tensor, dq: cute.Tensor, scale: Float32, grid: tuple, ctas: cutlass.Constexpr[int], stream
    ):
        width_qk, block = self.widths[0], (convert.THREADS, 1, 1)
        if cutlass.const_expr(self.tile_m == ROWS and ctas == 1):
            convert.convert_kernel(sums, dq, scale, width_qk).launch(grid=grid, block=block, stream=stream)
        else:
            change = convert.convert_transposed_kernel(sums, dq, scale, (width_qk, ctas))
            change.launch(grid=grid, block=block, stream=stream)


class BoundedBackwardSm100(BoundedEntry, BackwardSm100):
    """For a Plan that is not plain."""
