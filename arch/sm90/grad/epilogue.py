"""dK and dV leave: registers -> shared memory (stmatrix, in the rooms of K and V) -> TMA, each warpgroup its 64 keys.
dQ leaves a tile at a time: registers -> shared memory -> added to global memory by a warp of its own."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ..epilogue import registers_to_smem
from ..schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .memory import TmaSource, dq_chunks
from .pipeline import DQ_EMPTY, DQ_FULL, DQ_THREADS, STORED


class GradientRoom(NamedTuple):
    smem: cute.Tensor  # (64, width, warpgroups)
    tma: TmaSource  # (seqlen_k, head_dim, heads_kv, batch)


@cute.jit
def store_rows(acc: cute.Tensor, room: GradientRoom, place: tuple, thread: Int32, width: cutlass.Constexpr[int]):
    """A warpgroup's 64 keys of dK or dV, all columns; `place`: (64-row block, head, batch)."""
    block, head, batch = place
    _store(acc, room, (block, 0), (head, batch), (thread, width))


@cute.jit
def store_columns(acc: cute.Tensor, room: GradientRoom, place: tuple, thread: Int32, width: cutlass.Constexpr[int]):
    """A warpgroup's columns of dK or dV, 64 keys; `place` as above."""
    block, head, batch = place
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    _store(acc, room, (block, group), (head, batch), (thread, width))


def _store(acc: cute.Tensor, room: GradientRoom, tile: tuple, where: tuple, writer: tuple):
    """Rows and columns past the end are clipped by TMA. The store is left in flight."""
    thread, width = writer
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    mine = room.smem[None, None, group]
    registers_to_smem(acc, mine, thread, width, room.smem.element_type)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=STORED + group, number_of_threads=WARPGROUP)
    head, batch = where
    rows = cute.local_tile(room.tma.tensor[None, None, head, batch], (ROWS_PER_WARPGROUP, width), tile)
    _issue_store(room, mine, rows, thread)


@cute.jit
def _issue_store(room: GradientRoom, mine: cute.Tensor, rows: cute.Tensor, thread: Int32):
    if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
        source, target = cpasync.tma_partition(
            room.tma.atom, 0, cute.make_layout(1), cute.group_modes(mine, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(room.tma.atom, source, target)
        cute.arch.cp_async_bulk_commit_group()


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
def _wait_for(turns: cute.Tensor, group: Int32, turn: Int32):
    """Until a part of dQ was added to `turn` times. CTAs of lower index come first: they have started before."""
    address = (turns.iterator + group).toint()
    seen = Int32(-1)
    while seen != turn:
        seen = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
        )
    cute.arch.inline_ptx("fence.proxy.async.global;")


@cute.jit
def _pass_on(turns: cute.Tensor, group: Int32):
    """The addition is complete, not only read from shared memory."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.inline_ptx("fence.proxy.async.global;")
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[(turns.iterator + group).toint()]
        )


@cute.jit
def add_dq(parts: cute.Tensor, sums: cute.Tensor, group: Int32, order: tuple):
    """One warp: offers the room, waits for a part of dQ and adds it to global memory.

    parts: (elements, warpgroups) in shared memory, sums: the same tile in global memory. `order`: (turns, turn) where
    CTAs add in turn, see common/delta.py, else (None, 0).
    """
    turns, turn = order
    cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
    cute.arch.barrier(barrier_id=DQ_FULL + group, number_of_threads=DQ_THREADS)
    if cutlass.const_expr(turns is not None):
        _wait_for(turns, group, turn)
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
        _pass_on(turns, group)
