"""Small S = Q K^T kernels, one per architecture: TMA in, one MMA warp(group), results to global memory by every
thread."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import LayoutEnum

from .foreign import fake

M, N, D, STAGES = 128, 128, 64, 2
USER = pipeline.PipelineUserType


def _group(count: int = 1):
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


class HopperTile:
    """Warp 0 loads; warpgroups 1 and 2 compute 64 rows each."""

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, s: cute.Tensor, stream):
        mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (M // 64, 1, 1), (64, N)
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (M, N, D), BFloat16, 1)
        k_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (M, N, D), BFloat16, STAGES)
        q_atom, mQ = cpasync.make_tiled_tma_atom(load, q, cute.slice_(q_layout, (None, None, 0)), (M, D))
        k_atom, mK = cpasync.make_tiled_tma_atom(load, k, cute.slice_(k_layout, (None, None, 0)), (N, D))
        grid = (cute.ceil_div(q.shape[0], M), 1, 1)
        self.kernel(q_atom, mQ, k_atom, mK, s, mma, q_layout, k_layout).launch(
            grid=grid, block=(384, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mQ: cute.Tensor,
        k_atom: cute.CopyAtom,
        mK: cute.Tensor,
        s: cute.Tensor,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sQ = smem.allocate_tensor(BFloat16, q_layout.outer, 1024, q_layout.inner)
        sK = smem.allocate_tensor(BFloat16, k_layout.outer, 1024, k_layout.inner)
        bars = smem.allocate_array(Int64, 2 + 2 * STAGES)
        size_q = cute.size_in_bytes(BFloat16, cute.slice_(q_layout, (None, None, 0)))
        size_k = cute.size_in_bytes(BFloat16, cute.slice_(k_layout, (None, None, 0)))
        pipe_q = pipeline.PipelineTmaAsync.create(
            barrier_storage=bars, num_stages=1, producer_group=_group(), consumer_group=_group(8), tx_count=size_q
        )
        pipe_k = pipeline.PipelineTmaAsync.create(
            barrier_storage=bars + 2,
            num_stages=STAGES,
            producer_group=_group(),
            consumer_group=_group(8),
            tx_count=size_k,
        )
        one = cute.make_layout(1)
        gQ = cute.local_tile(mQ, (M, D), (block, 0))
        gK = cute.local_tile(mK, (N, D), (None, 0))
        tQs, tQg = cpasync.tma_partition(q_atom, 0, one, cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2))
        tKs, tKg = cpasync.tma_partition(k_atom, 0, one, cute.group_modes(sK, 0, 2), cute.group_modes(gK, 0, 2))
        tiles = cute.size(gK, mode=[2])
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                q_state = pipeline.make_pipeline_state(USER.Producer, 1)
                k_state = pipeline.make_pipeline_state(USER.Producer, STAGES)
                pipe_q.producer_acquire(q_state)
                cute.copy(q_atom, tQg, tQs[None, 0], tma_bar_ptr=pipe_q.producer_get_barrier(q_state))
                for j in cutlass.range(tiles, unroll=1):
                    pipe_k.producer_acquire(k_state)
                    cute.copy(
                        k_atom, tKg[None, j], tKs[None, k_state.index], tma_bar_ptr=pipe_k.producer_get_barrier(k_state)
                    )
                    k_state.advance()
        else:
            cute.arch.setmaxregister_increase(240)
            thread = mma.get_slice(tid - 128)
            where = thread.partition_C(cute.make_identity_tensor((M, N)))
            rQ = mma.make_fragment_A(thread.partition_A(sQ))
            rK = mma.make_fragment_B(thread.partition_B(sK))
            acc = cute.make_rmem_tensor(thread.partition_shape_C((M, N)), Float32)
            q_state = pipeline.make_pipeline_state(USER.Consumer, 1)
            k_state = pipeline.make_pipeline_state(USER.Consumer, STAGES)
            pipe_q.consumer_wait(q_state)
            for j in cutlass.range(tiles, unroll=1):
                pipe_k.consumer_wait(k_state)
                mma.set(warpgroup.Field.ACCUMULATE, False)
                warpgroup.fence()
                for kk in cutlass.range_constexpr(cute.size(rQ, mode=[2])):
                    cute.gemm(mma, acc, rQ[None, None, kk, 0], rK[None, None, kk, k_state.index], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                pipe_k.consumer_release(k_state)
                k_state.advance()
                for i in cutlass.range_constexpr(cute.size(acc)):
                    s[block * M + where[i][0], j * N + where[i][1]] = acc[i]


class BlackwellTile:
    """Warps 0 to 3 drain TMEM, warp 4 issues the MMAs, warp 5 loads."""

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, s: cute.Tensor, stream):
        mma = blackwell.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, tcgen05.CtaGroup.ONE, (M, N)
        )
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        q_layout = blackwell.make_smem_layout_a(mma, (M, N, D), BFloat16, 1)
        k_layout = blackwell.make_smem_layout_b(mma, (M, N, D), BFloat16, STAGES)
        q_atom, mQ = cute.nvgpu.make_tiled_tma_atom_A(load, q, cute.select(q_layout, mode=[0, 1, 2]), (M, N, D), mma)
        k_atom, mK = cute.nvgpu.make_tiled_tma_atom_B(load, k, cute.select(k_layout, mode=[0, 1, 2]), (M, N, D), mma)
        grid = (cute.ceil_div(q.shape[0], M), 1, 1)
        self.kernel(q_atom, mQ, k_atom, mK, s, mma, q_layout, k_layout).launch(
            grid=grid, block=(192, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mQ: cute.Tensor,
        k_atom: cute.CopyAtom,
        mK: cute.Tensor,
        s: cute.Tensor,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sQ = smem.allocate_tensor(BFloat16, q_layout.outer, 1024, q_layout.inner)
        sK = smem.allocate_tensor(BFloat16, k_layout.outer, 1024, k_layout.inner)
        bars = smem.allocate_array(Int64, 2 + 2 * STAGES + 4)
        tmem = TmemAllocator(
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=160), allocator_warp_id=0
        )
        size_q = cute.size_in_bytes(BFloat16, cute.select(q_layout, mode=[0, 1, 2]))
        size_k = cute.size_in_bytes(BFloat16, cute.select(k_layout, mode=[0, 1, 2]))
        pipe_q = pipeline.PipelineTmaUmma.create(
            barrier_storage=bars, num_stages=1, producer_group=_group(), consumer_group=_group(), tx_count=size_q
        )
        pipe_k = pipeline.PipelineTmaUmma.create(
            barrier_storage=bars + 2,
            num_stages=STAGES,
            producer_group=_group(),
            consumer_group=_group(),
            tx_count=size_k,
        )
        pipe_s = pipeline.PipelineUmmaAsync.create(
            barrier_storage=bars + 2 + 2 * STAGES, num_stages=2, producer_group=_group(), consumer_group=_group(128)
        )
        thread = mma.get_slice(0)
        tiles = cute.ceil_div(mK.shape[0], N)
        gQ = thread.partition_A(cute.local_tile(mQ, (M, D), (block, 0)))
        gK = thread.partition_B(cute.local_tile(mK, (N, D), (None, 0)))
        rQ, rK = mma.make_fragment_A(sQ), mma.make_fragment_B(sK)
        shape = mma.make_fragment_C(cute.append(mma.partition_shape_C((M, N)), 2))
        one = cute.make_layout(1)
        tQs, tQg = cpasync.tma_partition(q_atom, 0, one, cute.group_modes(sQ, 0, 3), cute.group_modes(gQ, 0, 3))
        tKs, tKg = cpasync.tma_partition(k_atom, 0, one, cute.group_modes(sK, 0, 3), cute.group_modes(gK, 0, 3))
        if warp == 5:
            q_state = pipeline.make_pipeline_state(USER.Producer, 1)
            k_state = pipeline.make_pipeline_state(USER.Producer, STAGES)
            pipe_q.producer_acquire(q_state)
            cute.copy(q_atom, tQg, tQs[None, 0], tma_bar_ptr=pipe_q.producer_get_barrier(q_state))
            for j in cutlass.range(tiles, unroll=1):
                pipe_k.producer_acquire(k_state)
                cute.copy(
                    k_atom, tKg[None, j], tKs[None, k_state.index], tma_bar_ptr=pipe_k.producer_get_barrier(k_state)
                )
                k_state.advance()
            pipe_k.producer_tail(k_state)
        if warp == 4:
            tmem.wait_for_alloc()
            tS = cute.make_tensor(tmem.retrieve_ptr(Float32), shape.layout)
            q_state = pipeline.make_pipeline_state(USER.Consumer, 1)
            k_state = pipeline.make_pipeline_state(USER.Consumer, STAGES)
            s_state = pipeline.make_pipeline_state(USER.Producer, 2)
            pipe_q.consumer_wait(q_state)
            for _ in cutlass.range(tiles, unroll=1):
                pipe_k.consumer_wait(k_state)
                pipe_s.producer_acquire(s_state)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                acc = tS[None, None, None, s_state.index]
                for kk in cutlass.range_constexpr(cute.size(rQ, mode=[2])):
                    cute.gemm(mma, acc, rQ[None, None, kk, 0], rK[None, None, kk, k_state.index], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                pipe_k.consumer_release(k_state)
                pipe_s.producer_commit(s_state)
                k_state.advance()
                s_state.advance()
            pipe_s.producer_tail(s_state)
        if warp < 4:
            tmem.allocate(256)
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            tS = cute.make_tensor(pointer, shape.layout)
            atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
            copy = tcgen05.make_tmem_copy(atom, tS[(None, None), 0, 0, 0])
            mine = copy.get_slice(tid)
            source = mine.partition_S(tS[(None, None), 0, 0, None])
            where = mine.partition_D(cute.make_identity_tensor((M, N)))
            s_state = pipeline.make_pipeline_state(USER.Consumer, 2)
            rS = cute.make_rmem_tensor(where.shape, Float32)
            for j in cutlass.range(tiles, unroll=1):
                pipe_s.consumer_wait(s_state)
                cute.copy(copy, source[None, None, None, s_state.index], rS)
                cute.arch.fence_view_async_tmem_load()
                pipe_s.consumer_release(s_state)
                s_state.advance()
                for i in cutlass.range_constexpr(cute.size(rS)):
                    s[block * M + where[i][0], j * N + where[i][1]] = rS[i]
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=2, number_of_threads=128)
            tmem.free(pointer)


def compile_tile(arch: str, options: str = ""):
    """-> compiled function of (q, k, s)."""
    tile = HopperTile() if arch == "sm_90a" else BlackwellTile()
    args = [fake(BFloat16, 2), fake(BFloat16, 2), fake(Float32, 2), make_fake_stream(use_tvm_ffi_env_stream=True)]
    return cute.compile(tile, *args, options=f"--enable-tvm-ffi {options}")
