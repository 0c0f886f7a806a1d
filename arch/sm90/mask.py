"""Masking of a score fragment in registers: keys past the end, and keys after the diagonal."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.numeric import NEG_INF
from .mma import first_column, first_row, rows_view


@cute.jit
def mask_scores(
    scores: cute.Tensor,
    thread: Int32,
    row_start: Int32,
    key_start: Int32,
    seqlens: tuple[Int32, Int32],
    causal: cutlass.Constexpr[bool],
):
    """Hidden scores become -inf. row_start, key_start: where the tile stands in (seqlen_q, seqlen_k)."""
    seqlen_q, seqlen_k = seqlens
    view = rows_view(scores)  # (2, tile_n / 4)
    column = key_start + first_column(thread)
    for r in cutlass.range_constexpr(2):
        limit = seqlen_k
        if cutlass.const_expr(causal):
            row = row_start + first_row(thread) + 8 * r
            limit = cutlass.min(seqlen_k, row + 1 + seqlen_k - seqlen_q)
        visible = limit - column  # compared with constants below
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            # not Python's x if y else z, whose tracing takes many times as long
            view[r, c] = Float32(cutlass.select_(8 * (c // 2) + c % 2 < visible, view[r, c], Float32(NEG_INF)))
