"""dQ leaves a query tile at a time: tensor memory -> registers -> shared memory -> added to global memory in bulk.
dK and dV leave at the end, a warpgroup each: tensor memory -> registers -> shared memory (rooms of K and V) -> TMA."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...common.turns import pass_on, wait_for
from ..epilogue import row_to_smem
from ..memory import load_columns
from ..pipeline import after_wait, arrive_leader, before_arrive
from ..schedule import ROWS, WARPGROUP
from ..tiles import DQ_SLOTS
from .memory import TmaSource, dq_vectors
from .pipeline import DQ_STORED, LEFT

LOADED = 64  # columns of dQ in registers at a time


@dataclass(frozen=True)
class DqPlace:
    """Where dQ lies in tensor memory, and how much of it leaves at a time."""

    first: int  # column
    columns: int
    chunk: int  # columns
    ctas: int = 1  # that multiply together: the leader is told that dQ has been read


class ReduceContext(NamedTuple):
    bars: tuple  # Barriers, or PairBarriers: of these, dq_full and dq_free
    tmem: cute.Pointer
    s_dq: cute.Tensor  # (128 * chunk, slots) float32
    thread: Int32  # of the warpgroup: the lane of tensor memory


@cute.jit
def _add_chunk(s_dq: cute.Tensor, sums: cute.Tensor, chunk: cutlass.Constexpr[int]):
    """By one warp: a chunk of dQ is added to global memory. s_dq, sums: contiguous; sums: the whole tile."""
    size = cute.size(s_dq)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[
                (sums.iterator + chunk * size).toint(),
                s_dq.iterator.toint(),
                Int32(size * Float32.width // 8),
            ],
        )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _in_turn(warp: Int32, turns: cute.Tensor, part: Int32, turn: Int32):
    if warp == 0:
        wait_for(turns, part, turn)


@cute.jit
def _next_turn(warp: Int32, turns: cute.Tensor, part: Int32):
    if warp == 0:
        pass_on(turns, part)


@cute.jit
def reduce_step(
    context: ReduceContext,
    place: cutlass.Constexpr[DqPlace],
    sums: cute.Tensor,
    step: Int32,
    order: tuple,
):
    """dQ of one query tile. sums: (elements,) of the tile in global memory; `order`: (turns, part, turn) where CTAs add
    in turn, see common/delta.py, else (None, 0, 0).

    A chunk is stored while the one before is read, so two slots and one barrier a chunk do: warp 0 arrives there only
    when nothing is being read any more.
    """
    turns, part_of_dq, turn = order
    thread, columns, step_columns = context.thread, place.columns, place.chunk
    warp = cute.arch.make_warp_uniform(thread // 32)
    values = cute.make_rmem_tensor((LOADED,), Float32)
    vectors = cute.make_tensor(values.iterator, cute.make_layout((4, LOADED // 4)))
    cute.arch.mbarrier_wait(context.bars.dq_full, step % 2)
    after_wait()
    if cutlass.const_expr(turns is not None):
        _in_turn(warp, turns, part_of_dq, turn)
    chunks = cutlass.const_expr(columns // step_columns)
    for chunk in cutlass.range_constexpr(chunks):
        column = cutlass.const_expr(chunk * step_columns)
        if cutlass.const_expr(column % LOADED == 0):
            count = cutlass.const_expr(min(LOADED, columns - column))
            for part in cutlass.range_constexpr(0, count, 32):
                load_columns(context.tmem + place.first, column + part, values, part, 32, thread)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(column + count == columns):
                before_arrive()
                arrive_leader(context.bars.dq_free, place.ctas)
        slot = (step * chunks + chunk) % DQ_SLOTS
        room = cute.make_tensor(context.s_dq[None, slot].iterator.align(16), dq_vectors(step_columns))
        for i in cutlass.range_constexpr(step_columns // 4):
            cute.autovec_copy(vectors[None, column % LOADED // 4 + i], room[None, i, thread])
        cute.arch.fence_view_async_shared()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=DQ_STORED, number_of_threads=WARPGROUP)
        if warp == 0:
            _add_chunk(context.s_dq[None, slot], sums, chunk)
    if cutlass.const_expr(turns is not None):
        _next_turn(warp, turns, part_of_dq)


class GradientRoom(NamedTuple):
    smem: cute.Tensor  # (128, width)
    tma: TmaSource  # (seqlen_k, head_dim, heads_kv, batch)


@cute.jit
def leave(context: tuple, room: GradientRoom, source: tuple, place: tuple, seen: Boolean):
    """A warpgroup's dK or dV, times a factor. context: (tmem, thread of the warpgroup, half); source: (column of tensor
    memory, width, factor); place: (key tile, head, batch); seen: False where no query sees the tile: zeros."""
    tmem, thread, half = context
    column, width, factor = source
    row_to_smem(tmem, (column, width), room.smem, (factor, seen), thread)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=LEFT + half, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        block, head, batch = place
        rows = cute.local_tile(room.tma.tensor[None, None, head, batch], (ROWS, width), (block, 0))
        box, target = cpasync.tma_partition(
            room.tma.atom, 0, cute.make_layout(1), cute.group_modes(room.smem, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(room.tma.atom, box, target)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
