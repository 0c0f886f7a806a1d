"""WHERE: the shared memory of a backward CTA, and the scratch in global memory.

sK      (tile_n, width_dq)
sV      (tile_n, width_v)
sQ      (tile_m, width_qk, stages)     ring
sdO     (tile_m, width_v, stages)      ring
sRows   (tile_m, 2, stages)            float32: LSE in base 2 and delta of the rows of sQ, a ring with it
sdS     (tile_m, tile_n, DS_SLOTS)     queries contiguous, as the wgmma that makes dS^T leaves them
sdQ     (64 * columns, parts)          float32, in the order of the registers: see dq_chunks
sZeros  (ZEROS,)                       float32

Every operand lies once and is read both ways: K is the A operand (keys x width) of S^T = K Q^T, and the B operand
(width x keys) of dQ = dS K; likewise Q and dO.
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum

from cute_flash.spec.plan import Tile

from ..memory import SWIZZLE_ALIGN
from ..schedule import WARPGROUP

TICKET_SLOTS, TICKET_WORDS = 2, 8  # of the ring in which a CTA's next unit is announced: see queue.py


def zeros_of(tile: Tile) -> int:
    """Floats that are stored again and again over the sums of later units, see zeros.py: 8 kB, or what is left."""
    return 256 if tile.tile_m % 64 else 2048


DS_SLOTS = 2  # a warpgroup may store its next dS while another still multiplies the last one


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, columns, head, batch)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def row_layout(rows: int, width: int, columns: int, slots: int, dtype: type) -> cute.ComposedLayout:
    """(rows, width, slots), columns contiguous, of which a warpgroup multiplies `columns`: whole swizzle atoms, of 64
    elements where that divides them, else of 32."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW64 if columns % 64 else warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, width, slots), order=(0, 1, 2))


class BackwardLayouts(NamedTuple):
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout


def backward_layouts(tile: Tile, widths: tuple[int, int, int], dq_columns: int, dtype: type) -> BackwardLayouts:
    """`widths`: (width_qk, width_v, width_dq); dq_columns: of a warpgroup's part of dQ."""
    width_qk, width_v, width_dq = widths
    ds = hopper.make_smem_layout_a(LayoutEnum.COL_MAJOR, (tile.tile_m, width_dq, tile.tile_n), dtype, DS_SLOTS)
    if tile.tile_m % 64:
        ds = row_layout(tile.tile_m, tile.tile_n, tile.tile_n, DS_SLOTS, dtype)  # keys contiguous
    return BackwardLayouts(
        k=row_layout(tile.tile_n, width_dq, dq_columns, 1, dtype),
        v=row_layout(tile.tile_n, width_v, width_v, 1, dtype),
        q=row_layout(tile.tile_m, width_qk, width_qk, tile.stages, dtype),
        do=row_layout(tile.tile_m, width_v, width_v, tile.stages, dtype),
        ds=ds,
    )


class TransposedLayouts(NamedTuple):
    """Of a CTA with 96 keys, where P and dS pass through shared memory and dK and dV are made transposed."""

    k: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    do: cute.ComposedLayout
    p: cute.ComposedLayout  # (tile_n, tile_m, 1): P^T
    ds: cute.ComposedLayout  # the same of dS^T


def transposed_layouts(tile: Tile, widths: tuple[int, int, int], do_slots: int, dtype: type) -> TransposedLayouts:
    """`widths`: (width_qk, width_v, columns of a warpgroup's part of dQ)."""
    width_qk, width_v, dq_columns = widths
    weights = row_layout(tile.tile_n, tile.tile_m, tile.tile_m, 1, dtype)
    return TransposedLayouts(
        k=row_layout(tile.tile_n, width_qk, dq_columns, 1, dtype),
        v=row_layout(tile.tile_n, width_v, width_v, 1, dtype),
        q=row_layout(tile.tile_m, width_qk, 64, tile.stages, dtype),
        do=row_layout(tile.tile_m, width_v, 64, do_slots, dtype),
        p=weights,
        ds=weights,
    )


