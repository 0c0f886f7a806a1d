"""Running statistics of the online softmax (FlashAttention, section 3.1); O stays unnormalised (FlashAttention-2)."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from .numeric import LN_2, NEG_INF, mul_rn


class RowState(NamedTuple):
    """One entry per row that a thread holds. Register tensors: writes in dynamic loops are carried."""

    maximum: cute.Tensor  # (rows,) running maximum of the raw scores
    total: cute.Tensor  # (rows,) running sum of exp2(scale * (score - maximum)) over this thread's columns
    rescale: cute.Tensor  # (rows,) what the latest maximum asks of O: exp2(scale * (old maximum - new maximum))


def make_row_state(rows: int) -> RowState:
    return RowState(*(cute.make_rmem_tensor((rows,), Float32) for _ in range(3)))


def reset(state: RowState):
    """No key seen yet."""
    state.maximum.fill(NEG_INF)
    state.total.fill(0.0)
    state.rescale.fill(1.0)


def settle(state: RowState, done: RowState):
    """What the output needs is set aside."""
    for r in range(cute.size(state.total)):
        done.maximum[r] = state.maximum[r]
        done.total[r] = state.total[r]


@cute.jit
def inverse_total(total: Float32) -> Float32:
    """1 / total; 0 for a row without a visible key, so that its output is 0. NaN stays NaN."""
    return Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)


@cute.jit
def log_sum_exp(maximum: Float32, total: Float32, scale_log2: Float32) -> Float32:
    """Natural-log LSE; -inf for a row without a visible key."""
    base_2 = mul_rn(maximum, scale_log2) + cute.math.log2(total, fastmath=True)
    return Float32(NEG_INF) if total == 0.0 else base_2 * LN_2
