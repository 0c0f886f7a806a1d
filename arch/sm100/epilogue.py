"""O leaves: tensor memory -> registers -> shared memory -> TMA, a query tile at a time. LSE goes direct."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ..common.numeric import mul_rn, pack_fragment
from ..common.order import WorkTile
from ..common.rowstate import RowState, log_sum_exp
from .load import VECTOR, TmaSource
from .memory import ForwardShape, load_columns
from .pipeline import O_STORED
from .schedule import ROWS, WARPGROUP

COLUMNS = 32  # of O in registers at a time


class OutputRoom(NamedTuple):
    smem: cute.Tensor  # (128, width_v, query_tiles)
    tma: TmaSource  # (seqlen_q, head_dim_v, heads_q, batch)


@cute.jit
def output_to_smem(
    tmem: cute.Pointer,
    room: cute.Tensor,
    shape: cutlass.Constexpr[ForwardShape],
    tile: cutlass.Constexpr[int],
    factor: Float32,
    thread: Int32,
):
    """This thread's row, divided by its sum; room (128, width_v) of the query tile, swizzled."""
    row_to_smem(tmem, (shape.o_column(tile), shape.width_v), room, (factor, None), thread)


@cute.jit
def row_to_smem(
    tmem: cute.Pointer, columns: cutlass.Constexpr[tuple[int, int]], room: cute.Tensor, times: tuple, thread: Int32
):
    """This thread's row of tensor memory, rounded, into room (128, width), swizzled. columns: (first, width); times:
    (what it is multiplied by, whether there is anything: None where there always is, else zeros are stored)."""
    start, width = columns
    factor, seen = times
    values = cute.make_rmem_tensor((COLUMNS,), Float32)
    packed = cute.make_rmem_tensor((COLUMNS // 2,), Int32)
    vectors = cute.make_tensor(
        cute.recast_ptr(packed.iterator, dtype=room.element_type), cute.make_layout((VECTOR, COLUMNS // VECTOR))
    )
    rows = cute.tiled_divide(room, (1, VECTOR))  # ((1, 8), 128, width_v / 8)
    for first in cutlass.range_constexpr(0, width, COLUMNS):
        load_columns(tmem, start + first, values, 0, COLUMNS, thread)
        cute.arch.fence_view_async_tmem_load()
        for c in cutlass.range_constexpr(0, COLUMNS, 2):
            pair = (values[c], values[c + 1])
            values[c], values[c + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))
            if cutlass.const_expr(seen is not None):
                values[c] = Float32(cutlass.select_(seen, values[c], Float32(0.0)))
                values[c + 1] = Float32(cutlass.select_(seen, values[c + 1], Float32(0.0)))
        pack_fragment(values, packed, room.element_type)
        for i in cutlass.range_constexpr(COLUMNS // VECTOR):
            cute.autovec_copy(vectors[None, i], rows[(0, None), thread, first // VECTOR + i])


@cute.jit
def store_partial(
    tmem: cute.Pointer,
    row: cute.Tensor,
    shape: cutlass.Constexpr[ForwardShape],
    factor: Float32,
    seen: tuple[Int32, Boolean],
):
    """row (width_v,) float32 of this thread: O of one split, divided by its sum. seen: (thread, is it a query row?)."""
    thread, real = seen
    values = cute.make_rmem_tensor((COLUMNS,), Float32)
    parts = cute.tiled_divide(row, (COLUMNS,))  # ((32,), width_v / 32)
    for first in cutlass.range_constexpr(0, shape.width_v, COLUMNS):
        load_columns(tmem, shape.o_column(0) + first, values, 0, COLUMNS, thread)
        cute.arch.fence_view_async_tmem_load()
        for c in cutlass.range_constexpr(COLUMNS):
            values[c] = values[c] * factor
        if real:
            cute.autovec_copy(values, parts[(None,), first // COLUMNS])


@cute.jit
def store_output(
    out: OutputRoom, work: WorkTile, tile: cutlass.Constexpr[int], shape: cutlass.Constexpr[ForwardShape], warp: Int32
):
    """One warp issues TMA once all threads have stored. Rows past seqlen_q and columns past head_dim_v are clipped."""
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=O_STORED, number_of_threads=WARPGROUP)
    if warp == 0:
        room = out.smem[None, None, tile]
        rows = cute.local_tile(
            out.tma.tensor[None, None, work.head, work.batch],
            (ROWS, shape.width_v),
            (work.m_block * shape.query_tiles + tile, 0),
        )
        source, target = cpasync.tma_partition(
            out.tma.atom, 0, cute.make_layout(1), cute.group_modes(room, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(out.tma.atom, source, target)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def await_stores(warp: Int32):
    """For the warp that issued them: shared memory has been read, and may be written again, or end."""
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_lse(lse: cute.Tensor, state: RowState, work: WorkTile, row: Int32, scale_log2: Float32):
    """lse (batch, heads_q, seqlen_q). A thread owns its row."""
    rows = lse[work.batch, work.head, None]
    if row < rows.shape[0]:
        rows[row] = log_sum_exp(state.maximum[0], state.total[0], scale_log2)


@cute.jit
def store_state(partial: cute.Tensor, state: RowState, work: WorkTile, row: Int32, scale_log2: Float32):
    """partial (batch, heads_q, seqlen_q, 2) float32, (maximum, total): what common/combine.py wants of a split."""
    rows = partial[work.batch, work.head, None, None]
    if row < rows.shape[0]:
        rows[row, 0] = mul_rn(state.maximum[0], scale_log2)
        rows[row, 1] = state.total[0]
