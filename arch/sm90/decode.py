"""Few query rows over a key-value cache on Hopper, dense or paged: Flash-Decoding with the rows of a group in one tile.

A CTA takes a tile of query rows and a share of the keys: a warp feeds a K/V ring by TMA, one warpgroup multiplies. Two
CTAs share an SM where their rings fit. Where keys are shared out, a second kernel merges (cached/merge.py).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_flash.spec.plan import Plan

from ..common.numeric import LOG2_E
from .cached.append import launch_append
from .cached.epilogue import store_lse, store_rows, store_share
from .cached.load import Loads, Pages, box_copy, boxes_of, load_dense, load_paged, open_pages, policy_of
from .cached.memory import CacheLayouts, box_layout, cache_layouts, cache_storage
from .cached.merge import launch_merge
from .cached.operands import compile_cache
from .cached.pipeline import MMA_WARPS, THREADS, open_rings
from .cached.shares import CacheSizes, Place, Share, Shares, columns_of, lane_length, partials_of, sizes_of, slice_of
from .cached.tiles import SMEM_OF_TWO, ctas_asked
from .cached.walk import Room, Walk, WalkContext, first_key, output_view
from .load import TmaSource


class CacheSources(NamedTuple):
    """What the kernel reads through TMA."""

    k: TmaSource  # (length or page_size, head_dim, heads_kv, cache rows or pages)
    v: TmaSource  # (head_dim_v, length or page_size, heads_kv, cache rows or pages)


class DecodeSm90:
    """One Plan's kernels. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile, self.dtype, self.softcap, self.page_size = plan.tile, dtype, plan.softcap, plan.page_size
        self.width_qk, self.width_v = plan.head_dim, plan.head_dim_v
        self.appends, self.ctas_asked = plan.appends, ctas_asked(plan.tile)
        self.boxes = boxes_of(plan.page_size, plan.tile.tile_n)
        self.shares, self.walk = Shares(plan), Walk(plan, dtype)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (cache rows, length, heads_kv, head_dim) or (pages, page_size, heads_kv, head_dim)
        v: cute.Tensor,
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor | None,  # (batch, heads_q, seqlen_q)
        cache_seqlens: cute.Tensor,  # (batch,) Int32
        page_table: cute.Tensor | None,  # (batch, pages a row) Int32
        cache_batch_idx: cute.Tensor | None,  # (batch,) Int32
        k_new: cute.Tensor | None,  # (batch, new keys, heads_kv, head_dim)
        v_new: cute.Tensor | None,
        splits: Int32,
        split_keys: Int32,
        scale: Float32,
        memory: cute.Tensor,  # scratch, float32; nothing where splits is 1
        stream,
    ):
        tables = cache_seqlens, page_table, cache_batch_idx
        numbers = splits, split_keys, (scale, None, None, None)
        self.launch((q, k, v, out, lse), tables, (k_new, v_new), numbers, memory, stream)

    @cute.jit
    def launch(self, tensors: tuple, tables: tuple, new: tuple, numbers: tuple, memory: cute.Tensor, stream):
        """`numbers`: (splits, split_keys, (scale, left, right, softcap)), the last three None in a plain Plan."""
        q, k, v, out, lse = tensors
        splits, split_keys, (scale, left, right, softcap) = numbers
        layouts = cache_layouts(self.tile, self.width_qk, self.width_v, self.dtype)
        load, keys = cpasync.CopyBulkTensorTileG2SOp(), self.boxes.rows

        def source(tensor, modes, layout, box):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
            return TmaSource(*cpasync.make_tiled_tma_atom(load, view, box_layout(layout, box), box))

        sources = CacheSources(
            k=source(k, [1, 3, 2, 0], layouts.k, (keys, self.width_qk)),
            v=source(v, [3, 1, 2, 0], layouts.v, (self.width_v, keys)),
        )
        capacity = k.shape[1]
        if cutlass.const_expr(self.page_size > 0):
            capacity = self.page_size * tables[1].shape[1]
        sizes = sizes_of(
            q,
            k,
            self.tile.tile_m,
            capacity=capacity,
            appended=new[0].shape[1] if cutlass.const_expr(self.appends) else Int32(0),
            splits=splits,
            split_keys=split_keys,
            policy=policy_of(Int64(q.shape[0]) * capacity * k.shape[2] * (2 * (k.shape[3] + v.shape[3]))),
            left=left,
            right=right,
        )
        if cutlass.const_expr(self.appends):
            launch_append(new, (k, v), tables, sizes, self.page_size, stream)
        scale_log2, cap_factor = scale * LOG2_E, None
        if cutlass.const_expr(self.softcap):
            scale_log2, cap_factor = softcap * LOG2_E, 2.0 * scale_log2 / softcap
        results, factors = (out, lse, memory), (scale_log2, cap_factor)
        how = {
            "block": (THREADS, 1, 1),
            "stream": stream,
            "use_pdl": self.appends,
            "min_blocks_per_mp": self.ctas_asked,
        }
        if sizes.split_keys < 0:
            if cutlass.const_expr(self.shares.groups):
                storage = cache_storage(layouts, self.tile, self.dtype)
                self.grouped_kernel(sources, q, tables, results, factors, sizes, layouts).launch(
                    grid=(self.shares.count_grouped(sizes), 1, 1),
                    smem=max(storage.size_in_bytes(), SMEM_OF_TWO + 1),  # one an SM: see there
                    **how,
                )
                partials = partials_of(memory, sizes, self.width_v, grouped=True)
                launch_merge(partials, out, lse, tables[0], sizes, (self.width_v, self.tile.tile_n), stream)
        else:
            self.kernel(sources, q, tables, results, factors, sizes, layouts).launch(
                grid=(self.shares.count(sizes), 1, 1), **how
            )
            if splits > 1:
                partials = partials_of(memory, sizes, self.width_v)
                launch_merge(partials, out, lse, tables[0], sizes, (self.width_v, 0), stream)

    @cute.kernel
    def kernel(
        self,
        sources: CacheSources,
        q: cute.Tensor,
        tables: tuple,
        results: tuple,  # (out, lse, memory)
        factors: tuple,  # (scale_log2, cap_factor)
        sizes: CacheSizes,
        layouts: CacheLayouts,
    ):
        """A merge may start at once, and waits by itself."""
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = self.shares.place(cute.arch.block_idx()[0], sizes)
        length = tables[0][place.batch]  # on its way until share() looks at it
        if warp == MMA_WARPS:
            for source in (sources.k, sources.v):
                cpasync.prefetch_descriptor(source.atom)
        run, known = self.first_pages(tables[1], place, sizes)  # on their way while barriers are made
        pipes, smem, room = self.open(layouts)
        if cutlass.const_expr(self.appends):
            cute.arch.griddepcontrol_wait()
        if warp == MMA_WARPS:
            self.load_role(pipes, sources, smem[2:], tables, (place, length, run, known), sizes)
        else:
            frags = self.walk.open(*smem)
            self.walk.read_q(q, room.q, place, sizes, thread)
            share = self.shares.share(place, length, sizes)
            self.mma_role((pipes, frags, room), results, factors, share, sizes, (thread, *self.walk.rings()))

    @cute.kernel
    def grouped_kernel(
        self,
        sources: CacheSources,
        q: cute.Tensor,
        tables: tuple,
        results: tuple,
        factors: tuple,
        sizes: CacheSizes,
        layouts: CacheLayouts,
    ):
        """As kernel(), of what a group has of the rows of the batch: one after the other, through one ring."""
        given = lane_length(Int32(0), tables[0], sizes)  # on their way while barriers are made
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == MMA_WARPS:
            for source in (sources.k, sources.v):
                cpasync.prefetch_descriptor(source.atom)
        pipes, smem, room = self.open(layouts)
        place = self.shares.group_place(cute.arch.block_idx()[0], sizes)
        part = slice_of(place.split, given, tables[0], sizes, self.tile.tile_n)
        if cutlass.const_expr(self.appends):
            cute.arch.griddepcontrol_wait()
        if warp == MMA_WARPS:
            self.load_rows(pipes, sources, smem[2:], tables, (place, part), sizes)
        else:
            frags = self.walk.open(*smem)
            k_ring, v_ring = self.walk.rings()
            for number in cutlass.range(0, part.rows, unroll=1):
                share, part = self.shares.segment(place, part, number, tables[0], sizes)
                self.walk.read_q(q, room.q, share, sizes, thread)
                k_ring, v_ring = self.mma_role(
                    (pipes, frags, room), results, factors, share, sizes, (thread, k_ring, v_ring), True
                )

    def open(self, layouts: CacheLayouts) -> tuple:
        """(rings of K and V, (sQ, sP, sK, sV), what MMA threads share)"""
        storage = SmemAllocator().allocate(cache_storage(layouts, self.tile, self.dtype))
        smem = tuple(
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip((storage.q, storage.p, storage.k, storage.v), layouts, strict=True)
        )
        stats = storage.stats.get_tensor(cute.make_layout((self.tile.tile_m, MMA_WARPS)))
        pipes = open_rings(storage, (layouts.k, layouts.v), self.tile.stages, self.dtype)
        return pipes, smem, Room(smem[0][None, None, 0], smem[1][None, None, 0], stats, smem[3])

    def _pages(self, page_table: cute.Tensor, place: Place, sizes: CacheSizes) -> Pages:
        return Pages(page_table[place.batch, None], sizes.cache_rows)

    def first_pages(self, page_table: cute.Tensor | None, place: Place, sizes: CacheSizes) -> tuple:
        """(run, page numbers) of a share whose first tile is known before the length is; else None for what is not."""
        if not self.shares.early:
            return None, None
        run = self.shares.run(place, Int32(0), sizes)
        return run, open_pages(self._pages(page_table, place, sizes), run, self.boxes) if self.page_size else None

    @cute.jit
    def load_role(self, pipes: tuple, sources: CacheSources, smem: tuple, tables: tuple, at: tuple, sizes: CacheSizes):
        """`at`: (place, length, *first_pages()). What can be is loaded before the length, itself read from memory, is
        there."""
        _, page_table, batch_idx = tables
        place, length, run, known = at
        early, loads = self.shares.early, self.loads(sources, smem, place.head, sizes)
        state = pipelines.make_pipeline_state(pipelines.PipelineUserType.Producer, self.tile.stages)
        count = Int32(0)
        if cutlass.const_expr(not early):
            share = self.shares.share(place, length, sizes)
            run, count = share.run, share.count
        if cutlass.const_expr(self.page_size > 0):
            pages = self._pages(page_table, place, sizes)
            if cutlass.const_expr(not early):
                known = open_pages(pages, run, self.boxes)
            if cutlass.const_expr(early):
                state, known = load_paged(pipes, loads, run, (0, 1), pages, known, self.boxes, state)
                count = self.shares.share(place, length, sizes).count
            load_paged(pipes, loads, run, (int(early), count), pages, known, self.boxes, state)
        else:
            row = self.cache_row(batch_idx, place.batch, sizes)
            if cutlass.const_expr(early):
                state = load_dense(pipes, loads, run, (0, 1), row, state)
                count = self.shares.share(place, length, sizes).count
            load_dense(pipes, loads, run, (int(early), count), row, state)

    def loads(self, sources: CacheSources, smem: tuple, head: Int32, sizes: CacheSizes) -> Loads:
        keys = self.boxes.rows
        return Loads(
            box_copy(sources.k, smem[0], (keys, self.width_qk), head, True),
            box_copy(sources.v, smem[1], (self.width_v, keys), head, False),
            sizes.policy,
        )

    def cache_row(self, batch_idx: cute.Tensor | None, batch: Int32, sizes: CacheSizes) -> Int32:
        if batch_idx is None:
            return batch
        return cutlass.min(cutlass.max(batch_idx[batch], 0), sizes.cache_rows - 1)

    @cute.jit
    def load_rows(self, pipes: tuple, sources: CacheSources, smem: tuple, tables: tuple, at: tuple, sizes: CacheSizes):
        """`at`: (place of the group, what it has)."""
        seqlens, page_table, batch_idx = tables
        place, part = at
        loads = self.loads(sources, smem, place.head, sizes)
        state = pipelines.make_pipeline_state(pipelines.PipelineUserType.Producer, self.tile.stages)
        for number in cutlass.range(0, part.rows, unroll=1):
            share, part = self.shares.segment(place, part, number, seqlens, sizes)
            if cutlass.const_expr(self.page_size > 0):
                pages = self._pages(page_table, share, sizes)
                known = open_pages(pages, share.run, self.boxes)
                state, _ = load_paged(pipes, loads, share.run, (0, share.count), pages, known, self.boxes, state)
            else:
                row = self.cache_row(batch_idx, share.batch, sizes)
                state = load_dense(pipes, loads, share.run, (0, share.count), row, state)

    @cute.jit
    def mma_role(
        self,
        opened: tuple,  # (pipes, frags, room)
        results: tuple,
        factors: tuple,
        share: Share,
        sizes: CacheSizes,
        at: tuple,  # (thread, rings of K and V)
        grouped: cutlass.Constexpr[bool] = False,
    ):
        """-> the rings moved on"""
        out, lse, memory = results
        pipes, frags, room = opened
        thread, k_ring, v_ring = at
        columns, state = columns_of(share, sizes, thread, self.tile.tile_m), self.walk.state()
        context = WalkContext(
            pipes=pipes,
            frags=frags,
            room=room,
            state=state,
            scale_log2=factors[0],
            cap_factor=factors[1],
            thread=thread,
            limits=self.walk.limits(share, columns, sizes),
        )
        early = self.shares.early and not grouped
        k_ring, v_ring = self.walk.run(context, share, early, k_ring, v_ring)
        view, first, writes = output_view(frags.o), first_key(thread), Int32(thread < 4)
        alone = share.split < 0 if cutlass.const_expr(grouped) else sizes.splits == 1
        if alone:
            store_rows(view, out, share, columns, first)
            if cutlass.const_expr(lse is not None):
                store_lse(lse, state, share, columns, writes, factors[0])
        else:
            partials = partials_of(memory, sizes, self.width_v, grouped)
            slot = share._replace(batch=Int32(0)) if cutlass.const_expr(grouped) else share
            store_share(view, partials, state, slot, columns, sizes, (first, writes), factors[0])
        return k_ring, v_ring


class BoundedDecodeSm90(DecodeSm90):
    """For Plans that are not plain: a window's bounds and a softcap arrive beside the scale."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        cache_seqlens: cute.Tensor,
        page_table: cute.Tensor | None,
        cache_batch_idx: cute.Tensor | None,
        k_new: cute.Tensor | None,
        v_new: cute.Tensor | None,
        splits: Int32,
        split_keys: Int32,
        scale: Float32,
        left: Int32,
        right: Int32,
        softcap: Float32,
        memory: cute.Tensor,
        stream,
    ):
        tables = cache_seqlens, page_table, cache_batch_idx
        numbers = splits, split_keys, (scale, left, right, softcap)
        self.launch((q, k, v, out, lse), tables, (k_new, v_new), numbers, memory, stream)


def compile_decode(plan: Plan, dtype: type, options: str = ""):
    kernel = DecodeSm90 if plan.plain else BoundedDecodeSm90
    return compile_cache(kernel(plan, dtype), plan, options)
