"""wgmma of the fused backward of wide heads: S = Q K^T, dP = dO V^T, dV^T += dO^T P, dK^T += Q^T dS, dQ = dS K.

A tile has 64 query rows and 96 keys, of which each of two warpgroups has 48 in S and dP. 96 keys are no multiple of
wgmma's 64 rows, but dV^T has head_dim rows: blocks of 64 columns of the head are shared out, each with all keys, and
where their number is odd the last is made by both, each for its own 48 keys. All operands come from shared memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_flash.spec.plan import Tile

from ..schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .memory import TransposedLayouts, transposed
from .mma import as_operand

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
BLOCK = 64  # columns of dV^T or dK^T: wgmma's M


@dataclass(frozen=True)
class TransposedMmas:
    """The tiled MMAs, made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    tile: Tile
    width_qk: int
    width_v: int
    dtype: type
    warpgroups: int = 2

    @property
    def keys(self) -> int:
        """Of a warpgroup in S and dP."""
        return self.tile.tile_n // self.warpgroups

    @property
    def dq_columns(self) -> int:
        return self.width_qk // self.warpgroups

    @property
    def dq_parts(self) -> int:
        return self.warpgroups

    def whole(self, width: int) -> int:
        """Blocks of dV^T or dK^T that a warpgroup has alone."""
        return width // BLOCK // self.warpgroups

    def shares(self, width: int) -> bool:
        """Is there another, of which each warpgroup has its own keys?"""
        return width // BLOCK % self.warpgroups != 0

    def _make(self, majors: tuple, warpgroups: int, columns: int, source=SMEM) -> cute.TiledMma:
        layout, shape = (1, warpgroups, 1), (ROWS_PER_WARPGROUP, columns)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, *majors, Float32, layout, shape, source)

    def scores(self) -> cute.TiledMma:
        """Of S and of dP: (tile_m, tile_n)."""
        return self._make((K_MAJOR, K_MAJOR), self.warpgroups, self.keys)

    def block(self, keys: int) -> cute.TiledMma:
        """Of a block of dV^T or dK^T: (64, keys)."""
        return self._make((MN_MAJOR, K_MAJOR), 1, keys)

    def dq(self) -> cute.TiledMma:
        """(tile_m, width_qk)."""
        return self._make((MN_MAJOR, MN_MAJOR), self.warpgroups, self.dq_columns)

    def dq_own(self) -> cute.TiledMma:
        """The same of the keys whose dS is in the warpgroup's registers."""
        return self._make((K_MAJOR, MN_MAJOR), self.warpgroups, self.dq_columns, RMEM)


class TransposedOperands(NamedTuple):
    """Shared-memory descriptors of one warpgroup; the last mode counts slots."""

    q: cute.Tensor  # A of S
    do: cute.Tensor  # A of dP
    k: cute.Tensor  # B of S
    v: cute.Tensor  # B of dP
    q_blocks: cute.Tensor  # A of dK^T: (mma, 1, k steps, blocks, slots)
    do_blocks: cute.Tensor  # A of dV^T, likewise
    p: cute.Tensor  # B of dV^T, all keys
    ds: cute.Tensor  # B of dK^T
    p_part: cute.Tensor  # B of dV^T, the warpgroup's keys
    ds_part: cute.Tensor  # B of dK^T
    ds_rows: cute.Tensor  # A of dQ
    k_columns: cute.Tensor  # B of dQ


class TransposedAccumulators(NamedTuple):
    """Registers of one warpgroup, float32 but for the packed ones."""

    s: cute.Tensor  # ((2, 2, keys / 8), 1, 1): scores, then probabilities
    dp: cute.Tensor  # the same shape
    dq: cute.Tensor  # ((2, 2, dq_columns / 8), 1, 1)
    dk: cute.Tensor  # (width_qk * tile_n / 256,): see pieces
    dv: cute.Tensor  # (width_v * tile_n / 256,)
    p_packed: cute.Tensor  # (keys / 2,) Int32: P rounded, two values each, in the order of s
    ds_packed: cute.Tensor  # the same of dS


