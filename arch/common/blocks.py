"""Which key tiles a query tile visits. Key tiles run from the last to the first: masked ones come first."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class KeyTiles(NamedTuple):
    first: Int32  # tiles visited: [first, last)
    last: Int32
    unmasked: Int32  # of these, [first, unmasked) need no mask; first <= unmasked
    whole: Int32 | None = None  # under a window, [first, whole) need one after all: rows start to see keys there


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


@cute.jit
def window_tiles(
    row_start: Int32, tile: cutlass.Constexpr, seqlens: tuple, bounds: tuple, mask: cutlass.Constexpr
) -> KeyTiles:
    """For query rows [row_start, row_start + tile.tile_m) under a windowed mask; `bounds`: (left, right)."""
    seqlen_q, seqlen_k = seqlens
    left, right = bounds
    tile_n = tile.tile_n
    first_diagonal = row_start + seqlen_k - seqlen_q
    last_diagonal = cutlass.min(row_start + tile.tile_m, seqlen_q) - 1 + seqlen_k - seqlen_q
    last = (seqlen_k + tile_n - 1) // tile_n
    unmasked = seqlen_k // tile_n
    if cutlass.const_expr(mask.right):
        reach = Int32(1) if cutlass.const_expr(mask.causal) else right + 1
        last = cutlass.min(last, (cutlass.max(0, last_diagonal + reach) + tile_n - 1) // tile_n)
        unmasked = cutlass.min(unmasked, cutlass.max(0, first_diagonal + reach) // tile_n)
    first, whole = Int32(0), Int32(0)
    if cutlass.const_expr(mask.left):
        first = cutlass.min(cutlass.max(0, first_diagonal - left) // tile_n, last)
        whole = (cutlass.max(0, last_diagonal - left) + tile_n - 1) // tile_n
    return KeyTiles(first, last, cutlass.max(unmasked, first), cutlass.max(whole, first))


def part_of(tiles: KeyTiles, split: Int32, splits: Int32) -> KeyTiles:
    """The tiles of one of `splits` CTAs that share a query tile: equal runs, the last ones may be short or empty."""
    run = (tiles.last + splits - 1) // splits
    first = cutlass.min(split * run, tiles.last)
    last = cutlass.min(first + run, tiles.last)
    return KeyTiles(first, last, cutlass.min(cutlass.max(tiles.unmasked, first), last))


@cute.jit
def never_none(tiles: KeyTiles, beyond: Int32) -> KeyTiles:
    """Where no key is seen, the tile `beyond` the last key: TMA reads zeros there and the mask hides them all, so that
    no role needs a case for it."""
    first, last, unmasked, whole = tiles
    if last <= first:
        first, last, unmasked = beyond, beyond + 1, beyond
    if cutlass.const_expr(whole is not None):
        whole = cutlass.max(whole, first)
    return KeyTiles(first, last, unmasked, whole)


class RowTiles(NamedTuple):
    """Which query tiles a key tile visits, from the first to the last."""

    first: Int32  # tiles visited: [first, last)
    last: Int32
    whole_first: Int32  # tiles in [whole_first, whole_last) need no mask
    whole_last: Int32

    @property
    def count(self) -> Int32:
        return self.last - self.first


@cute.jit
def row_tiles(
    key_start: Int32, tile: cutlass.Constexpr, seqlens: tuple, bounds: tuple, mask: cutlass.Constexpr
) -> RowTiles:
    """For keys [key_start, key_start + tile.tile_n); `bounds`: (left, right) of a window. Rows past seqlen_q need no
    mask: the backward gives them no weight."""
    seqlen_q, seqlen_k = seqlens
    left, right = bounds
    tile_m = tile.tile_m
    first_diagonal = key_start - (seqlen_k - seqlen_q)  # the row whose diagonal is the tile's first key
    last_diagonal = cutlass.min(key_start + tile.tile_n, seqlen_k) - 1 - (seqlen_k - seqlen_q)
    first, last = Int32(0), (seqlen_q + tile_m - 1) // tile_m
    whole_first, whole_last = Int32(0), last
    if cutlass.const_expr(mask.right):
        reach = Int32(0) if cutlass.const_expr(mask.causal) else right
        first = cutlass.min(cutlass.max(0, first_diagonal - reach) // tile_m, last)
        whole_first = (cutlass.max(0, last_diagonal - reach) + tile_m - 1) // tile_m
    if cutlass.const_expr(mask.left):
        last = cutlass.max(first, cutlass.min(last, (cutlass.max(-1, last_diagonal + left) + tile_m) // tile_m))
        whole_last = cutlass.max(0, first_diagonal + left + 1) // tile_m
    if key_start + tile.tile_n > seqlen_k:
        whole_last = Int32(0)  # keys past the end are in every tile
    return RowTiles(first, last, whole_first, whole_last)
