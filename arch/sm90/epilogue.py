"""O leaves: registers -> shared memory (stmatrix, in Q's room) -> TMA, each warpgroup its 64 rows. LSE goes direct."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from ..common.numeric import mul_rn, pack_fragment
from ..common.order import WorkTile
from ..common.rowstate import RowState, log_sum_exp
from .load import TmaSource, plane_of
from .mma import first_column, first_row, rows_view
from .pipeline import O_STORED
from .schedule import ROWS_PER_WARPGROUP, WARPGROUP


class OutputRoom(NamedTuple):
    smem: cute.Tensor  # (64, width_v, warpgroups)
    tma: TmaSource  # (seqlen_q, head_dim_v, heads_q, batch)


@dataclass(frozen=True)
class OutputShape:
    """What is fixed at trace time about the room."""

    width_v: int
    mma_threads: int


def registers_to_smem(o: cute.Tensor, room: cute.Tensor, thread: Int32, width_v: int, dtype: type):
    one_warpgroup = hopper.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (ROWS_PER_WARPGROUP, width_v),
        warpgroup.OperandSource.RMEM,
    )  # fmt: skip
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy = cute.make_tiled_copy_C(atom, one_warpgroup).get_slice(thread % WARPGROUP)
    packed = cute.make_rmem_tensor((cute.size(o) // 2,), Int32)
    pack_fragment(o, packed, dtype)
    rounded = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=dtype), o.layout)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(room))


@cute.jit
def store_output(o: cute.Tensor, out: OutputRoom, target: tuple, thread: Int32, shape: cutlass.Constexpr):
    """`target`: (work, the batch or a packed sequence's rows). Rows past their end and columns past head_dim_v are
    clipped by TMA. The store is left in flight."""
    work, place = target
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    storing = cute.arch.make_warp_uniform(thread // 32) % 4 == 0
    room = out.smem[None, None, group]
    if storing:
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the store of the tile before
    cute.arch.barrier(barrier_id=O_STORED + group, number_of_threads=WARPGROUP)
    registers_to_smem(o, room, thread, shape.width_v, out.smem.element_type)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=O_STORED + group, number_of_threads=WARPGROUP)
    if storing:
        rows = cute.local_tile(
            plane_of(out.tma, work.head, place),
            (ROWS_PER_WARPGROUP, shape.width_v),
            (work.m_block * (shape.mma_threads // WARPGROUP) + group, 0),
        )
        source, box = cpasync.tma_partition(
            out.tma.atom, 0, cute.make_layout(1), cute.group_modes(room, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(out.tma.atom, source, box)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def wait_output(thread: Int32):
    """The last store has read shared memory."""
    if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def _quad_transpose(words: list, thread: Int32) -> list:
    """Lane i of a quad holds word i of four groups; afterwards all four words of group i."""
    odd, upper = thread % 2 == 1, thread % 4 >= 2

    def exchange(low, high, chosen, offset: int):
        """Lanes with `chosen` keep `high` and give `low` away, the others the reverse. -> (of lower lane, of upper)"""
        taken = cute.arch.shuffle_sync_bfly(Int32(cutlass.select_(chosen, low, high)), offset=offset)
        return Int32(cutlass.select_(chosen, taken, low)), Int32(cutlass.select_(chosen, high, taken))

    first, second = exchange(words[0], words[1], odd, 1), exchange(words[2], words[3], odd, 1)
    even_half, odd_half = exchange(first[0], second[0], upper, 2), exchange(first[1], second[1], upper, 2)
    return [even_half[0], odd_half[0], even_half[1], odd_half[1]]


@cute.jit
def store_direct(o: cute.Tensor, rows: cute.Tensor, thread: Int32, row_start: Int32, dtype: cutlass.Constexpr):
    """rows (seqlen_q, head_dim_v): O from registers, 16 bytes a thread and store, where shared memory has no room.

    One address a row, then constants: two warps of a scheduler do this at the same time, and little else runs."""
    packed = cute.make_rmem_tensor((cute.size(o) // 2,), Int32)
    pack_fragment(o, packed, dtype)
    column = 8 * (thread % 4)
    for r in cutlass.range_constexpr(2):
        row = row_start + first_row(thread) + 8 * r
        place = cute.domain_offset((row, column), rows).iterator.toint()
        columns = Int32(cutlass.select_(row < rows.shape[0], rows.shape[1] - column, Int32(0)))
        for block in cutlass.range_constexpr(cute.size(packed) // 8):
            words = _quad_transpose([packed[r + 2 * (4 * block + g)] for g in range(4)], thread)
            cute.arch.inline_ptx(
                f"st.global.v4.b32 [{{$r0}} + {64 * block}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
                read_only_args=[place, *words],
                predicate=32 * block < columns,
            )


@cute.jit
def store_transposed(acc: cute.Tensor, rows: cute.Tensor, thread: Int32, place: tuple, dtype: cutlass.Constexpr):
    """The transpose of a warpgroup's fragment: rows of acc are columns of `rows` (seqlen, head_dim), 64 from place[1]
    on, its columns rows from place[0] on. 16 bytes a thread and store.

    movmatrix turns 8 x 8 tiles: a thread then holds two neighbouring columns of a row, and four of them exchange
    theirs of two rows and of the two tiles that lie side by side.
    """
    packed = cute.make_rmem_tensor((cute.size(acc) // 2,), Int32)
    pack_fragment(acc, packed, dtype)
    quad, row_start, column = thread % 4, place[0] + thread % 32 // 4, place[1] + thread // 32 * 16
    row, column = row_start + quad // 2 * 8, column + quad % 2 * 8
    for pair in cutlass.range_constexpr(cute.size(packed) // 4):
        turned = [_transposed_tile(packed[4 * pair + i]) for i in range(4)]
        words = _quad_transpose(turned, thread)
        cute.arch.inline_ptx(
            "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[cute.domain_offset((row + 16 * pair, column), rows).iterator.toint(), *words],
            predicate=(row + 16 * pair < rows.shape[0]) & (column < rows.shape[1]),
        )


def _transposed_tile(word: Int32) -> Int32:
    """Of a warp's 8 x 8 tile of 16-bit values, two a lane."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[word])


@cute.jit
def store_lse(lse: cute.Tensor, state: RowState, work: WorkTile, thread: Int32, tile_m: int, scale_log2: Float32):
    """lse (batch, heads_q, seqlen_q). One lane of the four that share a row writes it."""
    rows = lse[work.batch, work.head, None]
    for r in cutlass.range_constexpr(2):
        row = work.m_block * tile_m + first_row(thread) + 8 * r
        if thread % 4 == 0 and row < rows.shape[0]:
            rows[row] = log_sum_exp(state.maximum[r], state.total[r], scale_log2)


@cute.jit
def store_state(partial: cute.Tensor, state: RowState, work: WorkTile, thread: Int32, tile_m: int, scale_log2: Float32):
    """partial (batch, heads_q, seqlen_q, 2) float32, (maximum, total): what common/combine.py wants of a split."""
    rows = partial[work.batch, work.head, None, None]
    for r in cutlass.range_constexpr(2):
        row = work.m_block * tile_m + first_row(thread) + 8 * r
        if thread % 4 == 0 and row < rows.shape[0]:
            rows[row, 0] = mul_rn(state.maximum[r], scale_log2)
            rows[row, 1] = state.total[r]


@cute.jit
def store_partial(o: cute.Tensor, partial: cute.Tensor, thread: Int32, row_start: Int32):
    """partial (seqlen_q, width_v) float32: O of one split, two neighbouring columns a store."""
    view = rows_view(o)  # (2, width_v / 4)
    for r in cutlass.range_constexpr(2):
        row = row_start + first_row(thread) + 8 * r
        if row < partial.shape[0]:
            for c in cutlass.range_constexpr(0, cute.size(view, mode=[1]), 2):
                target = cute.domain_offset((row, first_column(thread) + 4 * c), partial).iterator
                cute.arch.inline_ptx(
                    "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                    read_only_args=[target.toint(), view[r, c], view[r, c + 1]],
                )
