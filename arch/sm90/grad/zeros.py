"""Sums of dQ start as zeros: a CTA stores those of CTAs that start later, while nobody else wants the memory.

A piece (common/delta.Ahead) is zeroed by bulk stores from shared memory and then counted in the word of its head. Who
adds to a head waits for all of its pieces, once: their CTAs have all started before.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.delta import Ahead, Scratch
from .memory import ZEROS
from .schedule import Unit


class Zeroing(NamedTuple):
    """Read-only."""

    scratch: Scratch
    ahead: Ahead
    heads_kv: Int32
    units: Int32  # CTAs of the launch


def _word(zeroing: Zeroing, row: Int32):
    return (zeroing.scratch.zeroed.iterator + row).toint()


@cute.jit
def zero_role(zeroing: Zeroing, s_zeros: cute.Tensor, index: Int32):
    """One warp. index: of the CTA's unit; s_zeros: (ZEROS,) in shared memory."""
    ahead, lane = zeroing.ahead, cute.arch.lane_idx()
    piece = index + ahead.distance
    if piece < zeroing.units:
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        fours = cute.make_tensor(s_zeros.iterator.align(16), cute.make_layout((4, ZEROS // 4)))
        for i in cutlass.range(lane, ZEROS // 4, 32, unroll=1):
            cute.autovec_copy(zeros, fours[None, i])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        size, query_tiles, heads_q, _ = zeroing.scratch.dq.shape
        row, within = piece // ahead.key_tiles, piece % ahead.key_tiles
        tiles = ahead.tiles_of_piece(query_tiles)
        first = cutlass.min(within * tiles, query_tiles * ahead.group)
        last = cutlass.min(first + tiles, query_tiles * ahead.group)
        start = zeroing.scratch.dq.iterator + (Int64(row) * (query_tiles * ahead.group) + first) * size
        if lane == 0:
            for i in cutlass.range((last - first) * (size // ZEROS), unroll=1):
                target = start + Int64(i) * ZEROS
                cute.arch.inline_ptx(
                    "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                    read_only_args=[target.toint(), s_zeros.iterator.toint(), Int32(ZEROS * Float32.width // 8)],
                )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.inline_ptx("fence.proxy.async.global;")
        if lane == 0:
            cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[_word(zeroing, row)])


@cute.jit
def wait_zeroed(zeroing: Zeroing, unit: Unit):
    """Until all that this CTA adds to is zero."""
    ahead = zeroing.ahead
    row = unit.batch * zeroing.heads_kv + unit.head_kv
    pieces = cutlass.min(ahead.key_tiles, (row + 1) * ahead.key_tiles - ahead.distance)  # made by CTAs
    if pieces > 0:
        seen = Int32(-1)
        while seen != pieces:
            seen = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];",
                write_only_types=[Int32],
                read_only_args=[_word(zeroing, row)],
            )
        cute.arch.inline_ptx("fence.proxy.async.global;")
