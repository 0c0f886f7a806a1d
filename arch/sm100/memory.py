"""WHERE: shared memory and tensor memory of a forward CTA.

sQ  (128, width_qk, query_tiles)
sO  (128, width_v, query_tiles)        its own room, or Q's where the ring would be too short
ring (slots)                           K and V in turn; a slot holds one chunk:
    sK  (tile_n, key_chunk)            all keys, a share of the columns
    sV  (width_v, value_chunk)         a share of the keys, all columns; stored as loaded, an MN-major operand
    of a pair of CTAs each holds half: tile_n / 2 keys of sK, width_v / 2 columns of sV
factors (query_tiles, 128) float32     softmax -> correction: what O is multiplied by
barriers, tensor memory's address

tensor memory, 32-bit columns of 128 lanes (rows):
    S slots 0, 1     0 and 128: of the two query tiles, or of even and odd steps of a single one
    P                over the second half of its S, two 16-bit values a column
    O of tile i      256 + width_v i
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05
from cutlass.utils import LayoutEnum

from cute_flash.spec.plan import Tile

from .schedule import ROWS
from .tiles import SCORE_SLOTS, TMEM_COLUMNS, key_chunk, shared_output, slot_elements, tmem_columns, value_chunk

SWIZZLE_ALIGN = 1024  # bytes: one period of the 128-byte swizzle
LANE = 1 << 16  # tensor memory addresses: lane in the upper half, column in the lower


class ForwardLayouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    o: cute.ComposedLayout
    q_rows: cute.ComposedLayout | None  # q's room as (128, width_qk), where threads fill it


@dataclass(frozen=True)
class ForwardShape:
    """The static sizes of a Plan, and where things lie in tensor memory."""

    tile: Tile
    width_qk: int
    width_v: int
    ctas: int = 1  # that multiply together: 2 where a pair does
    packed: bool = False  # a query tile holds rows of several heads, which no TMA box describes

    def __post_init__(self) -> None:
        if tmem_columns(self.query_tiles, self.width_v) > TMEM_COLUMNS:
            raise ValueError(f"{self.query_tiles} query tiles of width {self.width_v} exceed {TMEM_COLUMNS} columns")

    @property
    def query_tiles(self) -> int:
        return self.tile.tile_m // ROWS

    @property
    def key_chunk(self) -> int:
        return key_chunk(self.width_qk)

    @property
    def value_chunk(self) -> int:
        return value_chunk(self.width_v)

    @property
    def key_chunks(self) -> int:
        return self.width_qk // self.key_chunk

    @property
    def value_chunks(self) -> int:
        return self.tile.tile_n // self.value_chunk

    @property
    def mma_rows(self) -> int:
        """tcgen05's M."""
        return ROWS * self.ctas

    @property
    def tile_bytes(self) -> tuple[int, int, int]:
        """What TMA brings of Q, of a chunk of K, of a chunk of V, to both CTAs of a pair together; 16-bit values."""
        keys = self.tile.tile_n
        return 2 * self.mma_rows * self.width_qk, 2 * keys * self.key_chunk, 2 * self.width_v * self.value_chunk

    @property
    def slot_elements(self) -> int:
        return slot_elements(self.width_qk, self.width_v, self.ctas)

    @property
    def shared_output(self) -> bool:
        return shared_output(self.tile.tile_m, self.width_qk, self.width_v, self.ctas)

    def s_column(self, slot: int | Int32) -> int | Int32:
        return slot * self.tile.tile_n

    def p_column(self, slot: int | Int32) -> int | Int32:
        return slot * self.tile.tile_n + self.tile.tile_n // 2

    def o_column(self, query_tile: int) -> int:
        return SCORE_SLOTS * self.tile.tile_n + self.width_v * query_tile


def _with_slot_stride(layout: cute.ComposedLayout, elements: int) -> cute.ComposedLayout:
    """The same tile in slots of `elements`: K and V share the ring though their chunks may differ in size."""
    outer = layout.outer
    outer = cute.make_layout(outer.shape, stride=(*outer.stride[:-1], elements))
    return cute.make_composed_layout(layout.inner, 0, outer)


def forward_layouts(shape: ForwardShape, qk: cute.TiledMma, pv: cute.TiledMma, dtype: type) -> ForwardLayouts:
    tile_n, slots = shape.tile.tile_n, shape.tile.stages
    rows = shape.mma_rows
    k = blackwell.make_smem_layout_b(qk, (rows, tile_n, shape.key_chunk), dtype, slots)
    v = blackwell.make_smem_layout_b(pv, (rows, shape.width_v, shape.value_chunk), dtype, slots)
    return ForwardLayouts(
        q=blackwell.make_smem_layout_a(qk, (rows, tile_n, shape.width_qk), dtype, shape.query_tiles),
        k=_with_slot_stride(k, shape.slot_elements),
        v=_with_slot_stride(v, shape.slot_elements),
        o=blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (ROWS, shape.width_v), shape.query_tiles),
        q_rows=_rows_of(shape.width_qk, dtype) if shape.packed else None,
    )


def _rows_of(columns: int, dtype: type) -> cute.ComposedLayout:
    """(128, columns), K-major, in the widest swizzle that `columns` allows, as for A and O alike."""
    layout = blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (ROWS, columns), 1)
    return cute.slice_(layout, (None, None, 0))


def forward_storage(shape: ForwardShape, layouts: ForwardLayouts, barrier_words: int, dtype: type) -> type:
    q_elements, o_elements = cute.cosize(layouts.q), cute.cosize(layouts.o)
    if shape.shared_output:
        q_elements, o_elements = max(q_elements, o_elements), 0
    ring_elements = shape.tile.stages * shape.slot_elements

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, barrier_words]
        tmem_address: cute.struct.MemRange[Int32, 4]
        factors: cute.struct.MemRange[Float32, shape.tile.tile_m]
        q: cute.struct.Align[cute.struct.MemRange[dtype, q_elements], SWIZZLE_ALIGN]
        o: cute.struct.Align[cute.struct.MemRange[dtype, o_elements], SWIZZLE_ALIGN]
        ring: cute.struct.Align[cute.struct.MemRange[dtype, ring_elements], SWIZZLE_ALIGN]

    return Storage


def _columns(base: cute.Pointer, column: int, count: int) -> cute.Tensor:
    return cute.make_tensor(base + column, cute.make_layout((ROWS, count), stride=(LANE, 1)))


def _registers(registers: cute.Tensor, first: int, shape: tuple) -> cute.Tensor:
    return cute.make_tensor(registers.iterator + first, cute.make_layout(shape))


def load_columns(base: cute.Pointer, column: int, registers: cute.Tensor, first: int, count: int, thread: Int32):
    """This thread's row: `count` columns of tensor memory into registers[first:]. Fence before reading them."""
    source = _columns(base, column, count)
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(count))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, registers.element_type), source)
    part = copy.get_slice(thread)
    shape = part.partition_D(cute.make_identity_tensor((ROWS, count))).shape
    cute.copy(copy, part.partition_S(source), _registers(registers, first, shape))


def store_columns(base: cute.Pointer, column: int, registers: cute.Tensor, first: int, count: int, thread: Int32):
    target = _columns(base, column, count)
    op = tcgen05.St32x32bOp(tcgen05.Repetition(count))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, registers.element_type), target)
    part = copy.get_slice(thread)
    shape = part.partition_S(cute.make_identity_tensor((ROWS, count))).shape
    cute.copy(copy, _registers(registers, first, shape), part.partition_D(target))
