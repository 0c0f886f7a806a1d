"""WHEN: who waits for whom.

edge   slots   producer -> consumers                     full arrives     empty arrives
Q      1 or 2  load warp (TMA) -> MMA warps              1 + tx bytes     one per MMA warp
K, V   stages  load warp (TMA) -> MMA warps              1 + tx bytes     one per MMA warp
ticket 2       load warp -> MMA threads (queue.py)       32 lanes         one per MMA thread

named barrier        threads                     meaning
TURN + w             256: warpgroups w-1 and w   warpgroup w may issue its matmuls (ping-pong)
O_STORED + w         128: warpgroup w            O of the warpgroup is in shared memory
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32

from .memory import ForwardLayouts
from .schedule import WARPGROUP, Schedule

TURN, O_STORED = 1, 5  # ids; 0 belongs to __syncthreads, these take up to four


class ForwardPipelines(NamedTuple):
    q: pipelines.PipelineTmaAsync
    k: pipelines.PipelineTmaAsync
    v: pipelines.PipelineTmaAsync


def _tma_pipeline(barriers: cute.Pointer, stages: int, layout: cute.ComposedLayout, dtype: type, mma_warps: int):
    slot_bytes = cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0)))
    return pipelines.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread),
        consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, mma_warps),
        tx_count=slot_bytes,
        defer_sync=True,
    )


def open_forward(
    storage, layouts: ForwardLayouts, slots: tuple[int, int], dtype: type, schedule: Schedule
) -> ForwardPipelines:
    """`slots`: of Q; of K and of V."""
    q_slots, stages = slots
    warps = schedule.mma_warps
    opened = ForwardPipelines(
        q=_tma_pipeline(storage.q_barriers.data_ptr(), q_slots, layouts.q, dtype, warps),
        k=_tma_pipeline(storage.k_barriers.data_ptr(), stages, layouts.k, dtype, warps),
        v=_tma_pipeline(storage.v_barriers.data_ptr(), stages, layouts.v, dtype, warps),
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return opened


def forward_states(role: pipelines.PipelineUserType, q_slots: int, stages: int) -> tuple:
    """Where a role stands in the rings of Q, K and V."""
    return tuple(pipelines.make_pipeline_state(role, slots) for slots in (q_slots, stages, stages))


def wait_full(pipe: pipelines.PipelineTmaAsync, state: pipelines.PipelineState):
    """A first try before the loop that suspends: 1 to 2% of the forward, where the data is mostly there already."""
    pipe.consumer_wait(state, pipe.consumer_try_wait(state))


class Turn(NamedTuple):
    """Named barriers of a warpgroup's turn at the tensor cores."""

    mine: Int32
    following: Int32  # of the warpgroup that goes next


@cute.jit
def turn_of(group: Int32, schedule: cutlass.Constexpr) -> Turn:
    following = Int32(TURN) if group == schedule.mma_warpgroups - 1 else TURN + 1 + group
    return Turn(TURN + group, following)


@cute.jit
def grant_first_turn(turn: Turn, schedule: cutlass.Constexpr):
    """The last warpgroup opens the round: warpgroup 0 may go."""
    if cutlass.const_expr(schedule.ping_pong):
        first = turn.following
        if first == TURN:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)


@cute.jit
def wait_turn(turn: Turn, schedule: cutlass.Constexpr):
    if cutlass.const_expr(schedule.ping_pong):
        cute.arch.barrier(barrier_id=turn.mine, number_of_threads=2 * WARPGROUP)


@cute.jit
def pass_turn(turn: Turn, schedule: cutlass.Constexpr):
    if cutlass.const_expr(schedule.ping_pong):
        cute.arch.barrier_arrive(barrier_id=turn.following, number_of_threads=2 * WARPGROUP)
