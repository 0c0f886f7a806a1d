"""Backward of packed sequences on Hopper: the kernel of backward.py, whose units are key tiles of sequences.

prepare_kernel of sequences.py counts key tiles, of the sequences with most query rows first. dQ is summed where every
sequence has room for whole tiles of its own (common/ragged.py, slots), and delta.py's and convert.py's kernels find the
sequence of a slot by a search. Sums start as zeros in delta's kernel.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..common import delta
from ..common.blocks import row_tiles
from ..common.entry import PackedBoundedEntry, PackedEntry
from ..common.keyunits import Unit, row_bytes
from ..common.numeric import LOG2_E
from ..common.order import Sizes, head_by_head, longest_first
from ..common.ragged import Rows, only_rows, ragged_view, sequence_heads, slots_of
from .backward import BackwardSm90, MmaContext, Sources
from .grad import convert
from .grad.epilogue import add_dq
from .grad.load import Feed, TileCopy, feed_unit, prefetch_descriptors
from .grad.memory import BackwardLayouts, TmaSource, backward_layouts, backward_storage
from .grad.mma import make_accumulators, make_operands
from .grad.pipeline import backward_states, open_backward
from .grad.queue import announce, draw, open_units, receive, unit_states
from .grad.schedule import FIRST_ADD_WARP, LOAD_WARP
from .schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .sequences import Lengths, Table, entry_at, launch_prepare, place_at, table_of, tile_total
from .tiles import PACKED_TABLE_ALIGN, TABLE


class PackedUnit(NamedTuple):
    unit: Unit
    rows: Int32  # query rows of the sequence
    keys: Rows
    slot: Int32  # of its first query tile


def packed_copy(tma: TmaSource, smem: cute.Tensor, tile: tuple[int, int], rows: Rows) -> TileCopy:
    """Tiles of every head of a sequence, ready for TMA."""
    tiles = cute.local_tile(sequence_heads(tma.tensor, rows), tile, (None, 0, None))
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TileCopy(tma.atom, source, target)


class PackedBackwardSm90(PackedEntry, BackwardSm90):
    """For a plain Plan."""

    @cute.jit
    def launch_packed(self, tensors: tuple, others: tuple, numbers: tuple, starts: tuple, memory: cute.Tensor, stream):
        """Four kernels. `memory`: the table, then the scratch."""
        q, k, v, do, dq, dk, dv = tensors
        scale, left, right, softcap = numbers
        starts_q, starts_k = starts
        tile, widths = self.tile, (self.width_qk, self.width_v, self.width_dq)
        layouts = backward_layouts(tile, widths, self.mmas.dq_columns, self.dtype)
        op = cpasync.CopyBulkTensorTileG2SOp()

        def source(tensor, layout, rows, width):
            box = cute.slice_(layout, (None, None, 0))
            return TmaSource(*cpasync.make_tiled_tma_atom(op, ragged_view(tensor), box, (rows, width)))

        sources = Sources(
            q=source(q, layouts.q, tile.tile_m, self.width_qk),
            k=source(k, layouts.k, tile.tile_n, self.width_dq),
            v=source(v, layouts.v, tile.tile_n, self.width_v),
            do=source(do, layouts.do, tile.tile_m, self.width_v),
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        sequences = starts_q.shape[0] - 1
        words = (TABLE.elements(sequences) + PACKED_TABLE_ALIGN - 1) // PACKED_TABLE_ALIGN * PACKED_TABLE_ALIGN
        table = table_of(cute.make_tensor(cute.recast_ptr(memory.iterator, dtype=Int32), memory.layout), sequences)
        launch_prepare(Lengths(starts_k, starts_q, sizes.seqlen_k, sizes.seqlen_q), table, tile.tile_n, stream)
        by_slot = (slots_of(sizes.seqlen_q, sequences, tile.tile_m), sizes.heads_q, Int32(1))
        room = cute.domain_offset((words,), memory)
        scratch = delta.scratch_of(room, by_slot, tile.tile_m, self.width_dq, 0, 1)
        delta.prepare_kernel(do, *others, scratch, tile.tile_m, self.width_v, None, starts_q).launch(
            grid=delta.row_tile_grid(by_slot), block=(delta.THREADS, 1, 1), stream=stream
        )
        factors = (scale * LOG2_E, None)
        if cutlass.const_expr(self.softcap):
            factors = (softcap * LOG2_E, 2.0 * LOG2_E * scale / softcap)
        units = slots_of(sizes.seqlen_k, sequences, tile.tile_n) * sizes.heads_kv
        self.packed_kernel(sources, (scratch, table, dk, dv), scale, factors, sizes, layouts).launch(
            grid=(cutlass.min(units, self.max_ctas), 1, 1),
            block=(self.schedule.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )
        shape = (tile.tile_m, self.mmas.dq_columns)
        convert.convert_kernel(scratch.dq, dq, scale, shape, starts_q).launch(
            grid=delta.row_tile_grid(by_slot), block=(self.mmas.dq_parts * WARPGROUP, 1, 1), stream=stream
        )

    @cute.kernel
    def packed_kernel(
        self,
        sources: Sources,
        results: tuple,  # (scratch, table, dk, dv)
        scale: cutlass.Float32,
        factors: tuple,
        sizes: Sizes,
        layouts: BackwardLayouts,
    ):
        tile, schedule = self.tile, self.schedule
        scratch, table, dk, dv = results
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch_descriptors(warp_index, (sources.k, sources.q, sources.v, sources.do))
        storage = SmemAllocator().allocate(backward_storage(layouts, tile, self.width_dq, self.dtype))

        def room(part, layout):
            return part.get_tensor(layout.outer, swizzle=layout.inner)

        s_k, s_v = room(storage.k, layouts.k), room(storage.v, layouts.v)
        s_q, s_do, s_ds = room(storage.q, layouts.q), room(storage.do, layouts.do), room(storage.ds, layouts.ds)
        s_rows = storage.rows.get_tensor(cute.make_layout((2 * tile.tile_m, tile.stages)))
        parts = (ROWS_PER_WARPGROUP * self.mmas.dq_columns, self.mmas.dq_parts)
        s_dq = storage.dq.get_tensor(cute.make_layout(parts))
        ring = open_units(
            storage.unit_barriers.data_ptr(), storage.units.data_ptr(), schedule.mma_warps + self.mmas.dq_parts
        )
        pipes = open_backward(storage, layouts, tile, self.dtype, schedule)

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            cute.arch.griddepcontrol_wait()
            if warp_index == LOAD_WARP:
                self.load_packed((pipes, ring), sources, (scratch, table), (s_k, s_v, s_q, s_do, s_rows), sizes)
            elif warp_index < FIRST_ADD_WARP + self.mmas.dq_parts:
                self.add_packed(s_dq, scratch, ring, warp_index - FIRST_ADD_WARP, sizes)
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
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
            )
            self.multiply_packed(context, ring, (dk, dv), scale, sizes)

    @cute.jit
    def drawn(self, index: Int32, table: Table, sizes: Sizes) -> tuple:
        """By a warp: what the others are told of the index-th unit (see told), and the sequence's query rows."""
        tile = self.tile
        entry = entry_at(table, index // sizes.heads_kv)
        keys, queries = place_at(table, entry)
        within, blocks = index - table.starts[entry] * sizes.heads_kv, (keys.count + tile.tile_n - 1) // tile.tile_n
        blocks = cutlass.max(blocks, 1)
        if cutlass.const_expr(self.mask.causal and not self.mask.left):
            weight = row_bytes(queries.count, (self.width_qk, self.width_v))
            work = longest_first(within, blocks, sizes.heads_kv, Int32(1), weight, Int32(1))
            key_block = blocks - 1 - work.m_block
        else:
            work = head_by_head(within, blocks, sizes.heads_kv)
            key_block = work.m_block
        slot = queries.first // tile.tile_m + table.order[entry]
        return (Int32(1), key_block, work.head, queries.count, keys.first, keys.count, slot), queries

    @cute.jit
    def told(self, ticket: tuple, sizes: Sizes) -> PackedUnit:
        key_block, head_kv, rows, first, keys, slot = ticket[1:7]
        group = sizes.heads_q // sizes.heads_kv
        bounds = (sizes.left, sizes.right)
        tiles = row_tiles(key_block * self.tile.tile_n, self.tile, (rows, keys), bounds, self.mask)
        unit = Unit(key_block, head_kv, Int32(0), head_kv * group, group, tiles)
        return PackedUnit(unit, rows, Rows(first, keys), slot)

    @cute.jit
    def load_packed(self, channels: tuple, sources: Sources, origin: tuple, rooms: tuple, sizes: Sizes):
        pipes, ring = channels
        scratch, table = origin
        s_k, s_v, s_q, s_do, s_rows = rooms
        tile = self.tile
        states = backward_states(pipelines.PipelineUserType.Producer, tile.stages)
        ticket_state, count = unit_states(pipelines.PipelineUserType.Producer), tile_total(table, sizes.heads_kv)
        index = cute.arch.block_idx()[0]
        while index < count:
            ticket, queries = self.drawn(index, table, sizes)
            ticket_state = announce(ring, ticket_state, ticket)
            found = self.told(ticket, sizes)
            feed = Feed(
                k=packed_copy(sources.k, s_k, (tile.tile_n, self.width_dq), found.keys),
                v=packed_copy(sources.v, s_v, (tile.tile_n, self.width_v), found.keys),
                q=packed_copy(sources.q, s_q, (tile.tile_m, self.width_qk), queries),
                do=packed_copy(sources.do, s_do, (tile.tile_m, self.width_v), queries),
                row_values=cute.domain_offset((0, found.slot, 0), scratch.rows[None, None, None, 0]),
                s_rows=s_rows,
            )
            states = feed_unit(pipes, states, feed, found.unit)
            index = cute.arch.grid_dim()[0] + draw(scratch.counters, 0)
        announce(ring, ticket_state, (Int32(0),))

    @cute.jit
    def add_packed(self, s_dq: cute.Tensor, scratch: delta.Scratch, ring: tuple, group: Int32, sizes: Sizes):
        ticket_state = unit_states(pipelines.PipelineUserType.Consumer)
        ticket, ticket_state = receive(ring, ticket_state)
        while ticket[0] != 0:
            found = self.told(ticket, sizes)
            unit = found.unit
            for member in cutlass.range(unit.group, unroll=1):
                for step in cutlass.range(unit.tiles.count, unroll=1):
                    at, head = found.slot + unit.tiles.first + step, unit.head_first + member
                    sums = cute.make_tensor(scratch.dq[None, at, head, 0].iterator, s_dq.layout)
                    add_dq(s_dq, sums, group, (None, 0))
            ticket, ticket_state = receive(ring, ticket_state)

    @cute.jit
    def multiply_packed(self, context: MmaContext, ring: tuple, targets: tuple, scale: cutlass.Float32, sizes: Sizes):
        """`targets`: (dk, dv)."""
        acc, thread = context.acc, context.thread
        dk, dv = targets
        states = backward_states(pipelines.PipelineUserType.Consumer, self.tile.stages)
        ticket_state = unit_states(pipelines.PipelineUserType.Consumer)
        ticket, ticket_state = receive(ring, ticket_state)
        while ticket[0] != 0:
            found = self.told(ticket, sizes)
            unit, keys = found.unit, found.keys
            states = self.through(context._replace(seqlens=(found.rows, keys.count)), states, unit)
            row_start = unit.key_block * self.tile.tile_n
            self.leave(acc.dv, only_rows(dv, 1, keys)[0, None, unit.head_kv, None], thread, row_start, self.width_v)
            acc.dk.store(acc.dk.load() * scale)
            self.leave(acc.dk, only_rows(dk, 1, keys)[0, None, unit.head_kv, None], thread, row_start, self.width_qk)
            ticket, ticket_state = receive(ring, ticket_state)


class PackedBoundedBackwardSm90(PackedBoundedEntry, PackedBackwardSm90):
    """For a Plan that is not plain."""
