"""Backward on Hopper where key tiles are few: CTAs share one, each walks some of the query tiles that see it.

The longest key tile of a causal launch of one round has twice the query tiles of the mean, and all wait for its CTA.
Two halve it, and a group's heads have two each. All but the last leave their sums of dK and dV in float32, and that
one, which was drawn after them, adds them to its own, always in the same order: it waits for nobody who has not
started. dQ is added in any order.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.spec.scratch import SHARED_ALIGN

from ..common import delta
from ..common.keyunits import Unit
from ..common.order import Sizes
from ..common.turns import wait_for
from .backward import BackwardSm90, MmaContext
from .grad.units import SharedKeyUnits
from .tiles import SHARING_WARPS


class SharedBackwardSm90(BackwardSm90):
    """One Plan's kernel. Everything read here comes from the Plan."""

    key_units = SharedKeyUnits

    def extended(self, scratch: delta.Scratch, memory: cute.Tensor, sizes: Sizes) -> delta.Scratch:
        """With what two CTAs share, behind all else."""
        tile, rows = self.tile, (sizes.seqlen_q + self.tile.tile_m - 1) // self.tile.tile_m
        before = Int64(rows) * sizes.heads_q * sizes.batch * (tile.tile_m * (self.width_dq + 2) + 2)
        before = (before + SHARED_ALIGN - 1) // SHARED_ALIGN * SHARED_ALIGN
        key_tiles = (sizes.seqlen_k + tile.tile_n - 1) // tile.tile_n
        floats = tile.tile_n * (self.width_qk + self.width_v)
        units, others = (key_tiles, sizes.heads_kv, sizes.batch), self.units.shares(sizes) - 1
        left = Int64(floats) * others  # of a key tile
        strides = (1, floats, left, left * key_tiles, left * key_tiles * sizes.heads_kv)
        start = (memory.iterator + before).align(16)
        words = cute.recast_ptr(start + strides[4] * sizes.batch, dtype=Int32)
        return scratch._replace(
            shares=cute.make_tensor(start, cute.make_layout((floats, others, *units), stride=strides)),
            arrived=cute.make_tensor(words, cute.make_layout((SHARING_WARPS, *units))),
        )

    @cute.jit
    def hand_out(self, context: MmaContext, unit: Unit, rows: tuple, scale: Float32):
        acc, thread = context.acc, context.thread
        shares, arrived = context.shared
        place, warp = (unit.key_block, unit.head_kv, unit.batch), cute.arch.make_warp_uniform(thread // 32)
        rooms, arrived = shares[(None, None, *place)], arrived[(None, *place)]
        others = unit.shares - 1
        if unit.share < others:
            for which in cutlass.range_constexpr(2):
                sums, mine = self.pair(acc, rooms[None, unit.share], thread, which)
                for chunk in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                    cute.autovec_copy(sums[None, chunk], mine[None, chunk])
            tell(arrived, warp)
        else:
            wait_for(arrived, warp, others)
            for share in cutlass.range(others, unroll=1):
                for which in cutlass.range_constexpr(2):
                    sums, theirs = self.pair(acc, rooms[None, share], thread, which)
                    other = cute.make_rmem_tensor(sums.shape, Float32)
                    for chunk in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                        cute.autovec_copy(theirs[None, chunk], other[None, chunk])
                    sums.store(sums.load() + other.load())
            BackwardSm90.hand_out(self, context, unit, rows, scale)

    def pair(self, acc: NamedTuple, room: cute.Tensor, thread: Int32, which: int) -> tuple:
        """(sums, where those of this thread lie in what is shared), both (4, registers / 4), of dV or of dK. Sixteen
        bytes of a thread lie beside the next one's."""
        sums, before = (acc.dk, cute.size(acc.dv)) if which else (acc.dv, 0)
        threads, chunks = self.schedule.mma_threads, cute.size(sums) // 4
        place = (room.iterator + before * threads + thread * 4).align(16)
        mine = cute.make_tensor(place, cute.make_layout((4, chunks), stride=(1, 4 * threads)))
        return cute.make_tensor(sums.iterator, cute.make_layout((4, chunks))), mine


@cute.jit
def tell(arrived: cute.Tensor, warp: Int32):
    """By a warp: its part of what is shared lies in global memory."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[(arrived.iterator + warp).toint()]
        )
