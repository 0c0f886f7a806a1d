"""Forward on Hopper: memory and pipelines are opened, then each warp takes its role.

FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2: a producer warp feeds a K/V ring by TMA; MMA warpgroups take
turns on the tensor cores (ping-pong), and inside one the softmax of tile j runs under its own P V of tile j + 1.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.blocks import KeyTiles, key_tiles, part_of
from ..common.combine import launch_combine
from ..common.numeric import LOG2_E, pack_fragment
from ..common.order import WorkTile, head_by_head, longest_first, tile_count
from ..common.rowstate import RowState, make_row_state
from .epilogue import OutputRoom, store_lse, store_output, store_partial
from .load import TmaSource, load_forward, tile_copy
from .mask import mask_scores
from .memory import ForwardLayouts, forward_layouts, forward_storage
from .mma import ForwardMmas, Fragments, issue_output, issue_scores, make_fragments
from .pipeline import (
    ForwardPipelines,
    Turn,
    grant_first_turn,
    open_forward,
    pass_turn,
    turn_of,
    wait_full,
    wait_turn,
)
from .schedule import WARPGROUP, forward_schedule
from .softmax import finish, rescale_output, softmax_step


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


class MmaContext(NamedTuple):
    """Everything an MMA warpgroup needs in its loop; read-only."""

    pipes: ForwardPipelines
    frags: Fragments
    state: RowState
    scale_log2: Float32
    thread: Int32  # among the MMA threads
    turn: Turn
    row_start: Int32
    seqlens: tuple


class ForwardSm90:
    """One Plan's kernel. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile = plan.tile
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.causal = plan.mask.causal
        self.dtype = dtype
        self.schedule = forward_schedule(plan.tile, plan.head_dim_v)
        self.mmas = ForwardMmas(plan.tile, plan.head_dim_v, dtype)

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
        self.launch((q, k, v, o), lse, None, scale, stream)

    @cute.jit
    def launch(self, tensors: tuple, lse: cute.Tensor | None, o_partial: cute.Tensor | None, scale: Float32, stream):
        q, k, v, o = tensors
        tile, layouts = self.tile, forward_layouts(self.tile, self.width_qk, self.width_v, self.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor, modes, layout, box):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
            return TmaSource(*cpasync.make_tiled_tma_atom(op, view, cute.slice_(layout, (None, None, 0)), box))

        sources = Sources(
            q=source(load, q, [1, 3, 2, 0], layouts.q, (tile.tile_m, self.width_qk)),
            k=source(load, k, [1, 3, 2, 0], layouts.k, (tile.tile_n, self.width_qk)),
            v=source(load, v, [3, 1, 2, 0], layouts.v, (self.width_v, tile.tile_n)),
            o=source(store, o, [1, 3, 2, 0], layouts.o, (64, self.width_v)),
        )
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
        splits = 1 if cutlass.const_expr(o_partial is None) else o_partial.shape[0]
        self.kernel(sources, lse, o_partial, scale * LOG2_E, sizes, layouts).launch(
            grid=(splits * tile_count(sizes.seqlen_q, tile.tile_m, sizes.heads_q, sizes.batch), 1, 1),
            block=(self.schedule.threads, 1, 1),
            stream=stream,
        )

    @cute.jit
    def _work(self, index: Int32, sizes: Sizes) -> WorkTile:
        m_blocks = cute.ceil_div(sizes.seqlen_q, self.tile.tile_m)
        if cutlass.const_expr(not self.causal):
            return head_by_head(index, m_blocks, sizes.heads_q)
        keys = cutlass.min(sizes.seqlen_k, 1 << 20)  # beyond any L2, and the product stays within 32 bits
        kv_bytes = keys * (self.width_qk + self.width_v) * 2
        group = sizes.heads_q // sizes.heads_kv
        return longest_first(index, m_blocks, sizes.heads_q, sizes.batch, kv_bytes, group)

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        lse: cute.Tensor | None,  # (splits, batch, heads_q, seqlen_q) where keys are split
        o_partial: cute.Tensor | None,
        scale_log2: Float32,
        sizes: Sizes,
        layouts: ForwardLayouts,
    ):
        tile, schedule = self.tile, self.schedule
        storage = SmemAllocator().allocate(forward_storage(layouts, tile.stages, self.dtype))
        s_q = storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner)
        s_k = storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner)
        s_v = storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner)
        s_o = storage.q.get_tensor(layouts.o.outer, swizzle=layouts.o.inner)
        pipes = open_forward(storage, layouts, tile.stages, self.dtype, schedule)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index, _, _ = cute.arch.block_idx()
        splits = 1 if cutlass.const_expr(o_partial is None) else o_partial.shape[0]
        work = self._work(index // splits, sizes)
        head_kv = work.head // (sizes.heads_q // sizes.heads_kv)
        row_start = work.m_block * tile.tile_m
        tiles = key_tiles(row_start, tile.tile_m, tile.tile_n, sizes.seqlen_q, sizes.seqlen_k, self.causal)
        if cutlass.const_expr(o_partial is not None):
            tiles = part_of(tiles, index % splits, splits)

        if warp < 4:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp == 0:
                q_box, k_box, v_box = (
                    (tile.tile_m, self.width_qk),
                    (tile.tile_n, self.width_qk),
                    (self.width_v, tile.tile_n),
                )
                load_forward(
                    pipes,
                    tile_copy(sources.q, s_q, q_box, (work.m_block, 0), work.head, work.batch),
                    tile_copy(sources.k, s_k, k_box, (None, 0), head_kv, work.batch),
                    tile_copy(sources.v, s_v, v_box, (0, None), head_kv, work.batch),
                    tiles,
                    tile.stages,
                )
        else:
            cute.arch.setmaxregister_increase(schedule.mma_registers)
            mma_thread, group = thread - WARPGROUP, warp // 4 - 1
            frags = make_fragments(self.mmas, (s_q, s_k, s_v), group)
            context = MmaContext(
                pipes=pipes,
                frags=frags,
                state=make_row_state(2),
                scale_log2=scale_log2,
                thread=mma_thread,
                turn=turn_of(group, schedule),
                row_start=row_start,
                seqlens=(sizes.seqlen_q, sizes.seqlen_k),
            )
            self.attend(context, tiles)
            finish(frags.o, context.state)
            if cutlass.const_expr(o_partial is not None):
                store_lse(
                    lse[index % splits, None, None, None], context.state, work, mma_thread, tile.tile_m, scale_log2
                )
                partial = o_partial[index % splits, work.batch, work.head, None, None]
                store_partial(frags.o, partial, mma_thread, row_start)
            else:
                if cutlass.const_expr(lse is not None):
                    store_lse(lse, context.state, work, mma_thread, tile.tile_m, scale_log2)
                room = OutputRoom(s_o, sources.o, self.width_v)
                store_output(frags.o, room, work, mma_thread, schedule.mma_threads)

    @cute.jit
    def attend(self, context: MmaContext, tiles: KeyTiles):
        """O and the row state over all key tiles, from the last to the first."""
        pipes, frags = context.pipes, context.frags
        consumer = pipelines.PipelineUserType.Consumer
        k_state = pipelines.make_pipeline_state(consumer, self.tile.stages)
        v_state = pipelines.make_pipeline_state(consumer, self.tile.stages)
        frags.o.fill(0.0)
        grant_first_turn(context.turn, self.schedule)
        if tiles.last > tiles.first:
            pipes.q.consumer_wait(pipelines.make_pipeline_state(consumer, 1))
            wait_full(pipes.k, k_state)
            issue_scores(self.mmas, frags, k_state.index)
            warpgroup.wait_group(0)
            pipes.k.consumer_release(k_state)
            k_state.advance()
            self.probabilities(context, tiles.last - 1, True)
            pack_fragment(frags.s, frags.p_packed, self.dtype)
            masked_end = cutlass.min(tiles.unmasked, tiles.last - 1)
            if cutlass.const_expr(self.causal):  # a full mask hides keys of the last tile only
                for step in cutlass.range(tiles.last - 1 - masked_end, unroll=1):
                    self.step(context, k_state, v_state, tiles.last - 2 - step, True)
                    k_state.advance()
                    v_state.advance()
            for step in cutlass.range(masked_end - tiles.first, unroll=1):
                self.step(context, k_state, v_state, masked_end - 1 - step, False)
                k_state.advance()
                v_state.advance()
            wait_full(pipes.v, v_state)
            issue_output(self.mmas, frags, v_state.index)
            warpgroup.wait_group(0)
            pipes.v.consumer_release(v_state)

    @cute.jit
    def probabilities(self, context: MmaContext, key_tile: Int32, masked: bool):
        scores = context.frags.s
        if cutlass.const_expr(masked):
            key_start = key_tile * self.tile.tile_n
            mask_scores(scores, context.thread, context.row_start, key_start, context.seqlens, self.causal)
        softmax_step(scores, context.state, context.scale_log2, masked)

    @cute.jit
    def step(self, context: MmaContext, k_state, v_state, key_tile: Int32, masked: bool):
        """Scores of `key_tile` and O += P V of the tile before are in flight together; the softmax runs under P V."""
        pipes, frags = context.pipes, context.frags
        wait_full(pipes.k, k_state)
        wait_turn(context.turn, self.schedule)
        issue_scores(self.mmas, frags, k_state.index)
        wait_full(pipes.v, v_state)
        issue_output(self.mmas, frags, v_state.index)
        pass_turn(context.turn, self.schedule)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        self.probabilities(context, key_tile, masked)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        pack_fragment(frags.s, frags.p_packed, self.dtype)
        rescale_output(frags.o, context.state)


class SplitForwardSm90(ForwardSm90):
    """The same kernel for query tiles too few to fill the GPU: several CTAs share one, each with a run of keys."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        o_partial: cute.Tensor,  # (splits, batch, heads_q, seqlen_q, width_v) float32
        lse_partial: cute.Tensor,  # (splits, batch, heads_q, seqlen_q) float32
        stream,
    ):
        self.launch((q, k, v, o), lse_partial, o_partial, scale, stream)
        launch_combine(o_partial, lse_partial, o, lse, stream)
