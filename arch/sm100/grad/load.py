"""The load role: one warp moves K and V once, then Q with its row values and dO, tile by tile, through TMA."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from ...common.keyunits import Unit
from ..pipeline import Ring, advanced, expect_bytes, ring_start
from .memory import BackwardShape, TmaSource
from .pipeline import Barriers


class TileCopy(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor  # (box, row tiles, heads)
    target: cute.Tensor  # (box, slots)


class Feed(NamedTuple):
    """What one CTA reads, and where to."""

    k: TileCopy
    v: TileCopy | None  # None where no dK is made
    q: TileCopy
    do: TileCopy
    row_values: cute.Tensor  # (2 * tile_m, query tiles, heads_q) float32 in global memory
    s_rows: cute.Tensor  # (2 * tile_m, q slots) float32


def tile_copy(tma: TmaSource, smem: cute.Tensor, tile: tuple[int, int], batch: Int32) -> TileCopy:
    """Tiles of every head of a batch entry, ready for TMA."""
    tiles = cute.local_tile(tma.tensor[None, None, None, batch], tile, (None, 0, None))
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TileCopy(tma.atom, source, target)


@cute.jit
def _fetch(copy: TileCopy, place: tuple, slot: int | Int32, full: cute.Pointer, size: cutlass.Constexpr[int]):
    """place: (row tile, head). size: bytes that arrive at `full`, more than this copy's where another follows."""
    tile, head = place
    expect_bytes(full, size, 1)
    cute.copy(copy.atom, copy.source[None, tile, head], copy.target[None, slot], tma_bar_ptr=full)


@cute.jit
def _fetch_queries(bars: Barriers, feed: Feed, place: tuple, ring: Ring, size: cutlass.Constexpr[int]):
    """Q and its row values fill one slot together."""
    cute.arch.mbarrier_wait(bars.q_free + ring.slot, ring.phase ^ 1)
    full = bars.q_full + ring.slot
    _fetch(feed.q, place, ring.slot, full, size)
    tile, head = place
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32)
    with cute.arch.elect_one():
        cute.copy(atom, feed.row_values[None, tile, head], feed.s_rows[None, ring.slot], mbar_ptr=full)


@cute.jit
def _fetch_once(copy: TileCopy, place: tuple, full: cute.Pointer, size: cutlass.Constexpr[int], now: Boolean):
    if now:
        _fetch(copy, place, 0, full, size)


@cute.jit
def load_role(bars: Barriers, feed: Feed, unit: Unit, shape: cutlass.Constexpr[BackwardShape]):
    """In the order in which products ask. One converged warp."""
    tiles, size = unit.tiles, shape.tile_bytes
    queries, douts = ring_start(), ring_start()
    if tiles.count > 0:
        keys = (unit.key_block, unit.head_kv)
        _fetch(feed.k, keys, 0, bars.k_full, size["k"])
        for member in cutlass.range(unit.group, unroll=1):
            for step in cutlass.range(tiles.count, unroll=1):
                place = (tiles.first + step, unit.head_first + member)
                _fetch_queries(bars, feed, place, queries, size["q"])
                queries = advanced(queries, shape.q_slots)
                if cutlass.const_expr(feed.v is not None):
                    _fetch_once(feed.v, keys, bars.v_full, size["v"], member + step == 0)
                cute.arch.mbarrier_wait(bars.do_free + douts.slot, douts.phase ^ 1)
                _fetch(feed.do, place, douts.slot, bars.do_full + douts.slot, size["do"])
                douts = advanced(douts, shape.do_slots)
