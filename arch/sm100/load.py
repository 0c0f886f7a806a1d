"""The load role: one warp moves the query tiles, then K and V from the last key tile to the first, through TMA.
Packed query rows come through the softmax threads, each its own.

K and V share one ring, in the order in which the MMA warp asks for them, each in its chunks. Chunks are loops on
purpose: a TMA instruction takes eight uniform registers in a row, and unrolled, several crowd out everything else.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from .memory import ForwardShape
from .pipeline import Barriers, Ring, advanced, arrive_warp, expect_bytes
from .schedule import Run

VECTOR = 8  # 16-bit values of a 16-byte access


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, cols, head, batch): (cols, rows, ...) for V."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class TileCopy(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor  # (box, tiles) or (box, tiles, chunks)
    target: cute.Tensor  # (box, slots)


class LoadContext(NamedTuple):
    """What the load warp needs for one work tile."""

    bars: Barriers
    q: TileCopy | None  # (box, query tiles of the head); None where rows are packed
    k: TileCopy  # (box, key tiles, chunks)
    v: TileCopy  # (box, key tiles x chunks)


def tile_copy(tma: TmaSource, smem: cute.Tensor, parts: cute.Tensor) -> TileCopy:
    """`smem` and `parts` are as the MMA partitions them: three modes of one tile, then slots or tiles."""
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(parts, 0, 3)
    )
    return TileCopy(tma.atom, source, target)


@cute.jit
def _fetch(
    copy: TileCopy,
    source: cute.Tensor,
    bars: Barriers,
    ring: Ring,
    size: cutlass.Constexpr[int],
    ctas: cutlass.Constexpr[int],
):
    full = bars.ring_full + ring.slot
    cute.arch.mbarrier_wait(bars.ring_free + ring.slot, ring.phase ^ 1)
    expect_bytes(full, size, ctas)
    cute.copy(copy.atom, source, copy.target[None, ring.slot], tma_bar_ptr=full)


@cute.jit
def _fetch_query(
    context: LoadContext,
    first: Int32,
    tile: cutlass.Constexpr[int],
    phase: Int32,
    shape: cutlass.Constexpr[ForwardShape],
):
    full = context.bars.q_full + tile
    cute.arch.mbarrier_wait(context.bars.q_free + tile, phase ^ 1)
    expect_bytes(full, shape.tile_bytes[0], shape.ctas)
    cute.copy(context.q.atom, context.q.source[None, first + tile], context.q.target[None, tile], tma_bar_ptr=full)


@cute.jit
def _fetch_keys(context: LoadContext, tile: Int32, ring: Ring, shape: cutlass.Constexpr[ForwardShape]) -> Ring:
    for chunk in cutlass.range(shape.key_chunks, unroll=1):
        _fetch(context.k, context.k.source[None, tile, chunk], context.bars, ring, shape.tile_bytes[1], shape.ctas)
        ring = advanced(ring, shape.tile.stages)
    return ring


@cute.jit
def _fetch_values(context: LoadContext, tile: Int32, ring: Ring, shape: cutlass.Constexpr[ForwardShape]) -> Ring:
    for chunk in cutlass.range(shape.value_chunks, unroll=1):
        source = context.v.source[None, tile * shape.value_chunks + chunk]
        _fetch(context.v, source, context.bars, ring, shape.tile_bytes[2], shape.ctas)
        ring = advanced(ring, shape.tile.stages)
    return ring


@cute.jit
def load_tile(
    context: LoadContext, first: Int32, run: Run, ring: Ring, phase: Int32, shape: cutlass.Constexpr[ForwardShape]
) -> Ring:
    """All that one work tile reads. first: of its query tiles; phase: of the query rooms. One converged warp."""
    last, steps = run.last, run.steps
    if cutlass.const_expr(not shape.packed):
        _fetch_query(context, first, 0, phase, shape)
    if cutlass.const_expr(shape.query_tiles == 2):
        for step in cutlass.range(steps, unroll=1):
            ring = _fetch_keys(context, last - 1 - step, ring, shape)
            if step == 0:
                _fetch_query(context, first, 1, phase, shape)
            ring = _fetch_values(context, last - 1 - step, ring, shape)
    else:  # the MMA warp asks for K a step ahead
        for step in cutlass.range(steps + 1, unroll=1):
            if step < steps:
                ring = _fetch_keys(context, last - 1 - step, ring, shape)
            if step > 0:
                ring = _fetch_values(context, last - step, ring, shape)
    return ring


@cute.jit
def gather_row(row: cute.Tensor, room: cute.Tensor, bars: Barriers, thread: Int32, real: Boolean):
    """row (head_dim,) of Q becomes row `thread` of sQ (128, width_qk), zeros where there is none. For 128 threads."""
    vectors = cute.tiled_divide(room, (1, VECTOR))  # ((1, 8), 128, width_qk / 8)
    values = cute.make_rmem_tensor((VECTOR,), room.element_type)
    for i in cutlass.range_constexpr(cute.size(vectors, mode=[2])):
        values.fill(0.0)
        if real and i * VECTOR < row.shape[0]:
            cute.autovec_copy(cute.make_tensor(row.iterator + i * VECTOR, cute.make_layout(VECTOR)), values)
        cute.autovec_copy(values, vectors[(0, None), thread, i])
    cute.arch.fence_view_async_shared()
    arrive_warp(bars.q_full)
