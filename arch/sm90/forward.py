"""Forward on Hopper: memory and pipelines are opened, then each warp takes its role.

FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2: a producer warp feeds a K/V ring by TMA; MMA warpgroups take
turns on the tensor cores (ping-pong), and inside one the softmax of a tile runs under P V of the one before (walk.py).
CTAs stay on their SM and take unit after unit.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

from ..common.combine import launch_combine
from ..common.entry import (
    DrawnBoundedForwardEntry,
    DrawnForwardEntry,
    ForwardEntry,
    PackedBoundedForwardEntry,
    PackedForwardEntry,
    SplitForwardEntry,
)
from ..common.numeric import LOG2_E
from ..common.order import Sizes, rounds_of
from ..common.ragged import ragged_view
from ..common.rowstate import make_row_state
from .epilogue import OutputRoom
from .load import Loads, TmaSource, load_first, load_keys, load_last, prefetch, tile_copy
from .memory import TICKET_SLOTS, TICKET_WORDS, ForwardLayouts, forward_layouts, forward_storage
from .mma import make_fragments
from .pipeline import forward_states, open_forward, turn_of
from .queue import Ticket, following_unit, open_tickets, publish, ticket_states
from .schedule import WARPGROUP
from .sequences import Lengths, PackedUnits, Table, launch_prepare, table_of
from .tiles import forward_ctas
from .units import Units
from .walk import MmaContext, Walk

# For each key tile that a unit has less than the longest, see give_way. NVIDIA H200, 2026-11-30, causal S=1024, us
# without / 400 / 800 (perf/results/hopper_starts.csv): d=128 16 heads 21.8 20.3 20.2, with a warm L2 the same; d=64 16
# heads 18.1 17.4 17.4. Without / 400: d=256 2 x 8 heads 34.3 32.1, d=128 8 heads S=2048 32.0 30.1.
GIVE_WAY_NS = 400
DRAW_LEAD = 3  # key tiles still to be loaded when the next unit is drawn


class Sources(NamedTuple):
    """What the kernel reads and writes through TMA."""

    q: TmaSource  # (seqlen_q, head_dim, heads_q, batch)
    k: TmaSource  # (seqlen_k, head_dim, heads_kv, batch)
    v: TmaSource  # (head_dim_v, seqlen_k, heads_kv, batch)
    o: TmaSource | None  # (seqlen_q, head_dim_v, heads_q, batch)


class ForwardSm90(ForwardEntry):
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile, self.dtype, self.softcap = plan.tile, dtype, plan.softcap
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.max_ctas, self.packed = plan.ctas, plan.form == PACKED
        self.units = PackedUnits(plan) if self.packed else Units(plan)
        self.walk = Walk(plan, self.units, dtype)
        self.schedule = self.walk.schedule
        self.gives_way = plan.draws and plan.mask.causal and not plan.mask.windowed and not self.packed
        self.options = {"use_pdl": True} if self.packed else {}
        if self.packed or plan.tile.tile_m == 64:  # ptxas ignores setmaxnreg for 256 threads of which it knows no more
            together = forward_ctas(plan.tile, plan.head_dim, plan.head_dim_v)
            self.options |= {"min_blocks_per_mp": together, "preferred_smem_carveout": 100}

    def run(self, tensors: tuple, lse: cute.Tensor | None, numbers: tuple, counter: cute.Tensor | None, stream):
        self.launch(tensors, lse, None, counter, numbers, stream)

    def tma_view(self, tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
        """With the modes in this order; mode 1 are the rows."""
        if self.packed:
            return ragged_view(tensor, modes.index(1))
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

    def run_packed(self, tensors: tuple, lse: cute.Tensor | None, numbers: tuple, packed: tuple, counter, stream):
        self.launch(tensors, lse, None, counter, numbers, stream, packed)

    @cute.jit
    def launch(
        self,
        tensors: tuple,
        lse: cute.Tensor | None,
        o_partial: cute.Tensor | None,
        counter: cute.Tensor | None,
        numbers: tuple,
        stream,
        packed: tuple | None = None,
    ):
        """`numbers`: (scale, left, right, softcap), the last three None in a plain Plan. `packed`: of packed sequences
        (cu_seqlens_q, cu_seqlens_k, table)."""
        q, k, v, o = tensors
        scale, left, right, softcap = numbers
        tile, layouts = (
            self.tile,
            forward_layouts(self.tile, self.width_qk, self.width_v, self.dtype, self.walk.q_slots),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor, modes, layout, box):
            view = self.tma_view(tensor, modes)
            return TmaSource(*cpasync.make_tiled_tma_atom(op, view, cute.slice_(layout, (None, None, 0)), box))

        sources = Sources(
            q=source(load, q, [1, 3, 2, 0], layouts.q, (tile.tile_m, self.width_qk)),
            k=source(load, k, [1, 3, 2, 0], layouts.k, (tile.tile_n, self.width_qk)),
            v=source(load, v, [3, 1, 2, 0], layouts.v, (self.width_v, tile.tile_n)),
            o=source(store, o, [1, 3, 2, 0], layouts.o, (64, self.width_v)) if self.walk.o_apart else None,
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        splits = 1 if cutlass.const_expr(o_partial is None) else o_partial.shape[0]
        scale_log2, cap_factor = scale * LOG2_E, None
        if cutlass.const_expr(self.softcap):
            scale_log2, cap_factor = softcap * LOG2_E, 2.0 * scale_log2 / softcap
        out, table = None if self.walk.o_apart else o, None
        if cutlass.const_expr(self.packed):
            lengths = Lengths(*packed[:2], sizes.seqlen_q, sizes.seqlen_k)
            sequences = packed[0].shape[0] - 1
            table = table_of(packed[2], sequences)
            launch_prepare(lengths, table, tile.tile_m, stream)
            units = self.units.bound(sizes, sequences)
        else:
            units = self.units.count(sizes, splits)
        self.kernel(sources, (lse, o_partial, counter, out), scale_log2, cap_factor, sizes, layouts, table).launch(
            grid=(cutlass.min(units, self.max_ctas), 1, 1),
            block=(self.schedule.threads, 1, 1),
            stream=stream,
            **self.options,
        )

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        results: tuple,  # (lse, o_partial, counter, out); where keys are split, lse is state_partial (splits, ..., 2)
        scale_log2: Float32,
        cap_factor: Float32 | None,
        sizes: Sizes,
        layouts: ForwardLayouts,
        table: Table | None,  # of packed sequences
    ):
        tile, schedule = self.tile, self.schedule
        lse, o_partial, counter, out = results
        storage = SmemAllocator().allocate(forward_storage(layouts, tile.stages, self.dtype, self.walk.o_apart))
        smem = (
            storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
            storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
            storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
        )
        words = storage.tickets.get_tensor(cute.make_layout((TICKET_WORDS, TICKET_SLOTS)))
        tickets = open_tickets(storage.ticket_barriers.data_ptr(), words, schedule.mma_threads)
        s_o = None
        if cutlass.const_expr(self.walk.o_apart):
            s_o = storage.o.get_tensor(layouts.o.outer, swizzle=layouts.o.inner)
        pipes = open_forward(storage, layouts, (self.walk.q_slots, tile.stages), self.dtype, schedule)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        splits = Int32(1) if cutlass.const_expr(o_partial is None) else o_partial.shape[0]
        if cutlass.const_expr(self.packed):
            splits = table
        if warp < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp == 0:
                self.load_role((pipes, tickets), sources, smem, sizes, splits, counter)
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            group = warp // 4 - 1
            context = MmaContext(
                pipes=pipes,
                tickets=tickets,
                frags=make_fragments(self.walk.mmas, smem, group),
                state=make_row_state(2),
                done=make_row_state(2),
                scale_log2=scale_log2,
                thread=thread - WARPGROUP,
                group=group,
                turn=turn_of(group, schedule),
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
                bounds=(sizes.left, sizes.right),
                cap_factor=cap_factor,
            )
            room = OutputRoom(s_o, sources.o)
            self.walk.run(context, room, (lse, o_partial, out), sizes, splits)

    @cute.jit
    def give_way(self, last: Int32, counts: tuple, seqlen_k: Int32):
        """Where every CTA has one unit the longest decides: memory, which all ask at once, serves it first."""
        units, ctas = counts
        if units <= ctas:
            fewer = (seqlen_k + self.tile.tile_n - 1) // self.tile.tile_n - last
            cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[fewer * GIVE_WAY_NS])

    @cute.jit
    def load_role(
        self,
        pipes: tuple,
        sources: Sources,
        smem: tuple,
        sizes: Sizes,
        splits: Int32 | Table,
        counter: cute.Tensor | None,
    ):
        pipes, tickets = pipes
        if cutlass.const_expr(self.packed):
            cute.arch.griddepcontrol_wait()  # for the table
        units = self.units.count(sizes, splits)
        rounds = rounds_of(units)
        group = sizes.heads_q // sizes.heads_kv
        s_q, s_k, s_v = smem
        q_box, k_box = (self.tile.tile_m, self.width_qk), (self.tile.tile_n, self.width_qk)
        v_box = (self.width_v, self.tile.tile_n)
        states = forward_states(pipelines.PipelineUserType.Producer, self.walk.q_slots, self.tile.stages)
        ticket_state = ticket_states(pipelines.PipelineUserType.Producer)
        entry, index, step = Int32(0), rounds.unit(0), Int32(0)
        if cutlass.const_expr(self.packed):
            index *= self.units.together
            ticket, entry = self.units.ticket(index, sizes, splits, entry)
        else:
            ticket = self.units.ticket(index, sizes, splits)
        ticket_state = publish(tickets, ticket_state, ticket)
        if cutlass.const_expr(self.gives_way):
            self.give_way(self.units.unit(ticket, sizes, splits).tiles.last, (units, rounds.ctas), sizes.seqlen_k)
        while ticket.live != 0:
            unit = self.units.unit(ticket, sizes, splits)
            work, head_kv, tiles = unit.work, unit.work.head // group, unit.tiles
            rows, keys = places(ticket)
            loads = Loads(
                tile_copy(sources.q, s_q, q_box, (work.m_block, 0), work.head, rows),
                tile_copy(sources.k, s_k, k_box, (None, 0), head_kv, keys),
                tile_copy(sources.v, s_v, v_box, (0, None), head_kv, keys),
            )
            states = load_first(pipes, states, loads, tiles, not self.walk.carries)
            # as late as the answer can still be there in time: who is ready first shall draw first
            late = cutlass.min(tiles.first + DRAW_LEAD, tiles.last - 1)
            states = load_keys(pipes, states, loads, late, tiles.last - 1)
            if cutlass.const_expr(self.packed):
                index = self.units.following(index, units, counter)
                ticket, entry = self.units.ticket(index, sizes, splits, entry)
            else:
                ticket = self.units.ticket(following_unit(rounds, step, units, counter), sizes, splits)
            ticket_state = publish(tickets, ticket_state, ticket)
            if cutlass.const_expr(not self.walk.carries):
                following = ticket.work
                if ticket.live != 0:  # one slot is filled between two tiles: from L2, not from further away
                    prefetch(
                        tile_copy(sources.q, s_q, q_box, (following.m_block, 0), following.head, places(ticket)[0])
                    )
            states = load_keys(pipes, states, loads, tiles.first, late)
            states = load_last(pipes, states, loads, tiles)
            step += 1


def places(ticket: Ticket) -> tuple:
    """Where its rows and its keys are: in a batch, or in a packed sequence."""
    return (ticket.work.batch, ticket.work.batch) if ticket.place is None else tuple(ticket.place)


class DrawnForwardSm90(DrawnForwardEntry, ForwardSm90):
    """The same kernel for query tiles of unequal length: CTAs draw the next one."""


class BoundedForwardSm90(DrawnBoundedForwardEntry, ForwardSm90):
    """The same kernel for Plans that are not plain; its CTAs draw, too."""


class PackedForwardSm90(PackedForwardEntry, ForwardSm90):
    """The same kernel for packed sequences: prepare_kernel says which units there are, CTAs draw them."""


class PackedBoundedForwardSm90(PackedBoundedForwardEntry, ForwardSm90):
    """The same for Plans that are not plain."""


class SplitForwardSm90(SplitForwardEntry, ForwardSm90):
    """The same kernel for query tiles too few to fill the GPU: several CTAs share one, each with a run of keys."""

    def run_split(self, tensors: tuple, lse: cute.Tensor | None, scale: Float32, partials: tuple, stream):
        o_partial, state_partial = partials
        self.launch(tensors, state_partial, o_partial, None, (scale, None, None, None), stream)
        launch_combine(o_partial, state_partial, tensors[3], lse, stream)
