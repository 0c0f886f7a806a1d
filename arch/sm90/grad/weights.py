"""P and dS on S^T and dP^T fragments. Rows are keys, columns queries: LSE and delta belong to columns."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.numeric import NEG_INF, exp2, pack_fragment
from ..mma import first_column, rows_view


def _column_pairs(values: cute.Tensor, thread: Int32, tile_m: int) -> list:
    """values: (tile_m,) float32 in shared memory -> what this thread's columns need, in order; 8-byte loads."""
    mine = cute.make_tensor(
        (values.iterator + first_column(thread)).align(8), cute.make_layout((2, tile_m // 8), stride=(1, 8))
    )
    pairs = [mine[None, j].load() for j in range(tile_m // 8)]
    return [pair[i] for pair in pairs for i in range(2)]


@cute.jit
def probabilities(
    scores: cute.Tensor,
    packed: cute.Tensor,
    lse_log2: cute.Tensor,
    thread: Int32,
    scale_log2: Float32,
    dtype: cutlass.Constexpr,
):
    """Scores become P = exp2(scale * score - LSE), rounded into `packed` as well. lse_log2: (tile_m,)."""
    view = rows_view(scores)  # (2, tile_m / 4)
    lse = _column_pairs(lse_log2, thread, cute.size(lse_log2))
    for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
        for r in cutlass.range_constexpr(2):
            view[r, c] = exp2(view[r, c] * scale_log2 - lse[c])
    pack_fragment(scores, packed, dtype)


def capped_weights(score: Float32, lse_log2: Float32, factors: tuple) -> tuple[Float32, Float32]:
    """(P, P * (1 - tanh^2)) of a raw score. factors: (softcap * log2(e), 2 * scale * log2(e) / softcap).

    With e = exp(2 x) and r = 1 / (1 + e), tanh(x) is 1 - 2 r, and 1 - tanh(x)^2 is 4 r (e r), which does not cancel
    where e is small or large.
    """
    scale_log2, cap_factor = factors
    e = exp2(cutlass.min(score * cap_factor, Float32(126.0)))
    inverse = cute.arch.rcp_approx(1.0 + e)
    p = exp2((1.0 - 2.0 * inverse) * scale_log2 - lse_log2)
    p = Float32(cutlass.select_(score == NEG_INF, Float32(0.0), p))  # hidden
    return p, p * (4.0 * inverse * (e * inverse))


@cute.jit
def capped_probabilities(
    scores: cute.Tensor,
    packed: cute.Tensor,
    lse_log2: cute.Tensor,
    thread: Int32,
    factors: tuple,
    dtype: cutlass.Constexpr,
):
    """The same under a softcap; `scores` ends as P * (1 - tanh^2), what dP - delta is multiplied with.

    factors: see capped_weights.
    """
    view = rows_view(scores)  # (2, tile_m / 4)
    lse = _column_pairs(lse_log2, thread, cute.size(lse_log2))
    slopes = cute.make_rmem_tensor(scores.layout, Float32)
    by_rows = rows_view(slopes)
    for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
        for r in cutlass.range_constexpr(2):
            view[r, c], by_rows[r, c] = capped_weights(view[r, c], lse[c], factors)
    pack_fragment(scores, packed, dtype)
    scores.store(slopes.load())


@cute.jit
def score_gradients(
    weights: cute.Tensor,
    dp: cute.Tensor,
    packed: cute.Tensor,
    delta: cute.Tensor,
    thread: Int32,
    dtype: cutlass.Constexpr,
):
    """dS = weights * (dP - delta), rounded into `packed`; `weights` is overwritten. delta: (tile_m,)."""
    view, gradients = rows_view(weights), rows_view(dp)
    values = _column_pairs(delta, thread, cute.size(delta))
    for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
        for r in cutlass.range_constexpr(2):
            view[r, c] = view[r, c] * (gradients[r, c] - values[c])
    pack_fragment(weights, packed, dtype)
