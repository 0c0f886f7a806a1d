"""wgmma for wide heads: S^T = K Q^T and dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, all from shared memory.

A CTA has 64 keys. Each warpgroup has them all: of S^T and dP^T its share of the queries, of dV and dK its share of the
columns, so that P^T and dS^T meet in shared memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from cute_flash.spec.plan import Tile

from ..schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .memory import WideLayouts, transposed

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class WideMmas:
    """The tiled MMAs, made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    tile: Tile
    width_qk: int
    width_v: int
    warpgroups: int
    dtype: type

    def _make(self, b_major: OperandMajorMode, columns: int) -> cute.TiledMma:
        layout, shape = (1, self.warpgroups, 1), (ROWS_PER_WARPGROUP, columns // self.warpgroups)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_MAJOR, b_major, Float32, layout, shape)

    def scores(self) -> cute.TiledMma:
        """Of S^T and of dP^T: (tile_n, tile_m)."""
        return self._make(K_MAJOR, self.tile.tile_m)

    def by_keys(self, width: int) -> cute.TiledMma:
        """Of dK and dV: (tile_n, width)."""
        return self._make(MN_MAJOR, width)


class WideOperands(NamedTuple):
    """Shared-memory descriptors of one warpgroup; the last mode counts slots."""

    k: cute.Tensor  # A of S^T
    v: cute.Tensor  # A of dP^T
    q: cute.Tensor  # B of S^T
    do: cute.Tensor  # B of dP^T
    q_columns: cute.Tensor  # B of dK
    do_columns: cute.Tensor  # B of dV
    p: cute.Tensor  # A of dV
    ds: cute.Tensor  # A of dK


class WideAccumulators(NamedTuple):
    """Registers of one warpgroup, float32 but for the packed ones."""

    s: cute.Tensor  # ((2, 2, tile_m / 8 / warpgroups), 1, 1): scores, then probabilities
    dp: cute.Tensor  # the same shape
    dk: cute.Tensor  # ((2, 2, width_qk / 8 / warpgroups), 1, 1)
    dv: cute.Tensor  # ((2, 2, width_v / 8 / warpgroups), 1, 1)
    p_packed: cute.Tensor  # (tile_m / 4 / warpgroups,) Int32: P^T rounded, two values each, in the order of s
    ds_packed: cute.Tensor  # the same of dS^T


def make_wide_operands(mmas: WideMmas, rooms: WideLayouts, group: Int32) -> WideOperands:
    """`group`, warp-uniform, stands for its first thread: descriptors are then formed in uniform registers."""
    first = group * WARPGROUP
    scores, dk, dv = mmas.scores(), mmas.by_keys(mmas.width_qk), mmas.by_keys(mmas.width_v)
    part, dk_part, dv_part = (tiled.get_slice(first) for tiled in (scores, dk, dv))
    return WideOperands(
        k=scores.make_fragment_A(part.partition_A(rooms.k)),
        v=scores.make_fragment_A(part.partition_A(rooms.v)),
        q=scores.make_fragment_B(part.partition_B(rooms.q)),
        do=scores.make_fragment_B(part.partition_B(rooms.do)),
        q_columns=dk.make_fragment_B(dk_part.partition_B(transposed(rooms.q))),
        do_columns=dv.make_fragment_B(dv_part.partition_B(transposed(rooms.do))),
        p=dv.make_fragment_A(dv_part.partition_A(rooms.p)),
        ds=dk.make_fragment_A(dk_part.partition_A(rooms.ds)),
    )


def make_wide_accumulators(mmas: WideMmas) -> WideAccumulators:
    tile = mmas.tile

    def registers(tiled: cute.TiledMma, columns: int) -> cute.Tensor:
        return cute.make_rmem_tensor(tiled.get_slice(0).partition_shape_C((tile.tile_n, columns)), Float32)

    packed = tile.tile_m // 4 // mmas.warpgroups
    return WideAccumulators(
        s=registers(mmas.scores(), tile.tile_m),
        dp=registers(mmas.scores(), tile.tile_m),
        dk=registers(mmas.by_keys(mmas.width_qk), mmas.width_qk),
        dv=registers(mmas.by_keys(mmas.width_v), mmas.width_v),
        p_packed=cute.make_rmem_tensor((packed,), Int32),
        ds_packed=cute.make_rmem_tensor((packed,), Int32),
    )
