"""P and dS on S^T and dP^T fragments: rows are keys, columns queries, and LSE and delta belong to columns.

By rows: on S and dP fragments, whose rows are queries.
"""

from collections.abc import Iterable, Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ...common.delta import value_place, values_together
from ...common.numeric import capped_weights, exp2, pack_fragment, pack_pair
from ..mma import first_column, first_row, rows_view


def by_columns(values: cute.Tensor, thread: Int32, tile_m: int) -> Iterator[tuple[int, Float32]]:
    """(column of the fragment, its value), loaded when asked for. values: (columns,) float32 in shared memory, of a
    tile_m or a part of it, in the order of delta.value_place.
    """
    vector = values_together(tile_m)
    start, columns = (values.iterator + vector // 2 * first_column(thread)).align(4 * vector), cute.size(values)
    mine = cute.make_tensor(start, cute.make_layout((vector, columns // (4 * vector)), stride=(1, 4 * vector)))
    for i in range(columns // (4 * vector)):
        loaded = mine[None, i].load()
        yield from ((vector * i + j, loaded[j]) for j in range(vector))


def probabilities(
    scores: cute.Tensor,
    packed: cute.Tensor,
    lse_log2: Iterable,
    scale_log2: Float32,
    dtype: type,
):
    """Scores become P = exp2(scale * score - LSE), rounded into `packed` as well. lse_log2: see by_columns."""
    view = rows_view(scores)
    for c, lse in lse_log2:
        for r in range(2):
            view[r, c] = exp2(view[r, c] * scale_log2 - lse)
    pack_fragment(scores, packed, dtype)


def exponentials(scores: cute.Tensor, lse_log2: Iterable, scale_log2: Float32):
    """Scores become P, float32. See probabilities."""
    view = rows_view(scores)
    for c, lse in lse_log2:
        for r in range(2):
            view[r, c] = exp2(view[r, c] * scale_log2 - lse)


def weights_and_gradients(weights: cute.Tensor, dp: cute.Tensor, packed: tuple, delta: Iterable, dtype: type):
    """P rounded, dS = P * (dP - delta) rounded, a few columns at a time: what float32 both leave is free at once.

    `packed`: (of P, of dS), Int32; delta: see by_columns.
    """
    (p_packed, ds_packed), run = packed, []
    flat, gradients = (cute.make_tensor(t.iterator, cute.make_layout(cute.size(t))) for t in (weights, dp))
    for c, shift in delta:
        run.append(shift)
        if c % 2 == 1:
            for r in range(2):
                at = 2 * c - 2 + 2 * r  # of the pair's first column
                pair = flat[at], flat[at + 1]
                p_packed[at // 2] = pack_pair(*pair, dtype)
                values = [p * (gradients[at + j] - run[j]) for j, p in enumerate(pair)]
                ds_packed[at // 2] = pack_pair(*values, dtype)
            run = []


def capped_probabilities(
    scores: cute.Tensor,
    packed: cute.Tensor,
    lse_log2: Iterable,
    factors: tuple,
    dtype: type,
):
    """The same under a softcap; `scores` ends as P * (1 - tanh^2), what dP - delta is multiplied with.

    factors: see capped_weights.
    """
    view = rows_view(scores)
    slopes = cute.make_rmem_tensor(scores.layout, Float32)
    by_rows = rows_view(slopes)
    for c, lse in lse_log2:
        for r in range(2):
            view[r, c], by_rows[r, c] = capped_weights(view[r, c], lse, factors)
    pack_fragment(scores, packed, dtype)
    scores.store(slopes.load())


def score_gradients(
    weights: cute.Tensor,
    dp: cute.Tensor,
    packed: cute.Tensor,
    delta: Iterable,
    dtype: type,
):
    """dS = weights * (dP - delta), rounded into `packed`; `weights` is overwritten. delta: see by_columns."""
    view, gradients = rows_view(weights), rows_view(dp)
    for c, shift in delta:
        for r in range(2):
            view[r, c] = view[r, c] * (gradients[r, c] - shift)
    pack_fragment(weights, packed, dtype)


def row_values(values: cute.Tensor, thread: Int32, tile_m: int) -> tuple[list[Float32], list[Float32]]:
    """(LSE in base 2, delta) of a thread's two rows. values: (2 * tile_m,) in shared memory; thread: of a warpgroup."""
    places = [value_place(first_row(thread) + 8 * r, tile_m) for r in range(2)]
    return [values[place] for place in places], [values[tile_m + place] for place in places]


@cute.jit
def weights_by_rows(scores: cute.Tensor, packed: cute.Tensor, lse_log2: list, factors: tuple, dtype: cutlass.Constexpr):
    """Scores become P = exp2(scale * score - LSE), rounded into `packed` as well; under a softcap they end as
    P * (1 - tanh^2). factors: (scale in base 2, None), or see numeric.capped_weights."""
    view, (scale_log2, cap_factor) = rows_view(scores), factors
    columns = cute.size(view, mode=[1])
    if cutlass.const_expr(cap_factor is None):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(columns):
                view[r, c] = exp2(view[r, c] * scale_log2 - lse_log2[r])
        pack_fragment(scores, packed, dtype)
    else:
        slopes = cute.make_rmem_tensor(scores.layout, Float32)
        by_rows = rows_view(slopes)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(columns):
                view[r, c], by_rows[r, c] = capped_weights(view[r, c], lse_log2[r], factors)
        pack_fragment(scores, packed, dtype)
        scores.store(slopes.load())


@cute.jit
def gradients_by_rows(
    weights: cute.Tensor, dp: cute.Tensor, packed: cute.Tensor, delta: list, dtype: cutlass.Constexpr
):
    """dS = weights * (dP - delta), rounded into `packed`; `weights` is overwritten."""
    view, gradients = rows_view(weights), rows_view(dp)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            view[r, c] = view[r, c] * (gradients[r, c] - delta[r])
    pack_fragment(weights, packed, dtype)


def store_packed(
    packed: cute.Tensor, smem: cute.Tensor, mma: cute.TiledMma, shape: tuple[int, int], thread: Int32, transposed: bool
):
    """A packed fragment of the MMA's results of that shape into shared memory, by stmatrix. smem: that shape; its rows
    lie together where it is `transposed`."""
    dtype = smem.element_type
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), dtype)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    layout = cute.make_layout(mma.get_slice(0).partition_shape_C(shape))
    rounded = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=dtype), layout)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(smem))
