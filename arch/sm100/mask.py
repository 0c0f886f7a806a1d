"""Masking of one row of scores: keys past the end, and keys after the diagonal. A thread holds a whole row."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.numeric import NEG_INF


@cute.jit
def visible_keys(row: Int32, seqlens: tuple[Int32, Int32], causal: cutlass.Constexpr[bool]) -> Int32:
    """Row `row` sees the keys before this one; may be negative or past seqlen_k's tile."""
    seqlen_q, seqlen_k = seqlens
    limit = seqlen_k
    if cutlass.const_expr(causal):
        limit = cutlass.min(seqlen_k, row + 1 + seqlen_k - seqlen_q)
    return limit


@cute.jit
def mask_row(scores: cute.Tensor, visible: Int32):
    """Scores from column `visible` on become -inf. Bits of a word choose, 32 columns at a time: one R2P feeds seven
    selects where each comparison would cost an instruction."""
    for word in cutlass.range_constexpr(cute.size(scores) // 32):
        count = cutlass.max(0, visible - 32 * word)
        bits = cute.arch.inline_ptx(  # PTX's shift gives 0 from 32 on, which LLVM's does not promise
            "shl.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(1), count]
        )
        bits = bits - 1
        for c in cutlass.range_constexpr(32):
            i = 32 * word + c
            scores[i] = scores[i] if (bits & (1 << c)) != 0 else Float32(NEG_INF)
