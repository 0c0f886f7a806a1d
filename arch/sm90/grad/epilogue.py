"""dQ leaves a tile at a time: registers -> shared memory -> added to global memory by a warp of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.turns import look, pass_on, wait_for
from ..schedule import WARPGROUP
from .memory import dq_chunks
from .pipeline import DQ_EMPTY, DQ_FULL, DQ_THREADS


@cute.jit
def hand_over_dq(dq: cute.Tensor, parts: cute.Tensor, group: Int32, thread: Int32):
    """A warpgroup's accumulators into a part of shared memory, once that has been read.

    parts: (elements, parts), `group`: which.
    """
    cute.arch.barrier(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
    registers = cute.size(dq)
    part = cute.make_tensor(parts[None, group].iterator.align(16), dq_chunks(registers))
    mine = part[None, None, thread % WARPGROUP]  # (4, registers / 4)
    values = cute.make_tensor(dq.iterator, cute.make_layout((4, registers // 4)))
    for chunk in cutlass.range_constexpr(registers // 4):
        cute.autovec_copy(values[None, chunk], mine[None, chunk])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=DQ_FULL + group, number_of_threads=DQ_THREADS)


def offer_room(group: Int32):
    """By the warp that adds a part of dQ to global memory: the next may be left in shared memory."""
    cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)


@cute.jit
def offer_room_if(wanted, group: Int32):
    if wanted:
        offer_room(group)


@cute.jit
def add_dq(parts: cute.Tensor, sums: cute.Tensor, group: Int32):
    """One warp, which has offered the room: waits for a part of dQ and adds it to global memory.

    parts: (elements, parts) in shared memory, sums: the same tile in global memory.
    """
    cute.arch.barrier(barrier_id=DQ_FULL + group, number_of_threads=DQ_THREADS)
    size = cute.size(parts, mode=[0])
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[
                sums[None, group].iterator.toint(),
                parts[None, group].iterator.toint(),
                Int32(size * Float32.width // 8),
            ],
        )
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def add_dq_in_turn(parts: cute.Tensor, sums: cute.Tensor, group: Int32, now: tuple, after: tuple) -> Int32:
    """The same once it is its turn. The room is offered again, and the next turn looked up, while the addition is on
    its way: the matmuls do not wait for that.

    `now`: (turns, turn, how often it was seen to be added to), see common/turns.py; `after`: (turns of the tile after
    this one, is there one in the unit). -> how often that was added to, -1 if there is none
    """
    turns, turn, seen = now
    turns_after, more = after
    wait_for(turns, group, turn, seen)
    add_dq(parts, sums, group)
    seen = Int32(-1)
    if more:
        offer_room(group)
        seen = look(turns_after, group)
    pass_on(turns, group)
    return seen
