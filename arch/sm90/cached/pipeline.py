"""WHEN: who waits for whom in a CTA that reads a key-value cache.

edge   slots   producer -> consumers         full arrives     empty arrives
K, V   stages  load warp (TMA) -> MMA warps  1 + tx bytes     one per MMA warp

named barrier   threads   meaning
ZEROED          128       rows of V after the last key are zero
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.pipeline as pipelines

from .memory import CacheLayouts

MMA_WARPS = 4
THREADS = 32 * (MMA_WARPS + 1)
ZEROED = 1  # id; 0 belongs to __syncthreads


class KeyPipelines(NamedTuple):
    k: pipelines.PipelineTmaAsync
    v: pipelines.PipelineTmaAsync


def open_rings(storage, layouts: CacheLayouts, stages: int, dtype: type) -> KeyPipelines:
    def ring(barriers: cute.Pointer, layout: cute.ComposedLayout) -> pipelines.PipelineTmaAsync:
        return pipelines.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=stages,
            producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread),
            consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, MMA_WARPS),
            tx_count=cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0))),
            defer_sync=True,
        )

    opened = KeyPipelines(
        ring(storage.k_barriers.data_ptr(), layouts.k), ring(storage.v_barriers.data_ptr(), layouts.v)
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return opened
