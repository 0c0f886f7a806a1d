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
DQ_NEXT + j % n      160: the same                  in turn: dQ of job j is there; n = ADDERS * parts, see in_turn_full
TILE_READ + w        256: both warpgroups           the one that is not w has multiplied the P and dS of a tile

dS has two slots and one barrier: who stores dS of tile i + 2 has passed the barrier of tile i + 1, which every
warpgroup enters after its dQ of tile i is done. In turn: warpgroup w makes dQ of the tiles in slot w, waits there for
the other's dS, and stores into that slot again after its own dQ; the other does so after a barrier that w enters later.
Where P passes through shared memory too (backward_wide.py), both have one slot, and TILE_READ guards them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32

from ..schedule import WARPGROUP, Schedule
from .memory import slots_of
from .schedule import ADDERS

DS_STORED, DQ_FULL, DQ_EMPTY, TILE_READ = 1, 3, 5, 7  # ids; each takes up to two
DQ_NEXT = 9  # takes up to six
DQ_THREADS = WARPGROUP + 32


class BackwardPipelines(NamedTuple):
    k: pipelines.PipelineTmaAsync
    v: pipelines.PipelineTmaAsync
    q: pipelines.PipelineTmaAsync
    do: pipelines.PipelineTmaAsync


def open_backward(storage, layouts: NamedTuple, row_values: int, dtype: type, schedule: Schedule) -> BackwardPipelines:
    """layouts: any of memory.py; `row_values`: float32 that come with Q."""

    def ring(name: str, more: int = 0) -> pipelines.PipelineTmaAsync:
        layout = getattr(layouts, name)
        return pipelines.PipelineTmaAsync.create(
            barrier_storage=getattr(storage, f"{name}_barriers").data_ptr(),
            num_stages=slots_of(layout),
            producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread),
            consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, schedule.mma_warps),
            tx_count=cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0))) + more,
            defer_sync=True,
        )

    opened = BackwardPipelines(ring("k"), ring("v"), ring("q", row_values * Float32.width // 8), ring("do"))
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return opened


def backward_states(role: pipelines.PipelineUserType, slots: tuple[int, int]) -> tuple:
    """Where a role stands in K and V, which come and go together, and in the rings of Q and dO with their `slots`."""
    return tuple(pipelines.make_pipeline_state(role, count) for count in (1, *slots))


def row_states(role: pipelines.PipelineUserType, stages: int) -> tuple:
    """Where a role of a CTA that owns query rows stands in Q, dO, K and V."""
    return tuple(pipelines.make_pipeline_state(role, slots) for slots in (1, 1, stages, 1))


def tell_read(group: Int32):
    """To warpgroup `group`, by the other: P and dS of a tile are multiplied."""
    cute.arch.barrier_arrive(barrier_id=TILE_READ + group, number_of_threads=2 * WARPGROUP)


def wait_read(group: Int32):
    """By warpgroup `group`, until the other has said so."""
    cute.arch.barrier(barrier_id=TILE_READ + group, number_of_threads=2 * WARPGROUP)


def in_turn_full(job: Int32, parts: int):
    """The barrier at which an adding warp waits for a part of dQ, its `job` of the CTA. One for each warp and part: the
    warp of another job may be early, and the other warpgroup's part, whose turn comes by itself, late."""
    return DQ_NEXT + job % (ADDERS * parts)


def as_words(values: cute.Tensor) -> cute.Tensor:
    """A fragment of float32 seen as Int32."""
    return cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Int32), cute.make_layout(cute.size(values)))


@cute.jit
def hold(words: cute.Tensor, count: cutlass.Constexpr):
    """A barrier of the warp that needs the first `count` of these registers, so that ptxas leaves what makes them
    before the wait that follows; left to itself it puts the wait first. No more than 32 bits are ever set, so that the
    mask always names all lanes, which the compiler cannot know."""
    joined = words[0]
    for i in cutlass.range_constexpr(1, count):
        joined = joined | words[i]
    cute.arch.inline_ptx(
        "{ .reg .b32 mask; popc.b32 mask, {$r0}; sub.s32 mask, mask, 64; shr.s32 mask, mask, 31; bar.warp.sync mask; }",
        read_only_args=[joined],
    )
