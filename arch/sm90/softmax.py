"""Online softmax on wgmma fragments, and the rescaling of O that it asks for."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..common.numeric import exp2, finite_or_zero, mul_rn
from ..common.rowstate import RowState, inverse_total
from .mma import rows_view


def quad_max(x: Float32) -> Float32:
    """Over the four lanes that share a row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x: Float32) -> Float32:
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@cute.jit
def softmax_step(scores: cute.Tensor, state: RowState, scale_log2: Float32, guarded: cutlass.Constexpr[bool]):
    """Scores become exp2(scale * (score - maximum)); the state takes the new maximum, sum and rescale factor.

    guarded: a row may not have seen a key yet. Rows are vectors: a tenth of the operations to trace and to compile.
    """
    view = rows_view(scores)  # (2, tile_n / 4)
    for r in cutlass.range_constexpr(2):
        row = view[r, None]
        values = row.load()
        new = quad_max(values.reduce(cute.ReductionOp.MAX, state.maximum[r], 0))
        subtrahend = mul_rn(new, scale_log2)
        if cutlass.const_expr(guarded):
            subtrahend = finite_or_zero(subtrahend)
        rescale = exp2(mul_rn(state.maximum[r], scale_log2) - subtrahend)
        probabilities = cute.math.exp2(values * scale_log2 - subtrahend, fastmath=True)
        row.store(probabilities)
        state.maximum[r] = new
        state.rescale[r] = rescale
        state.total[r] = probabilities.reduce(cute.ReductionOp.ADD, state.total[r] * rescale, 0)


@cute.jit
def rescale_output(o: cute.Tensor, state: RowState):
    view = rows_view(o)  # (2, width_v / 4)
    for r in cutlass.range_constexpr(2):
        row = view[r, None]
        row.store(row.load() * state.rescale[r])


@cute.jit
def finish(o: cute.Tensor, state: RowState):
    """Sum over the quad, then the one division of the row."""
    view = rows_view(o)
    for r in cutlass.range_constexpr(2):
        state.total[r] = quad_sum(state.total[r])
        row = view[r, None]
        row.store(row.load() * inverse_total(state.total[r]))
