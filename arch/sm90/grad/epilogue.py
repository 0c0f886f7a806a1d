"""dQ leaves a tile at a time: registers -> shared memory -> added to global memory by a warp of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.turns import pass_on, wait_for
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


@cute.jit
def add_dq(parts: cute.Tensor, sums: cute.Tensor, group: Int32, order: tuple):
    """One warp: offers the room, waits for a part of dQ and adds it to global memory.

    parts: (elements, parts) in shared memory, sums: the same tile in global memory. `order`: (turns, turn) where
    CTAs add in turn, see common/delta.py, else (None, 0).
    """
    turns, turn = order
    cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
    cute.arch.barrier(barrier_id=DQ_FULL + group, number_of_threads=DQ_THREADS)
    if cutlass.const_expr(turns is not None):
        wait_for(turns, group, turn)
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
    if cutlass.const_expr(turns is not None):
        pass_on(turns, group)
