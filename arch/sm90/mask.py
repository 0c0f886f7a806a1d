"""Masking of a score fragment in registers: keys past the end, after the diagonal, or outside a window around it."""

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
            view[r, c] = view[r, c] if 8 * (c // 2) + c % 2 < visible else Float32(NEG_INF)


@cute.jit
def mask_window(
    scores: cute.Tensor,
    thread: Int32,
    place: tuple[Int32, Int32],
    seqlens: tuple[Int32, Int32],
    bounds: tuple,
    mask: cutlass.Constexpr,
):
    """The same under a windowed mask; `place`: (row_start, key_start), `bounds`: (left, right)."""
    seqlen_q, seqlen_k = seqlens
    row_start, key_start = place
    left, right = bounds
    view = rows_view(scores)  # (2, tile_n / 4)
    column = key_start + first_column(thread)
    for r in cutlass.range_constexpr(2):
        diagonal = row_start + first_row(thread) + 8 * r + seqlen_k - seqlen_q
        limit = seqlen_k
        if cutlass.const_expr(mask.right):
            limit = cutlass.min(limit, diagonal + (1 if cutlass.const_expr(mask.causal) else right + 1))
        visible = limit - column
        if cutlass.const_expr(mask.left):
            hidden = diagonal - left - column
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            place_in_tile = 8 * (c // 2) + c % 2
            value = view[r, c] if place_in_tile < visible else Float32(NEG_INF)
            if cutlass.const_expr(mask.left):
                value = value if place_in_tile >= hidden else Float32(NEG_INF)
            view[r, c] = value
