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
            # not Python's x if y else z, whose tracing takes many times as long
            view[r, c] = Float32(cutlass.select_(8 * (c // 2) + c % 2 < visible, view[r, c], Float32(NEG_INF)))


@cute.jit
def mask_window(
    scores: cute.Tensor,
    thread: Int32,
    place: tuple[Int32, Int32],
    seqlens: tuple[Int32, Int32],
    bounds: tuple,
    mask: cutlass.Constexpr,
    tile: cutlass.Constexpr,
):
    """The same under a windowed mask; `place`: (row_start, key_start), `bounds`: (left, right).

    Most masked tiles are cut by one bound only, so each is a pass of its own behind a branch that all threads share.
    """
    seqlen_q, seqlen_k = seqlens
    row_start, key_start = place
    left, right = bounds
    view = rows_view(scores)  # (2, tile_n / 4)
    column = key_start + first_column(thread)
    first_diagonal = row_start + seqlen_k - seqlen_q  # of the tile's first row
    diagonal = first_diagonal + first_row(thread)
    reach = Int32(1)  # keys from the diagonal on that a row sees
    if cutlass.const_expr(mask.right and not mask.causal):
        reach = right + 1
    limit = seqlen_k
    if cutlass.const_expr(mask.right):
        limit = cutlass.min(limit, first_diagonal + reach)
    if key_start + tile.tile_n > limit:
        for r in cutlass.range_constexpr(2):
            visible = seqlen_k - column
            if cutlass.const_expr(mask.right):
                visible = cutlass.min(visible, diagonal + 8 * r + reach - column)
            _keep(view, r, lambda offset, end: offset < end, visible)
    if cutlass.const_expr(mask.left):
        hidden = diagonal - left - column
        if key_start < first_diagonal + tile.tile_m - 1 - left:
            for r in cutlass.range_constexpr(2):
                _keep(view, r, lambda offset, end: offset >= end, hidden + 8 * r)


def _keep(view: cute.Tensor, row: int, where, end: Int32):
    """Scores of a row stay where `where(offset from the thread's first column, end)`."""
    for c in range(cute.size(view, mode=[1])):
        view[row, c] = Float32(cutlass.select_(where(8 * (c // 2) + c % 2, end), view[row, c], Float32(NEG_INF)))
