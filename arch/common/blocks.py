"""Which key tiles a query tile visits. Key tiles run from the last to the first: masked ones come first."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class KeyTiles(NamedTuple):
    count: Int32  # tiles visited: [0, count)
    unmasked: Int32  # of these, [0, unmasked) need no mask


@cute.jit
def key_tiles(
    row_start: Int32, tile_m: int, tile_n: int, seqlen_q: Int32, seqlen_k: Int32, causal: cutlass.Constexpr[bool]
) -> KeyTiles:
    """For query rows [row_start, row_start + tile_m); causal is aligned bottom-right."""
    count = cute.ceil_div(seqlen_k, tile_n)
    unmasked = seqlen_k // tile_n
    if cutlass.const_expr(causal):
        first_row_sees = row_start + 1 + seqlen_k - seqlen_q
        last_row_sees = first_row_sees + tile_m - 1
        count = cutlass.max(0, cutlass.min(count, cute.ceil_div(last_row_sees, tile_n)))
        unmasked = cutlass.max(0, cutlass.min(unmasked, first_row_sees // tile_n))
    return KeyTiles(count, unmasked)
