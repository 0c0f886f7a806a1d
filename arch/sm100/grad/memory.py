"""WHERE: shared memory and tensor memory of a backward CTA.

sK      (128, width_qk)                later dK
sV      (128, width_v)                 later dV
sQ      (128, width_qk, q slots)       ring
sdO     (128, width_v, do slots)       ring
sRows   (2 * 128, q slots)             float32: LSE in base 2 and delta of the rows of sQ, a ring with it
sdS     (128 keys, 128 queries)        queries contiguous
sdQ     (128 * 32, 2)                  float32: 32 columns of dQ, see dq_chunk
barriers, tensor memory's address

Every operand lies once and is read both ways: K is the A operand (keys x width, K-major) of S^T = K Q^T and the B
operand (width x keys, MN-major) of dQ = dS K; likewise Q and dO. The swizzle atom of both readings is
the same 1024 bytes.

tensor memory, 32-bit columns of 128 lanes; lanes are keys, but queries of dQ:
    S^T     0      128 columns, queries; P^T of each half of the queries over the first half of its columns
    dP^T    128    128 columns, queries; dS^T likewise
    dV      256    width_v columns
    dK      256 + width_v
    dQ      256 + width_v + width_qk, or over dP^T where the columns end before
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
from ..tiles import DQ_COLUMNS, DQ_SLOTS, TMEM_COLUMNS, do_slots
from .schedule import HALVES


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, columns, head, batch)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class BackwardShape:
    """The static sizes of a Plan, and where things lie in tensor memory."""

    tile: Tile  # 128 x 128
    width_qk: int
    width_v: int

    def __post_init__(self) -> None:
        if self.dv_column + self.width_v + self.width_qk > TMEM_COLUMNS:
            raise ValueError(f"dK and dV of width {self.width_qk} and {self.width_v} exceed {TMEM_COLUMNS} columns")

    s_column = 0
    dp_column = ROWS
    dv_column = 2 * ROWS

    @property
    def q_slots(self) -> int:
        return self.tile.stages

    @property
    def do_slots(self) -> int:
        return do_slots(self.tile, self.width_qk, self.width_v)

    @property
    def dk_column(self) -> int:
        return self.dv_column + self.width_v

    @property
    def dq_apart(self) -> bool:
        """Has dQ columns of its own, so that the next dP^T need not wait until it has left?"""
        return self.dk_column + 2 * self.width_qk <= TMEM_COLUMNS

    @property
    def dq_column(self) -> int:
        return self.dk_column + self.width_qk if self.dq_apart else self.dp_column

    @property
    def half(self) -> int:
        """Queries of a weighing warpgroup."""
        return self.tile.tile_m // HALVES

    @property
    def dq_chunks(self) -> int:
        return self.width_qk // DQ_COLUMNS

    @property
    def tile_bytes(self) -> dict[str, int]:
        """What TMA brings; 16-bit values, and the float32 row values beside Q."""
        qk, v = 2 * ROWS * self.width_qk, 2 * ROWS * self.width_v
        return {"k": qk, "v": v, "q": qk + 2 * ROWS * Float32.width // 8, "do": v}


class BackwardLayouts(NamedTuple):
    """Each room as rows by columns, for TMA and for threads: (128, columns, slots)."""

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
    def rows(columns: int, slots: int) -> cute.ComposedLayout:
        return blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (ROWS, columns), slots)

    return BackwardLayouts(
        k=rows(shape.width_qk, 1),
        v=rows(shape.width_v, 1),
        q=rows(shape.width_qk, shape.q_slots),
        do=rows(shape.width_v, shape.do_slots),
        ds=rows(shape.tile.tile_m, 1),
    )


def operand_layouts(shape: BackwardShape, mmas, dtype: type) -> OperandLayouts:
    make_a, make_b = blackwell.make_smem_layout_a, blackwell.make_smem_layout_b
    scores, dq = mmas.scores(), mmas.dq()
    tile_m, tile_n = shape.tile.tile_m, shape.tile.tile_n
    over_qk, over_v = (tile_n, tile_m, shape.width_qk), (tile_n, tile_m, shape.width_v)
    return OperandLayouts(
        k=make_a(scores, over_qk, dtype, 1),
        v=make_a(scores, over_v, dtype, 1),
        q=make_b(scores, over_qk, dtype, shape.q_slots),
        do=make_b(scores, over_v, dtype, shape.do_slots),
        ds=make_a(dq, (tile_m, shape.width_qk, tile_n), dtype, 1),
        k_columns=make_b(dq, (tile_m, shape.width_qk, tile_n), dtype, 1),
        q_columns=make_b(mmas.by_keys(shape.width_qk), (tile_n, shape.width_qk, tile_m), dtype, shape.q_slots),
        do_columns=make_b(mmas.by_keys(shape.width_v), (tile_n, shape.width_v, tile_m), dtype, shape.do_slots),
    )


def backward_storage(shape: BackwardShape, layouts: BackwardLayouts, barrier_words: int, dtype: type) -> type:
    def room(layout: cute.ComposedLayout):
        return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], SWIZZLE_ALIGN]

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, barrier_words]
        tmem_address: cute.struct.MemRange[Int32, 4]
        rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * ROWS * shape.q_slots], 128]
        k: room(layouts.k)
        v: room(layouts.v)
        q: room(layouts.q)
        do: room(layouts.do)
        ds: room(layouts.ds)
        dq: cute.struct.Align[cute.struct.MemRange[Float32, DQ_SLOTS * ROWS * DQ_COLUMNS], 128]

    return Storage


def dq_vectors(columns: int) -> cute.Layout:
    """Where dQ lies while it is summed: (column % 4, column / 4, row) -> element. Four columns of a row are neighbours,
    then come the rows: stores of 16 bytes have no bank conflict, and any run of columns is one piece of memory for the
    bulk addition. convert.py undoes it."""
    return cute.make_layout((4, columns // 4, ROWS), stride=(1, 4 * ROWS, 4))
