"""WHEN: who waits for whom in a CTA that reads a key-value cache.

edge   slots   producer -> consumers         full arrives     empty arrives
K, V   stages  load warp (TMA) -> MMA warps  1 + tx bytes     one per MMA warp

named barrier   threads   meaning
MMA_THREADS     128       Q, P or zeros of V are in shared memory; or warps have said their maxima
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.pipeline as pipelines

MMA_WARPS = 4
THREADS = 32 * (MMA_WARPS + 1)
MMA_THREADS = 1  # id; 0 belongs to __syncthreads


class KeyPipelines(NamedTuple):
    k: pipelines.PipelineTmaAsync
    v: pipelines.PipelineTmaAsync


def open_rings(storage, layouts: tuple, stages: int, dtype: type) -> KeyPipelines:
    """`layouts`: of K's and V's slots."""

    def ring(barriers: cute.Pointer, layout: cute.ComposedLayout) -> pipelines.PipelineTmaAsync:
        return pipelines.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=stages,
            producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread),
            consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, MMA_WARPS),
            tx_count=cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0))),
            defer_sync=True,
        )

    k, v = layouts
    opened = KeyPipelines(ring(storage.k_barriers.data_ptr(), k), ring(storage.v_barriers.data_ptr(), v))
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return opened


def meet():
    """All MMA threads. What they wrote to shared memory is there for each other."""
    cute.arch.barrier(barrier_id=MMA_THREADS, number_of_threads=32 * MMA_WARPS)


def hand_to_wgmma():
    """All MMA threads. What they wrote to shared memory is there for wgmma."""
    cute.arch.fence_view_async_shared()
    meet()
