"""Masking of an S^T fragment in registers: keys past the end, after the diagonal, or outside a window around it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.numeric import NEG_INF
from ..mma import first_column, first_row, rows_view

NEVER = 1 << 30  # further than any column of a tile


@cute.jit
def mask_transposed(
    scores: cute.Tensor,
    thread: Int32,
    place: tuple[Int32, Int32],
    seqlens: tuple[Int32, Int32],
    bounds: tuple,
    mask: cutlass.Constexpr,
):
    """Hidden scores become -inf. Rows are keys, columns queries.

    `place`: (row_start, key_start), `bounds`: (left, right). A thread has two keys, each seen by a run of
    queries, so that a column is compared with its ends.
    """
    seqlen_q, seqlen_k = seqlens
    row_start, key_start = place
    left, right = bounds
    view = rows_view(scores)  # (2, tile_m / 4)
    for r in cutlass.range_constexpr(2):
        key = key_start + first_row(thread) + 8 * r
        diagonal = key - (seqlen_k - seqlen_q) - row_start - first_column(thread)  # as compared with constants below
        begin = Int32(-NEVER)
        if cutlass.const_expr(mask.causal):
            begin = diagonal
        elif cutlass.const_expr(mask.right):
            begin = diagonal - right
        if key >= seqlen_k:
            begin = Int32(NEVER)
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            column = 8 * (c // 2) + c % 2
            visible = column >= begin
            if cutlass.const_expr(mask.left):
                visible = visible & (column <= diagonal + left)
            view[r, c] = Float32(cutlass.select_(visible, view[r, c], Float32(NEG_INF)))
