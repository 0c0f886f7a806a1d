"""WHERE, of a pair of CTAs that multiply together (cta_group::2): each owns 128 keys, and both walk the same queries.

An instruction takes half of its B operand from each CTA, so operands that are one are stored by halves: B of S^T and
dP^T as rows, B of dK and dV as columns. dQ sums over the keys of both: each CTA has 64 columns of all 256 keys of K,
and dS of all keys for 64 of the queries, half of it written by the other CTA.

sK         (128, 128)     later dK
sV         (128, 128)     later dV
sKcolumns  (256, 64)      keys of both, the columns of this CTA's half
sQrows     (64, 128)      sQcolumns (128, 64); likewise sdOrows, sdOcolumns
sdS        (256, 64)      keys of both, the queries of this CTA's half, contiguous
sdQ        (128 * 32, 2)  float32
sRows      (2 * 128, 2)   float32: LSE in base 2 and delta, of all queries of a tile

tensor memory: S^T 0, dP^T 128, dV 256, dK 384, of 128 columns each, lanes being this CTA's keys. dQ^T over dP^T, 64
columns: lane l and column c are column l % 64 of this CTA's half and query 64 (l / 64) + c.
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, Int64
from cutlass.utils import LayoutEnum

from ..memory import SWIZZLE_ALIGN
from ..schedule import ROWS
from ..tiles import DQ_SLOTS, PAIR
from .memory import BackwardShape

HALF = ROWS // PAIR  # rows or columns of one CTA's share of an operand
BOTH_KEYS = PAIR * ROWS
ROW_SLOTS = 2  # of LSE and delta
DQ_COLUMNS = ROWS // 2  # of dQ^T in tensor memory
DQ_CHUNK = 32  # of these that leave at a time


class PairLayouts(NamedTuple):
    """Rooms as rows by columns, for TMA: (rows, columns, 1)."""

    k: cute.ComposedLayout
    k_columns: cute.ComposedLayout
    rows: cute.ComposedLayout  # of Q and of dO
    columns: cute.ComposedLayout


class PairOperands(NamedTuple):
    """As products read them. K and V, Q and dO are alike."""

    keys: cute.ComposedLayout  # A of S^T and dP^T
    k_columns: cute.ComposedLayout  # A of dQ^T
    rows: cute.ComposedLayout  # B of S^T and dP^T
    columns: cute.ComposedLayout  # B of dK and dV
    ds: cute.ComposedLayout  # B of dQ^T


def pair_layouts(dtype: type) -> PairLayouts:
    def room(rows: int, columns: int) -> cute.ComposedLayout:
        return blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (rows, columns), 1)

    return PairLayouts(room(ROWS, ROWS), room(BOTH_KEYS, HALF), room(HALF, ROWS), room(ROWS, HALF))


def pair_operands(mmas, dtype: type) -> PairOperands:
    make_a, make_b = blackwell.make_smem_layout_a, blackwell.make_smem_layout_b
    tile, over_keys = (BOTH_KEYS, ROWS, ROWS), (ROWS, ROWS, BOTH_KEYS)
    return PairOperands(
        keys=make_a(mmas.scores(), tile, dtype, 1),
        k_columns=make_a(mmas.dq(), over_keys, dtype, 1),
        rows=make_b(mmas.scores(), tile, dtype, 1),
        columns=make_b(mmas.by_keys(), tile, dtype, 1),
        ds=make_b(mmas.dq(), over_keys, dtype, 1),
    )


def pair_storage(barrier_words: int, dtype: type) -> type:
    def room(rows: int, columns: int):
        return cute.struct.Align[cute.struct.MemRange[dtype, rows * columns], SWIZZLE_ALIGN]

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, barrier_words]
        tmem_address: cute.struct.MemRange[Int32, 4]
        rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * ROWS * ROW_SLOTS], 128]
        k: room(ROWS, ROWS)
        v: room(ROWS, ROWS)
        k_columns: room(BOTH_KEYS, HALF)
        q_rows: room(HALF, ROWS)
        q_columns: room(ROWS, HALF)
        do_rows: room(HALF, ROWS)
        do_columns: room(ROWS, HALF)
        ds: room(BOTH_KEYS, HALF)
        dq: cute.struct.Align[cute.struct.MemRange[Float32, DQ_SLOTS * ROWS * DQ_CHUNK], 128]

    return Storage


def pair_shape(shape: BackwardShape) -> BackwardShape:
    """Checked: the map above is for one shape."""
    if (shape.tile.tile_m, shape.tile.tile_n, shape.width_qk, shape.width_v) != (ROWS,) * 4:
        raise ValueError(f"pairs take tiles of 128 x 128 at widths 128, not {shape}")
    return shape
