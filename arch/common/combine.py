"""Merging the partial results of split keys (Flash-Decoding).

Split s leaves maximum_s = scale log2(e) max(score), total_s = sum exp2(scale log2(e) score - maximum_s) and out_s. With
maximum the largest of them: w_s = exp2(maximum_s - maximum) total_s, total = sum w_s, out = sum (w_s / total) out_s,
lse = (maximum + log2(total)) ln 2. A pair, because one float32 for both, the split's LSE, rounds log2(total_s) to an
ulp of the maximum: out was off by 4% at scores of 7e5, by a quarter at 6e6 (tests/emulator/test_split_scores.py).

total is 0 only where no split saw a key: the split of the largest maximum adds its own total to it, undiminished, and
its largest term is 1 but for the rounding of maximum_s, which float32 can carry up to 2^28: what SCALE_MAX rests on
(cute_flash/runtime/request.py).

One warp a query row; lanes run over the splits for the total, then over columns for the output.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .numeric import NEG_INF, exp2, finite_or_zero
from .rowstate import inverse_total, log_sum_exp

WARPS = 4  # rows a CTA


@cute.jit
def _merged(maxima: cute.Tensor, totals: cute.Tensor, lane: Int32) -> tuple[Float32, Float32]:
    """(maximum, total) over the splits; (0, 0) where no split saw a key. Every lane gets them."""
    splits = maxima.shape[0]
    top = Float32(NEG_INF)
    for s in cutlass.range(lane, splits, 32, unroll=1):
        top = cute.arch.fmax(top, maxima[s])
    top = finite_or_zero(cute.arch.warp_reduction_max(top))
    total = Float32(0.0)
    for s in cutlass.range(lane, splits, 32, unroll=1):
        total = total + exp2(maxima[s] - top) * totals[s]
    return top, cute.arch.warp_reduction_sum(total)


@cute.kernel
def combine_kernel(o_partial: cute.Tensor, state_partial: cute.Tensor, o: cute.Tensor, lse: cute.Tensor | None):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % 32
    _, batch, heads, seqlen, width = o_partial.shape
    index = block * WARPS + thread // 32
    if index < batch * heads * seqlen:
        row, head_index = index % seqlen, index // seqlen
        head, b = head_index % heads, head_index // heads
        maxima, totals = state_partial[None, b, head, row, 0], state_partial[None, b, head, row, 1]  # (splits,)
        maximum, total = _merged(maxima, totals, lane)
        inverse = inverse_total(total)
        columns = width // 32
        sums = cute.make_rmem_tensor((columns,), Float32)
        sums.fill(0.0)
        for s in cutlass.range(maxima.shape[0], unroll=4):
            weight = exp2(maxima[s] - maximum) * totals[s] * inverse
            for c in cutlass.range_constexpr(columns):
                sums[c] = sums[c] + weight * o_partial[s, b, head, row, c * 32 + lane]
        for c in cutlass.range_constexpr(columns):
            if c * 32 + lane < o.shape[3]:
                o[b, row, head, c * 32 + lane] = sums[c].to(o.element_type)
        if cutlass.const_expr(lse is not None):
            row_of_lse = lse[b, head, None]
            if lane == 0:
                row_of_lse[row] = log_sum_exp(maximum, total, Float32(1.0))


def launch_combine(o_partial: cute.Tensor, state_partial: cute.Tensor, o: cute.Tensor, lse: cute.Tensor | None, stream):
    """o_partial (splits, batch, heads_q, seqlen_q, width_v), state_partial (splits, batch, heads_q, seqlen_q, 2) of
    (maximum, total), both float32; o (batch, seqlen_q, heads_q, head_dim_v); lse (batch, heads_q, seqlen_q)."""
    _, batch, heads, seqlen, _ = o_partial.shape
    combine_kernel(o_partial, state_partial, o, lse).launch(
        grid=(cute.ceil_div(batch * heads * seqlen, WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
    )