def storage_of(layouts: NamedTuple, dtype: type, row_values: int, floats: dict[str, int]) -> type:
    """Of any of these layouts: barriers, tickets and a ring of row values; a room for each layout and of `floats`."""

    def room(kind: type, elements: int):
        return cute.struct.Align[cute.struct.MemRange[kind, elements], SWIZZLE_ALIGN]

    slots = {name: slots_of(getattr(layouts, name)) for name in ("k", "v", "q", "do")}
    fields = {f"{name}_barriers": cute.struct.MemRange[Int64, 2 * count] for name, count in slots.items()}
    fields["unit_barriers"] = cute.struct.MemRange[Int64, 2 * TICKET_SLOTS]
    fields["units"] = cute.struct.MemRange[Int32, TICKET_WORDS * TICKET_SLOTS]
    if row_values:
        values = cute.struct.MemRange[Float32, row_values * slots["q"]]
        fields["rows"] = cute.struct.Align[values, 16]
    fields |= {name: room(dtype, cute.cosize(layout)) for name, layout in layouts._asdict().items()}
    fields |= {name: room(Float32, count) for name, count in floats.items()}
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def slots_of(layout: cute.ComposedLayout) -> int:
    return cute.size(layout, mode=[2])


def rooms_of(storage, layouts: NamedTuple) -> NamedTuple:
    """The tensors in the place of their layouts."""

    def room(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
        return getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)

    return type(layouts)(**{name: room(name, layout) for name, layout in layouts._asdict().items()})


class KeyLayouts(NamedTuple):
    """Of a CTA with 128 keys that makes no dQ."""

    k: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    do: cute.ComposedLayout


def key_layouts(tile: Tile, width_qk: int, width_v: int, dtype: type) -> KeyLayouts:
    return KeyLayouts(
        k=row_layout(tile.tile_n, width_qk, width_qk, 1, dtype),
        v=row_layout(tile.tile_n, width_v, width_v, 1, dtype),
        q=row_layout(tile.tile_m, width_qk, width_qk, tile.stages, dtype),
        do=row_layout(tile.tile_m, width_v, width_v, tile.stages, dtype),
    )


class WideLayouts(NamedTuple):
    """Of a CTA with 64 keys, whose warpgroups share out the columns of dK and dV, and that makes no dQ."""

    k: cute.ComposedLayout  # (tile_n, width_qk, 1)
    v: cute.ComposedLayout  # (tile_n, width_v, 1)
    q: cute.ComposedLayout  # (tile_m, width_qk, stages)
    do: cute.ComposedLayout  # (tile_m, width_v, stages)
    p: cute.ComposedLayout  # (tile_n, tile_m, 2): P^T
    ds: cute.ComposedLayout  # the same of dS^T


def wide_layouts(tile: Tile, width_qk: int, width_v: int, warpgroups: int, dtype: type) -> WideLayouts:
    part_qk, part_v = width_qk // warpgroups, width_v // warpgroups
    weights = row_layout(tile.tile_n, tile.tile_m, tile.tile_m, DS_SLOTS, dtype)
    return WideLayouts(
        k=row_layout(tile.tile_n, width_qk, width_qk, 1, dtype),
        v=row_layout(tile.tile_n, width_v, width_v, 1, dtype),
        q=row_layout(tile.tile_m, width_qk, part_qk, tile.stages, dtype),
        do=row_layout(tile.tile_m, width_v, part_v, tile.stages, dtype),
        p=weights,
        ds=weights,
    )


class RowLayouts(NamedTuple):
    """Of a CTA that owns query rows."""

    q: cute.ComposedLayout  # (tile_m, width_qk, 1)
    do: cute.ComposedLayout  # (tile_m, width_v, 1)
    k: cute.ComposedLayout  # (tile_n, width_qk, stages)
    v: cute.ComposedLayout  # (tile_n, width_v, 1)


def row_layouts(tile: Tile, width_qk: int, width_v: int, dtype: type) -> RowLayouts:
    return RowLayouts(
        q=row_layout(tile.tile_m, width_qk, width_qk, 1, dtype),
        do=row_layout(tile.tile_m, width_v, width_v, 1, dtype),
        k=row_layout(tile.tile_n, width_qk, width_qk, tile.stages, dtype),
        v=row_layout(tile.tile_n, width_v, width_v, 1, dtype),
    )


def transposed(smem: cute.Tensor) -> cute.Tensor:
    """(rows, columns, slots) seen as (columns, rows, slots): the same bytes, read along the other mode."""
    return cute.make_tensor(smem.iterator, cute.select(smem.layout, mode=[1, 0, 2]))


def dq_chunks(registers: int) -> cute.Layout:
    """Where a warpgroup's float32 accumulators lie in its part of dQ: (register % 4, register / 4, thread) -> element.

    Four registers of a thread are neighbours, then come the threads: every store is 16 bytes, with no bank conflict,
    and the part is one piece of memory for the bulk addition. grad/convert.py undoes it.
    """
    return cute.make_layout((4, registers // 4, WARPGROUP), stride=(1, 4 * WARPGROUP, 4))