def make_transposed_operands(mmas: TransposedMmas, rooms: TransposedLayouts, group: Int32) -> TransposedOperands:
    """rooms: tensors. `group`, warp-uniform, stands for its first thread: descriptors are then formed in uniform
    registers."""
    first = group * WARPGROUP
    scores, whole, part, dq = mmas.scores(), mmas.block(mmas.tile.tile_n), mmas.block(mmas.keys), mmas.dq()
    rows, dq_rows = scores.get_slice(first), dq.get_slice(first)

    def blocks(smem: cute.Tensor) -> cute.Tensor:
        columns = cute.local_tile(transposed(smem), (BLOCK, mmas.tile.tile_m), (None, 0, None))
        return whole.make_fragment_A(whole.get_slice(0).partition_A(columns))

    def own_keys(smem: cute.Tensor) -> cute.Tensor:
        keys = cute.local_tile(smem, (mmas.keys, mmas.tile.tile_m), (group, 0, None))
        return part.make_fragment_B(part.get_slice(0).partition_B(keys))

    return TransposedOperands(
        q=scores.make_fragment_A(rows.partition_A(rooms.q)),
        do=scores.make_fragment_A(rows.partition_A(rooms.do)),
        k=scores.make_fragment_B(rows.partition_B(rooms.k)),
        v=scores.make_fragment_B(rows.partition_B(rooms.v)),
        q_blocks=blocks(rooms.q),
        do_blocks=blocks(rooms.do),
        p=whole.make_fragment_B(whole.get_slice(0).partition_B(rooms.p)),
        ds=whole.make_fragment_B(whole.get_slice(0).partition_B(rooms.ds)),
        p_part=own_keys(rooms.p),
        ds_part=own_keys(rooms.ds),
        ds_rows=dq.make_fragment_A(dq_rows.partition_A(transposed(rooms.ds))),
        k_columns=dq.make_fragment_B(dq_rows.partition_B(transposed(rooms.k))),
    )


def make_transposed_accumulators(mmas: TransposedMmas) -> TransposedAccumulators:
    tile = mmas.tile

    def registers(tiled: cute.TiledMma, columns: int) -> cute.Tensor:
        return cute.make_rmem_tensor(tiled.get_slice(0).partition_shape_C((tile.tile_m, columns)), Float32)

    def sums(width: int) -> cute.Tensor:
        return cute.make_rmem_tensor((width * tile.tile_n // (mmas.warpgroups * WARPGROUP),), Float32)

    return TransposedAccumulators(
        s=registers(mmas.scores(), tile.tile_n),
        dp=registers(mmas.scores(), tile.tile_n),
        dq=registers(mmas.dq(), mmas.width_qk),
        dk=sums(mmas.width_qk),
        dv=sums(mmas.width_v),
        p_packed=cute.make_rmem_tensor((mmas.keys // 4,), Int32),
        ds_packed=cute.make_rmem_tensor((mmas.keys // 4,), Int32),
    )


class Piece(NamedTuple):
    """Of a warpgroup's sums: the accumulators of a block of 64 columns."""

    acc: cute.Tensor  # ((2, 2, keys / 8), 1, 1)
    block: Int32
    key: Int32  # its first, in the tile
    keys: int


def pieces(mmas: TransposedMmas, sums: cute.Tensor, width: int, group: Int32) -> list[Piece]:
    """sums: dk or dv of TransposedAccumulators."""
    found, whole, tile_n = [], mmas.whole(width), mmas.tile.tile_n

    def view(start: int, keys: int) -> cute.Tensor:
        return cute.make_tensor(sums.iterator + start, cute.make_layout(((2, 2, keys // 8), 1, 1)))

    for i in range(whole):
        found.append(Piece(view(i * tile_n // 2, tile_n), i * mmas.warpgroups + group, Int32(0), tile_n))
    if mmas.shares(width):
        last = Int32(width // BLOCK - 1)
        found.append(Piece(view(whole * tile_n // 2, mmas.keys), last, group * mmas.keys, mmas.keys))
    return found


@cute.jit
def issue_blocks(mmas: cutlass.Constexpr, found: list, blocks: cute.Tensor, weights: tuple):
    """All pieces += their blocks, times P or dS; one commit group. The caller waits.

    blocks: (mma, 1, k steps, blocks) of a slot; `weights`: (of all keys, of the warpgroup's), (mma, 1, k steps).
    """
    warpgroup.fence()
    for i in cutlass.range_constexpr(len(found)):
        piece = found[i]
        mma = mmas.block(piece.keys)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        a, b = blocks[None, None, None, piece.block], weights[0 if piece.keys == mmas.tile.tile_n else 1]
        for step in cutlass.range_constexpr(cute.size(b, mode=[2])):
            cute.gemm(mma, piece.acc, a[None, None, step], b[None, None, step], piece.acc)
    warpgroup.commit_group()


@cute.jit
def issue_dq_halves(mmas: cutlass.Constexpr, ops: TransposedOperands, acc: TransposedAccumulators, group: Int32):
    """dQ = dS K, the warpgroup's keys from registers, the other's from shared memory; one commit group."""
    own, other = mmas.dq_own(), mmas.dq()
    mine = as_operand(acc.ds_packed, mmas.dtype)
    ds_rows, k_columns = ops.ds_rows[None, None, None, 0], ops.k_columns[None, None, None, 0]
    steps = cute.size(mine, mode=[2])
    own.set(warpgroup.Field.ACCUMULATE, False)
    other.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for step in cutlass.range_constexpr(steps):
        cute.gemm(own, acc.dq, mine[None, None, step], k_columns[None, None, group * steps + step], acc.dq)
        own.set(warpgroup.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(steps):
        at = (1 - group) * steps + step
        cute.gemm(other, acc.dq, ds_rows[None, None, at], k_columns[None, None, at], acc.dq)
    warpgroup.commit_group()
