"""dQ leaves a tile at a time: registers -> shared memory -> added to global memory by a warp of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.turns import wait_for
from ..schedule import WARPGROUP
from .memory import dq_chunks
from .pipeline import DQ_EMPTY, DQ_THREADS


@cute.jit
def hand_over_dq(dq: cute.Tensor, parts: cute.Tensor, group: Int32, full: Int32, thread: Int32):
    """A warpgroup's accumulators into a part of shared memory, once that has been read.

    parts: (elements, parts), `group`: which; `full`: the barrier at which somebody waits for it.
    """
    cute.arch.barrier(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
    registers = cute.size(dq)
    part = cute.make_tensor(parts[None, group].iterator.align(16), dq_chunks(registers))
    mine = part[None, None, thread % WARPGROUP]  # (4, registers / 4)
    values = cute.make_tensor(dq.iterator, cute.make_layout((4, registers // 4)))
    for chunk in cutlass.range_constexpr(registers // 4):
        cute.autovec_copy(values[None, chunk], mine[None, chunk])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=full, number_of_threads=DQ_THREADS)


def offer_room(group: Int32):
    """By the warp that adds a part of dQ to global memory: the next may be left in shared memory."""
    cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)


@cute.jit
def add_dq(parts: cute.Tensor, sums: cute.Tensor, group: Int32, full: Int32, adds=True):
    """One warp: waits for a part of dQ and adds it to global memory, or stores it there. Its room is free then.

    parts: (elements, parts) in shared memory, sums: the same tile in global memory; `full`: see hand_over_dq.
    """
    cute.arch.barrier(barrier_id=full, number_of_threads=DQ_THREADS)
    size = Int32(cute.size(parts, mode=[0]) * Float32.width // 8)
    places = [sums[None, group].iterator.toint(), parts[None, group].iterator.toint(), size]
    with cute.arch.elect_one():
        if adds:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=places,
            )
        else:
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=places
            )
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def add_dq_in_turn(parts: cute.Tensor, sums: cute.Tensor, group: Int32, full: Int32, now: tuple):
    """The same once it is its turn; who comes first stores. The caller tells the next by pass_on, when it has offered
    the room: the matmuls do not wait for that. `now`: (turns, turn), see common/turns.py."""
    turns, turn = now
    wait_for(turns, group, turn, Int32(-1))
    add_dq(parts, sums, group, full, turn > 0)
