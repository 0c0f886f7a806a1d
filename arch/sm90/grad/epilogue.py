"""dK and dV leave: registers -> shared memory (stmatrix, in the rooms of K and V) -> TMA, each warpgroup its 64 keys.
dQ leaves a tile at a time: registers -> shared memory, where a warp of its own fetches it (sums.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..epilogue import registers_to_smem
from ..mma import first_column, first_row
from ..schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .memory import TmaSource, dq_place
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
def hand_over_dq(dq: cute.Tensor, parts: cute.Tensor, thread: Int32):
    """A warpgroup's accumulators into its part of shared memory, once that has been read.

    parts: (elements, warpgroups).
    """
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    cute.arch.barrier(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
    columns, start = 2 * cute.size(dq), parts[None, group].iterator
    row, column = first_row(thread % WARPGROUP), first_column(thread)
    values = cute.make_tensor(dq.iterator, cute.make_layout((2, 2, columns // 8)))
    for eight in cutlass.range_constexpr(columns // 8):
        place = cute.assume(dq_place(row, eight, columns) + column, divby=2)
        for r in cutlass.range_constexpr(2):
            there = start + place + 8 * r * columns
            cute.autovec_copy(values[None, r, eight], cute.make_tensor(there, cute.make_layout(2)))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=DQ_FULL + group, number_of_threads=DQ_THREADS)
