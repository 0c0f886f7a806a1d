"""Sums of dQ start as zeros: whoever takes a unit stores those of a later one, by a warp with nothing else to do and
when the memory is idle; the kernel before would wait for the memory alone.

A piece (common/delta.Ahead) is zeroed by bulk stores from shared memory and then counted in the word of its head. Who
adds to a head waits for all of its pieces, once: they belong to units that were taken before.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Float32, Int32, Int64

from ...common.delta import Ahead, Scratch
from ...common.keyunits import Unit, index_from
from ..sequences import Table
from .queue import UnitRing, receive, unit_states


class Zeroing(NamedTuple):
    """Read-only; the scratch alone where no dQ is summed, or where its sums are zero before."""

    scratch: Scratch
    ahead: Ahead | None = None
    heads_kv: Int32 | None = None
    units: Int32 | None = None  # of the launch
    table: Table | None = None  # of packed sequences


def _word(zeroing: Zeroing, row: Int32):
    return (zeroing.scratch.zeroed.iterator + row).toint()


@cute.jit
def zero_role(zeroing: Zeroing, s_zeros: cute.Tensor, ring: UnitRing):
    """One warp. s_zeros: (floats,) in shared memory."""
    zeros = cute.make_rmem_tensor((4,), Float32)
    zeros.fill(0.0)
    fours = cute.make_tensor(s_zeros.iterator.align(16), cute.make_layout((4, cute.size(s_zeros) // 4)))
    for i in cutlass.range(cute.arch.lane_idx(), cute.size(s_zeros) // 4, 32, unroll=1):
        cute.autovec_copy(zeros, fours[None, i])
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    state = unit_states(pipelines.PipelineUserType.Consumer)
    ticket, state = receive(ring, state)
    while ticket[0] != 0:
        piece = index_from(ticket) + zeroing.ahead.distance
        if piece < zeroing.units:
            _zero_piece(zeroing, s_zeros, piece)
        ticket, state = receive(ring, state)


@cute.jit
def _zero_piece(zeroing: Zeroing, s_zeros: cute.Tensor, piece: Int32):
    ahead, sums, floats = zeroing.ahead, zeroing.scratch.dq, cute.size(s_zeros)
    size, query_tiles, _, _ = sums.shape
    row, within = piece // ahead.key_tiles, piece % ahead.key_tiles
    in_row, tiles = query_tiles * ahead.group, ahead.piece_tiles(query_tiles)
    first = cutlass.min(within * tiles, in_row)
    last = cutlass.min(first + tiles, in_row)
    start = sums.iterator + (Int64(row) * in_row + first) * size
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range((last - first) * (size // floats), unroll=1):
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                read_only_args=[
                    (start + Int64(i) * floats).toint(),
                    s_zeros.iterator.toint(),
                    Int32(floats * Float32.width // 8),
                ],
            )
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.inline_ptx("fence.proxy.async.global;")
    if cute.arch.lane_idx() == 0:
        cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[_word(zeroing, row)])


@cute.jit
def wait_zeroed(zeroing: Zeroing, unit: Unit):
    """Until all that is added to for a unit is zero."""
    row = unit.batch * zeroing.heads_kv + unit.head_kv
    pieces = zeroing.ahead.pieces_made(row)
    if pieces > 0 and unit.tiles.count > 0:
        seen = Int32(-1)
        while seen != pieces:
            seen = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];",
                write_only_types=[Int32],
                read_only_args=[_word(zeroing, row)],
            )
        cute.arch.inline_ptx("fence.proxy.async.global;")
