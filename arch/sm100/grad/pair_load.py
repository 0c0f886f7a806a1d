"""The load role of a pair: each CTA's warp brings its halves, which arrive at the leader's barriers."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...common.keyunits import Unit
from ..pipeline import expect_bytes
from ..schedule import ROWS
from ..tiles import PAIR
from .load import TileCopy
from .pair_memory import BOTH_KEYS, HALF, ROW_SLOTS
from .pair_pipeline import PairBarriers

TILE_BYTES, HALF_BYTES = 2 * ROWS * ROWS, 2 * ROWS * HALF  # of one CTA's share of K or V, and of what is halved


class PairFeed(NamedTuple):
    """What one CTA reads, and where to; sources (box, row tiles, column tiles, heads)."""

    k: TileCopy
    v: TileCopy
    k_columns: TileCopy
    q_rows: TileCopy
    q_columns: TileCopy
    do_rows: TileCopy
    do_columns: TileCopy
    row_values: cute.Tensor  # (2 * 128, query tiles, heads_q) float32 in global memory
    s_rows: cute.Tensor  # (2 * 128, ROW_SLOTS) float32


def part_copy(tma, smem: cute.Tensor, box: tuple[int, int], batch: Int32) -> TileCopy:
    tiles = cute.local_tile(tma.tensor[None, None, None, batch], box, (None, None, None))
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TileCopy(tma.atom, source, target)


@cute.jit
def _fetch(copy: TileCopy, place: tuple, full: cute.Pointer, size: cutlass.Constexpr[int]):
    """place: (row tile, column tile, head); size: of one CTA's share."""
    row, column, head = place
    expect_bytes(full, PAIR * size, PAIR)
    cute.copy(copy.atom, copy.source[None, row, column, head], copy.target[None, 0], tma_bar_ptr=full)


@cute.jit
def _fetch_rows(bars: PairBarriers, feed: PairFeed, place: tuple, step: Int32):
    """LSE and delta, for this CTA's own warps."""
    tile, head = place
    slot, phase = step % ROW_SLOTS, step // ROW_SLOTS % 2
    cute.arch.mbarrier_wait(bars.rows_free + slot, phase ^ 1)
    atom, size = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), cutlass.const_expr(2 * ROWS * 4)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.rows_full + slot, size)
        source, target = feed.row_values[None, tile, head], feed.s_rows[None, slot]
        cute.copy(atom, source, target, mbar_ptr=bars.rows_full + slot)


@cute.jit
def load_for_pair(bars: PairBarriers, feed: PairFeed, unit: Unit, rank: Int32):
    """In the order in which products ask. One converged warp of each CTA; unit: of the pair, tiles of 256 keys."""
    tiles, step = unit.tiles, Int32(0)
    if tiles.count > 0:
        mine = (unit.key_block * PAIR + rank, 0, unit.head_kv)
        _fetch(feed.k, mine, bars.k_full, TILE_BYTES)
        for member in cutlass.range(unit.group, unroll=1):
            for index in cutlass.range(tiles.count, unroll=1):
                at, head, phase = tiles.first + index, unit.head_first + member, step % 2
                rows, columns = (at * PAIR + rank, 0, head), (at, rank, head)
                cute.arch.mbarrier_wait(bars.q_rows_free, phase ^ 1)
                _fetch(feed.q_rows, rows, bars.q_rows_full, HALF_BYTES)
                _fetch_rows(bars, feed, (at, head), step)
                if step == 0:
                    _fetch(feed.v, mine, bars.v_full, TILE_BYTES)
                cute.arch.mbarrier_wait(bars.do_rows_free, phase ^ 1)
                _fetch(feed.do_rows, rows, bars.do_rows_full, HALF_BYTES)
                if step == 0:
                    both = (unit.key_block, rank, unit.head_kv)
                    _fetch(feed.k_columns, both, bars.k_columns_full, 2 * BOTH_KEYS * HALF)
                cute.arch.mbarrier_wait(bars.do_columns_free, phase ^ 1)
                _fetch(feed.do_columns, columns, bars.do_columns_full, HALF_BYTES)
                cute.arch.mbarrier_wait(bars.q_columns_free, phase ^ 1)
                _fetch(feed.q_columns, columns, bars.q_columns_full, HALF_BYTES)
                step = step + 1
