"""Merging the partial results of split keys (Flash-Decoding).

lse = log sum_s exp(lse_s), out = sum_s exp(lse_s - lse) out_s.

One warp a query row; lanes run over the splits for the LSE, then over columns for the output.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .numeric import LN_2, LOG2_E, NEG_INF, exp2, finite_or_zero

WARPS = 4  # rows a CTA


@cute.jit
def _row_lse(lses: cute.Tensor, lane: Int32) -> Float32:
    """log sum exp over the splits; -inf where no split saw a key. Every lane gets it."""
    splits = lses.shape[0]
    top = Float32(NEG_INF)
    for s in cutlass.range(lane, splits, 32, unroll=1):
        top = cute.arch.fmax(top, lses[s])
    top = finite_or_zero(cute.arch.warp_reduction_max(top))
    total = Float32(0.0)
    for s in cutlass.range(lane, splits, 32, unroll=1):
        total = total + exp2((lses[s] - top) * LOG2_E)
    total = cute.arch.warp_reduction_sum(total)
    return Float32(NEG_INF) if total == 0.0 else top + cute.math.log2(total, fastmath=True) * LN_2


@cute.kernel
def combine_kernel(o_partial: cute.Tensor, lse_partial: cute.Tensor, o: cute.Tensor, lse: cute.Tensor | None):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % 32
    _, batch, heads, seqlen, width = o_partial.shape
    index = block * WARPS + thread // 32
    if index < batch * heads * seqlen:
        row, head_index = index % seqlen, index // seqlen
        head, b = head_index % heads, head_index // heads
        lses = lse_partial[None, b, head, row]  # (splits,)
        merged = _row_lse(lses, lane)
        reference = finite_or_zero(merged)
        columns = width // 32
        sums = cute.make_rmem_tensor((columns,), Float32)
        sums.fill(0.0)
        for s in cutlass.range(lses.shape[0], unroll=4):
            weight = exp2((lses[s] - reference) * LOG2_E)
            for c in cutlass.range_constexpr(columns):
                sums[c] = sums[c] + weight * o_partial[s, b, head, row, c * 32 + lane]
        for c in cutlass.range_constexpr(columns):
            if c * 32 + lane < o.shape[3]:
                o[b, row, head, c * 32 + lane] = sums[c].to(o.element_type)
        if cutlass.const_expr(lse is not None):
            row_of_lse = lse[b, head, None]
            if lane == 0:
                row_of_lse[row] = merged


def launch_combine(o_partial: cute.Tensor, lse_partial: cute.Tensor, o: cute.Tensor, lse: cute.Tensor | None, stream):
    """o_partial (splits, batch, heads_q, seqlen_q, width_v), lse_partial (splits, batch, heads_q, seqlen_q) in float32;
    o (batch, seqlen_q, heads_q, head_dim_v); lse (batch, heads_q, seqlen_q)."""
    _, batch, heads, seqlen, _ = o_partial.shape
    combine_kernel(o_partial, lse_partial, o, lse).launch(
        grid=(cute.ceil_div(batch * heads * seqlen, WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
    )
