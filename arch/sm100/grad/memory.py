"""WHERE: shared memory and tensor memory of a backward CTA.

sK      (128, width_qk)                later dK; dV where no dK is made
sV      (128, width_v)                 later dV; absent where no dK is made, as what follows it
sdS     (128 keys, tile_m)             queries contiguous
sdQ     (128 * chunk, 2)               float32: so many columns of dQ as tensor memory has it, see dq_vectors
sQ      (tile_m, width_qk, q slots)    ring
sdO     (tile_m, width_v, do slots)    ring
sRows   (2 * tile_m, q slots)          float32: LSE in base 2 and delta of the rows of sQ, a ring with it
barriers, tensor memory's address

Every operand lies once and is read both ways: K is the A operand (keys x width, K-major) of S^T = K Q^T and the B
operand (width x keys, MN-major) of dQ = dS K; likewise Q and dO. The swizzle atom of both readings is the same 1024
bytes.

tensor memory, 32-bit columns of 128 lanes, one after the other, each if it is made:
    S^T     tile_m columns, queries; P^T of each half of the queries over the first half of its columns
    dP^T    tile_m columns, queries; dS^T likewise
    dV      width_v columns; lanes of all these are keys
    dK      width_qk columns
    dQ      width_qk columns, lanes are queries; at tile_m 64 dQ^T: for every 128 of width_qk 64 columns, queries. Over
            dP^T where the columns end before
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, Int64
from cutlass.utils import LayoutEnum

from cute_flash.spec.plan import Tile

from ..memory import SWIZZLE_ALIGN
from ..schedule import ROWS
from ..tiles import (
    DQ_CHUNK_BYTES,
    DQ_SLOTS,
    FUSED,
    KEYS_PART,
    TMEM_COLUMNS,
    VALUES_PART,
    WIDE_ROWS,
    backward_slots,
)
from .schedule import HALVES


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, columns, head, batch)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class BackwardShape:
    """The static sizes of one kernel, and where things lie in tensor memory."""

    tile: Tile  # 128 keys; 128 queries, or 64
    width_qk: int
    width_v: int
    part: str = FUSED  # see tiles.py

    def __post_init__(self) -> None:
        if self._dq_end > TMEM_COLUMNS or (not self.dq_apart and self.dq_columns > self.tile.tile_m):
            raise ValueError(f"dK, dV and dQ of {self.width_qk} and {self.width_v} exceed {TMEM_COLUMNS} columns")

    @property
    def makes_dk(self) -> bool:
        """And dQ, for which dP and dS are needed."""
        return self.part != VALUES_PART

    @property
    def makes_dv(self) -> bool:
        return self.part != KEYS_PART

    @property
    def slots(self) -> tuple[int, int]:
        return backward_slots(self.tile.tile_m, (self.width_qk, self.width_v), self.part)

    @property
    def q_slots(self) -> int:
        return self.slots[0]

    @property
    def do_slots(self) -> int:
        return self.slots[1]

    s_column = 0

    @property
    def dp_column(self) -> int:
        return self.tile.tile_m

    @property
    def dv_column(self) -> int:
        return self.tile.tile_m * (2 if self.makes_dk else 1)

    @property
    def dk_column(self) -> int:
        return self.dv_column + (self.width_v if self.makes_dv else 0)

    @property
    def _sums_end(self) -> int:
        return self.dk_column + (self.width_qk if self.makes_dk else 0)

    @property
    def dq_transposed(self) -> bool:
        """tcgen05 has 128 rows: queries where a tile has so many, else columns of dQ."""
        return self.tile.tile_m < ROWS

    @property
    def dq_columns(self) -> int:
        return self.width_qk // ROWS * self.tile.tile_m if self.dq_transposed else self.width_qk

    @property
    def dq_apart(self) -> bool:
        """Has dQ columns of its own, so that the next dP^T need not wait until it has left?"""
        return self._sums_end + self.dq_columns <= TMEM_COLUMNS

    @property
    def dq_column(self) -> int:
        return self._sums_end if self.dq_apart else self.dp_column

    @property
    def _dq_end(self) -> int:
        return self._sums_end + (self.dq_columns if self.makes_dk and self.dq_apart else 0)

    @property
    def half(self) -> int:
        """Queries of a weighing warpgroup."""
        return self.tile.tile_m // HALVES

    @property
    def dq_chunk(self) -> int:
        """Columns of dQ that leave at a time."""
        return DQ_CHUNK_BYTES // WIDE_ROWS * self.tile.tile_m // (ROWS * Float32.width // 8)

    @property
    def tile_bytes(self) -> dict[str, int]:
        """What TMA brings; 16-bit values, and the float32 row values beside Q."""
        tile_m, row = self.tile.tile_m, 2 * Float32.width // 8
        return {
            "k": 2 * ROWS * self.width_qk,
            "v": 2 * ROWS * self.width_v,
            "q": tile_m * (2 * self.width_qk + row),
            "do": 2 * tile_m * self.width_v,
        }


class BackwardLayouts(NamedTuple):
    """Each room as rows by columns, for TMA and for threads: (rows, columns, slots)."""

    k: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout


class OperandLayouts(NamedTuple):
    """The same bytes as products read them; `_columns`: along the other mode."""

    k: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout
    k_columns: cute.ComposedLayout
    q_columns: cute.ComposedLayout
    do_columns: cute.ComposedLayout


def backward_layouts(shape: BackwardShape, dtype: type) -> BackwardLayouts:
    def room(rows: int, columns: int, slots: int) -> cute.ComposedLayout:
        return blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (rows, columns), slots)

    tile_m = shape.tile.tile_m
    return BackwardLayouts(
        k=room(ROWS, shape.width_qk, 1),
        v=room(ROWS, shape.width_v, 1),
        q=room(tile_m, shape.width_qk, shape.q_slots),
        do=room(tile_m, shape.width_v, shape.do_slots),
        ds=room(ROWS, tile_m, 1),
    )


def operand_layouts(shape: BackwardShape, mmas, dtype: type) -> OperandLayouts:
    make_a, make_b = blackwell.make_smem_layout_a, blackwell.make_smem_layout_b
    scores, dq, q_slots, do_slots = mmas.scores(), mmas.dq(), shape.q_slots, shape.do_slots
    tile_m, tile_n, width_qk, width_v = shape.tile.tile_m, shape.tile.tile_n, shape.width_qk, shape.width_v
    if shape.dq_transposed:
        over_keys = (ROWS, tile_m, tile_n)
        ds, k_columns = make_b(dq, over_keys, dtype, 1), make_a(dq, over_keys, dtype, width_qk // ROWS)
    else:
        over_keys = (tile_m, width_qk, tile_n)
        ds, k_columns = make_a(dq, over_keys, dtype, 1), make_b(dq, over_keys, dtype, 1)
    return OperandLayouts(
        k=make_a(scores, (tile_n, tile_m, width_qk), dtype, 1),
        v=make_a(scores, (tile_n, tile_m, width_v), dtype, 1),
        q=make_b(scores, (tile_n, tile_m, width_qk), dtype, q_slots),
        do=make_b(scores, (tile_n, tile_m, width_v), dtype, do_slots),
        ds=ds,
        k_columns=k_columns,
        q_columns=make_b(mmas.by_keys(width_qk), (tile_n, width_qk, tile_m), dtype, q_slots),
        do_columns=make_b(mmas.by_keys(width_v), (tile_n, width_v, tile_m), dtype, do_slots),
    )


def backward_storage(shape: BackwardShape, layouts: BackwardLayouts, barrier_words: int, dtype: type) -> type:
    def room(layout: cute.ComposedLayout, made: bool = True):
        elements = cute.cosize(layout) if made else 0
        return cute.struct.Align[cute.struct.MemRange[dtype, elements], SWIZZLE_ALIGN]

    dq_floats = DQ_SLOTS * ROWS * shape.dq_chunk if shape.makes_dk else 0

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, barrier_words]
        tmem_address: cute.struct.MemRange[Int32, 4]
        rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * shape.tile.tile_m * shape.q_slots], 128]
        k: room(layouts.k)
        v: room(layouts.v, shape.makes_dk)
        ds: room(layouts.ds, shape.makes_dk)
        dq: cute.struct.Align[cute.struct.MemRange[Float32, dq_floats], 128]
        q: room(layouts.q)
        do: room(layouts.do)

    return Storage


def dq_vectors(columns: int) -> cute.Layout:
    """Where dQ lies while it is summed: (column % 4, column / 4, lane) -> element, columns and lanes of tensor memory.
    Four columns of a lane are neighbours, then come the lanes: stores of 16 bytes have no bank conflict, and any run of
    columns is one piece of memory for the bulk addition. convert.py undoes it."""
    return cute.make_layout((4, columns // 4, ROWS), stride=(1, 4 * ROWS, 4))
