"""Which key tiles a query tile visits. Key tiles run from the last to the first: masked ones come first."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.spec.mask import Mask


class KeyTiles(NamedTuple):
    first: Int32  # tiles visited: [first, last)
    last: Int32
    unmasked: Int32  # of these, [first, unmasked) need no mask; first <= unmasked
    whole: Int32 | None = None  # with a left bound [whole, unmasked) do, which may be empty


@cute.jit
def key_tiles(
    row_start: Int32, tile_m: int, tile_n: int, seqlen_q: Int32, seqlen_k: Int32, causal: cutlass.Constexpr[bool]
) -> KeyTiles:
    """For query rows [row_start, row_start + tile_m); causal is aligned bottom-right."""
    last = cute.ceil_div(seqlen_k, tile_n)
    unmasked = seqlen_k // tile_n
    if cutlass.const_expr(causal):
        first_row_sees = row_start + 1 + seqlen_k - seqlen_q
        last_row_sees = first_row_sees + tile_m - 1
        last = cutlass.max(0, cutlass.min(last, cute.ceil_div(last_row_sees, tile_n)))
        unmasked = cutlass.max(0, cutlass.min(unmasked, first_row_sees // tile_n))
    return KeyTiles(Int32(0), last, unmasked)


class WindowBounds(NamedTuple):
    """The values of Mask's bounds, where it has them."""

    left: Int32 | None = None
    right: Int32 | None = None


@cute.jit
def window_tiles(
    row_start: Int32, tile_m: int, tile_n: int, seqlens: tuple, mask: cutlass.Constexpr[Mask], bounds: WindowBounds
) -> KeyTiles:
    """As key_tiles, for any mask; seqlens: (seqlen_q, seqlen_k). Row i's diagonal is key i + seqlen_k - seqlen_q."""
    seqlen_q, seqlen_k = seqlens
    diagonal = row_start + seqlen_k - seqlen_q
    first, whole = Int32(0), Int32(0)
    last, unmasked = (seqlen_k + tile_n - 1) // tile_n, seqlen_k // tile_n
    if cutlass.const_expr(mask.right):
        sees = diagonal + 1 if cutlass.const_expr(mask.causal) else diagonal + 1 + bounds.right  # keys of the first row
        last = cutlass.min(last, cutlass.max(0, sees + tile_m + tile_n - 2) // tile_n)
        unmasked = cutlass.min(unmasked, cutlass.max(0, sees) // tile_n)
    if cutlass.const_expr(mask.left):
        first = cutlass.max(0, diagonal - bounds.left) // tile_n
        whole = cutlass.max(0, diagonal - bounds.left + tile_m + tile_n - 2) // tile_n
    return KeyTiles(first, last, unmasked, whole)


def part_of(tiles: KeyTiles, split: Int32, splits: Int32) -> KeyTiles:
    """The tiles of one of `splits` CTAs that share a query tile: equal runs, the last ones may be short or empty."""
    run = (tiles.last + splits - 1) // splits
    first = cutlass.min(split * run, tiles.last)
    last = cutlass.min(first + run, tiles.last)
    return KeyTiles(first, last, cutlass.min(cutlass.max(tiles.unmasked, first), last))
