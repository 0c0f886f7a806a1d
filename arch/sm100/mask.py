"""Masking of one row of scores: keys past the end, and outside the row's window. A thread holds a whole row."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.spec.mask import Mask

from ..common.numeric import NEG_INF


class Visible(NamedTuple):
    """The keys [first, end) that a row sees; either may be negative or past a tile. first is None without a left
    bound."""

    first: Int32 | None
    end: Int32

    def of_tile(self, start: Int32) -> "Visible":
        """As columns of the key tile that starts at key `start`."""
        return Visible(None if self.first is None else self.first - start, self.end - start)


@cute.jit
def visible_keys(row: Int32, seqlens: tuple[Int32, Int32], mask: cutlass.Constexpr[Mask], bounds: tuple) -> Visible:
    """bounds: (left, right), None where the mask has none at run time."""
    seqlen_q, seqlen_k = seqlens
    left, right = bounds
    first, end = None, seqlen_k
    if cutlass.const_expr(mask.right):
        sees = row + 1 + seqlen_k - seqlen_q
        if cutlass.const_expr(not mask.causal):
            sees = sees + right
        end = cutlass.min(seqlen_k, sees)
    if cutlass.const_expr(mask.left):
        first = row + seqlen_k - seqlen_q - left
    return Visible(first, end)


def _shifted(word: int, count: Int32) -> Int32:
    """PTX's shift gives 0 from 32 on, which LLVM's does not promise."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(word), count]
    )


@cute.jit
def mask_row(scores: cute.Tensor, visible: Visible):
    """Scores of columns that are not visible become -inf. Bits of a word choose, 32 columns at a time: one R2P feeds
    seven selects where each comparison would cost an instruction."""
    for word in cutlass.range_constexpr(cute.size(scores) // 32):
        bits = _shifted(1, cutlass.max(0, visible.end - 32 * word)) - 1
        if cutlass.const_expr(visible.first is not None):
            bits = bits & _shifted(-1, cutlass.max(0, visible.first - 32 * word))
        for c in cutlass.range_constexpr(32):
            i = 32 * word + c
            scores[i] = scores[i] if (bits & (1 << c)) != 0 else Float32(NEG_INF)
