"""WHEN: who waits for whom.

edge   slots   producer -> consumers                     full arrives     empty arrives
ticket 2       load warp -> MMA and adding warps         1                one per warp (queue.py)
K, V   1       load warp (TMA) -> MMA warps              1 + tx bytes     one per MMA warp, under a unit's last tile
Q      stages  load warp (TMA) -> MMA warps              1 + tx bytes     one per MMA warp; the row values travel along
dO     stages  load warp (TMA) -> MMA warps              1 + tx bytes     one per MMA warp

named barrier        threads                        meaning
DS_STORED            all MMA threads                dS of the tile is in shared memory, of all keys
DS_STORED + slot     all MMA threads                the same where one makes all of dQ: the other does not wait
DQ_FULL + p          160: a warpgroup and a warp    part p of dQ is in shared memory
DQ_EMPTY + p         160: the same                  that part has been read

dS has two slots and one barrier: who stores dS of tile i + 2 has passed the barrier of tile i + 1, which every
warpgroup enters after its dQ of tile i is done. In turn: warpgroup w makes dQ of the tiles in slot w, waits there for
the other's dS, and stores into that slot again after its own dQ; the other does so after a barrier that w enters later.
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32

from cute_flash.spec.plan import Tile

from ..schedule import WARPGROUP, Schedule
from .memory import RowLayouts

DS_STORED, DQ_FULL, DQ_EMPTY = 1, 3, 5  # ids; each takes up to two
DQ_THREADS = WARPGROUP + 32


class BackwardPipelines(NamedTuple):
    k: pipelines.PipelineTmaAsync
    v: pipelines.PipelineTmaAsync
    q: pipelines.PipelineTmaAsync
    do: pipelines.PipelineTmaAsync


def tma_pipeline(barriers: cute.Pointer, slots: int, slot_bytes: int, mma_warps: int) -> pipelines.PipelineTmaAsync:
    return pipelines.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=slots,
        producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread),
        consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, mma_warps),
        tx_count=slot_bytes,
        defer_sync=True,
    )


def slot_bytes(layout: cute.ComposedLayout, dtype: type) -> int:
    return cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0)))


def open_backward(storage, layouts, tile: Tile, dtype: type, schedule: Schedule) -> BackwardPipelines:
    """layouts: BackwardLayouts or WideLayouts."""
    row_values = 2 * tile.tile_m * Float32.width // 8
    warps = schedule.mma_warps
    opened = BackwardPipelines(
        k=tma_pipeline(storage.k_barriers.data_ptr(), 1, slot_bytes(layouts.k, dtype), warps),
        v=tma_pipeline(storage.v_barriers.data_ptr(), 1, slot_bytes(layouts.v, dtype), warps),
        q=tma_pipeline(storage.q_barriers.data_ptr(), tile.stages, slot_bytes(layouts.q, dtype) + row_values, warps),
        do=tma_pipeline(storage.do_barriers.data_ptr(), tile.stages, slot_bytes(layouts.do, dtype), warps),
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return opened


def backward_states(role: pipelines.PipelineUserType, stages: int) -> tuple:
    """Where a role stands in K and V, which come and go together, and in the rings of Q and dO."""
    return tuple(pipelines.make_pipeline_state(role, slots) for slots in (1, stages, stages))


class RowPipelines(NamedTuple):
    """Of a CTA that owns query rows: Q and dO stay, K has `stages` slots, V one."""

    q: pipelines.PipelineTmaAsync
    do: pipelines.PipelineTmaAsync
    k: pipelines.PipelineTmaAsync
    v: pipelines.PipelineTmaAsync


def open_rows(storage, layouts: RowLayouts, stages: int, dtype: type, schedule: Schedule) -> RowPipelines:
    warps = schedule.mma_warps
    opened = RowPipelines(
        q=tma_pipeline(storage.q_barriers.data_ptr(), 1, slot_bytes(layouts.q, dtype), warps),
        do=tma_pipeline(storage.do_barriers.data_ptr(), 1, slot_bytes(layouts.do, dtype), warps),
        k=tma_pipeline(storage.k_barriers.data_ptr(), stages, slot_bytes(layouts.k, dtype), warps),
        v=tma_pipeline(storage.v_barriers.data_ptr(), 1, slot_bytes(layouts.v, dtype), warps),
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return opened


def row_states(role: pipelines.PipelineUserType, stages: int) -> tuple:
    """Where a role stands in Q, dO, K and V."""
    return tuple(pipelines.make_pipeline_state(role, slots) for slots in (1, 1, stages, 1))
