"""After a backward: dQ leaves the order of its sums (memory.dq_vectors), is scaled and rounded, 8 columns at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.delta import row_tile_of
from ...common.numeric import pack_pair
from ..schedule import ROWS, WARPGROUP
from ..tiles import WIDE_ROWS
from .memory import dq_vectors

VECTOR = 8  # 16-bit values of a 16-byte access
SHARES = 2  # of the columns, a warpgroup of this kernel each
THREADS = SHARES * WARPGROUP


def _store_vector(values: cute.Tensor, packed: cute.Tensor, rows: cute.Tensor, place: tuple, scale: Float32):
    """values (8,) of columns [first, first + 8) of a row; place: (row, first). The caller knows that both exist."""
    for pair in range(VECTOR // 2):
        packed[pair] = pack_pair(values[2 * pair] * scale, values[2 * pair + 1] * scale, rows.element_type)
    source = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=rows.element_type), cute.make_layout(VECTOR))
    target = cute.domain_offset(place, rows).iterator.align(16)
    cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(VECTOR)))


@cute.kernel
def convert_kernel(
    sums: cute.Tensor,  # (128 * width_qk, query tiles, heads_q, batch) float32
    dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32,
    width: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = row_tile_of(sums)
    share, row = thread // WARPGROUP, thread % WARPGROUP
    mine = cute.make_tensor(sums[None, tile, head, batch].iterator.align(16), dq_vectors(width))[None, None, row]
    values = cute.make_rmem_tensor((VECTOR,), Float32)
    packed = cute.make_rmem_tensor((VECTOR // 2,), Int32)
    at, rows = tile * ROWS + row, dq[batch, None, head, None]
    for i in cutlass.range_constexpr(width // (SHARES * VECTOR)):
        vector = share * (width // (SHARES * VECTOR)) + i
        for part in cutlass.range_constexpr(2):
            cute.autovec_copy(mine[None, 2 * vector + part], cute.make_tensor(values.iterator + 4 * part, 4))
        if at < rows.shape[0] and vector * VECTOR < rows.shape[1]:
            _store_vector(values, packed, rows, (at, vector * VECTOR), scale)


@cute.kernel
def convert_transposed_kernel(
    sums: cute.Tensor,  # (tile_m * width_qk, query tiles, heads_q, batch) float32
    dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32,
    shape: cutlass.Constexpr,  # (width_qk, CTAs that multiplied together)
):
    """What a lane has are 64 queries: a thread takes 8 columns of 4 queries.

    Alone, the 128 lanes are columns of dQ, and 128 more follow where it is wider. Of a pair, the parts are the CTAs',
    64 columns each, and the upper 64 lanes have the same columns of the next 64 queries.
    """
    width, ctas = shape
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = row_tile_of(sums)
    rows, parts = dq[batch, None, head, None], cutlass.const_expr(width // ROWS * ctas)
    groups, columns = cutlass.const_expr(ROWS // VECTOR), cutlass.const_expr(ROWS // ctas)
    mine = cute.make_tensor(sums[None, tile, head, batch].iterator.align(16), dq_vectors(WIDE_ROWS * parts))
    loaded = cute.make_rmem_tensor((4, VECTOR), Float32)
    values = cute.make_rmem_tensor((VECTOR,), Float32)
    packed = cute.make_rmem_tensor((VECTOR // 2,), Int32)
    for part in cutlass.range_constexpr(parts):
        lane, four = thread % groups * VECTOR, thread // groups
        for i in cutlass.range_constexpr(VECTOR):
            cute.autovec_copy(mine[None, part * (WIDE_ROWS // 4) + four, lane + i], loaded[None, i])
        column = part * columns + lane % columns
        start = (tile * ctas + lane // columns) * WIDE_ROWS + 4 * four
        for row in cutlass.range_constexpr(4):
            for i in cutlass.range_constexpr(VECTOR):
                values[i] = loaded[row, i]
            if start + row < rows.shape[0] and column < rows.shape[1]:
                _store_vector(values, packed, rows, (start + row, column), scale)
