"""wgmma: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.

A warpgroup has 64 keys: the accumulators of S^T and dP^T, rounded, are the A operands of dV and dK without leaving the
registers. dQ sums over the keys of all warpgroups, so dS goes through shared memory, and each takes part of dQ: its 64
rows where a tile has 128, else its half of the columns.
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
from .memory import BackwardLayouts, KeyLayouts, transposed

SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class BackwardMmas:
    """The tiled MMAs, made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    tile: Tile
    width_qk: int
    width_v: int
    width_dq: int  # of K and dQ: see tiles.dq_width
    dtype: type
    dp_parts: int = 1  # of the queries of dP^T, one after the other
    alternate: bool = False  # a warpgroup makes all of dQ, the other that of the next tile

    @property
    def warpgroups(self) -> int:
        return self.tile.tile_n // ROWS_PER_WARPGROUP

    @property
    def dq_by_rows(self) -> bool:
        return self.tile.tile_m == ROWS_PER_WARPGROUP * self.warpgroups

    @property
    def dq_transposed(self) -> bool:
        """Is dQ^T = K^T dS^T made, which has a multiple of 64 rows whatever the tile has?"""
        return self.tile.tile_m % ROWS_PER_WARPGROUP != 0

    @property
    def dq_columns(self) -> int:
        """Of one warpgroup's part of dQ, which has 64 rows, or all where it is transposed."""
        return self.width_dq if self.dq_by_rows or self.alternate else self.width_dq // self.warpgroups

    @property
    def dq_parts(self) -> int:
        if self.dq_transposed:
            return self.warpgroups
        return self.tile.tile_m * self.width_dq // (ROWS_PER_WARPGROUP * self.dq_columns)

    def scores(self) -> cute.TiledMma:
        """Of S^T and of dP^T: (tile_n, tile_m) from shared memory."""
        layout, shape = (self.warpgroups, 1, 1), (ROWS_PER_WARPGROUP, self.tile.tile_m)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_MAJOR, K_MAJOR, Float32, layout, shape, SMEM)

    def gradients(self) -> cute.TiledMma:
        """Of a part of dP^T: (tile_n, tile_m / dp_parts) from shared memory."""
        layout, shape = (self.warpgroups, 1, 1), (ROWS_PER_WARPGROUP, self.tile.tile_m // self.dp_parts)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_MAJOR, K_MAJOR, Float32, layout, shape, SMEM)

    def by_keys(self, width: int) -> cute.TiledMma:
        """Of dK and dV: (tile_n, width), A from registers."""
        layout, shape = (self.warpgroups, 1, 1), (ROWS_PER_WARPGROUP, width)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_MAJOR, MN_MAJOR, Float32, layout, shape, RMEM)

    def dq(self) -> cute.TiledMma:
        """(tile_m, width_dq), or its transpose, from shared memory."""
        if self.dq_transposed:
            layout, shape = (self.warpgroups, 1, 1), (ROWS_PER_WARPGROUP, self.tile.tile_m)
            return hopper.make_trivial_tiled_mma(
                self.dtype, self.dtype, MN_MAJOR, K_MAJOR, Float32, layout, shape, SMEM
            )
        layout = (self.warpgroups, 1, 1) if self.dq_by_rows else (1, self.warpgroups, 1)
        if self.alternate:
            layout = (1, 1, 1)
        shape = (ROWS_PER_WARPGROUP, self.dq_columns)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, MN_MAJOR, MN_MAJOR, Float32, layout, shape, SMEM)


class Operands(NamedTuple):
    """Shared-memory descriptors of one warpgroup; the last mode counts slots."""

    k: cute.Tensor  # A of S^T
    v: cute.Tensor  # A of dP^T
    q: cute.Tensor  # B of S^T
    do: cute.Tensor  # B of dP^T
    q_columns: cute.Tensor  # B of dK
    do_columns: cute.Tensor  # B of dV
    ds: cute.Tensor  # A of dQ, or B of dQ^T
    k_columns: cute.Tensor  # B of dQ, or A of dQ^T


class Accumulators(NamedTuple):
    """Registers of one warpgroup, float32 but for the packed ones."""

    s: cute.Tensor  # ((2, 2, tile_m / 8), 1, 1): scores, then probabilities
    dp: cute.Tensor  # the same shape
    dq: cute.Tensor  # ((2, 2, dq_columns / 8), 1, 1)
    dk: cute.Tensor  # ((2, 2, width_qk / 8), 1, 1)
    dv: cute.Tensor  # ((2, 2, width_v / 8), 1, 1)
    p_packed: cute.Tensor  # (tile_m / 4,) Int32: P^T rounded, two values each, in the order of s
    ds_packed: cute.Tensor  # the same of dS^T


def make_operands(mmas: BackwardMmas, rooms: BackwardLayouts, group: Int32) -> Operands:
    """`group`, warp-uniform, stands for its first thread: descriptors are then formed in uniform registers."""
    s_k, s_v, s_q, s_do, s_ds = rooms
    first = group * WARPGROUP
    scores, dk, dv, dq = mmas.scores(), mmas.by_keys(mmas.width_qk), mmas.by_keys(mmas.width_v), mmas.dq()
    part, dq_part = scores.get_slice(first), dq.get_slice(0 if mmas.alternate else first)
    if mmas.dq_transposed:
        ds = dq.make_fragment_B(dq_part.partition_B(s_ds))
        k_columns = dq.make_fragment_A(dq_part.partition_A(transposed(s_k)))
    else:
        ds = dq.make_fragment_A(dq_part.partition_A(s_ds))
        k_columns = dq.make_fragment_B(dq_part.partition_B(transposed(s_k)))
    return Operands(
        k=scores.make_fragment_A(part.partition_A(s_k)),
        v=scores.make_fragment_A(part.partition_A(s_v)),
        q=scores.make_fragment_B(part.partition_B(s_q)),
        do=scores.make_fragment_B(part.partition_B(s_do)),
        q_columns=dk.make_fragment_B(dk.get_slice(first).partition_B(transposed(s_q))),
        do_columns=dv.make_fragment_B(dv.get_slice(first).partition_B(transposed(s_do))),
        ds=ds,
        k_columns=k_columns,
    )


def make_accumulators(mmas: BackwardMmas) -> Accumulators:
    tile = mmas.tile

    def registers(tiled: cute.TiledMma, shape: tuple[int, int]) -> cute.Tensor:
        return cute.make_rmem_tensor(tiled.get_slice(0).partition_shape_C(shape), Float32)

    return Accumulators(
        s=registers(mmas.scores(), (tile.tile_n, tile.tile_m)),
        dp=registers(mmas.scores(), (tile.tile_n, tile.tile_m)),
        dq=registers(mmas.dq(), (mmas.width_dq, tile.tile_m) if mmas.dq_transposed else (tile.tile_m, mmas.width_dq)),
        dk=registers(mmas.by_keys(mmas.width_qk), (tile.tile_n, mmas.width_qk)),
        dv=registers(mmas.by_keys(mmas.width_v), (tile.tile_n, mmas.width_v)),
        p_packed=cute.make_rmem_tensor((tile.tile_m // 4,), Int32),
        ds_packed=cute.make_rmem_tensor((tile.tile_m // 4,), Int32),
    )


def as_operand(packed: cute.Tensor, dtype: type) -> cute.Tensor:
    """A packed S^T fragment, read four columns at a time, is an A fragment: no shuffle, no shared memory."""
    layout = cute.make_layout(((2, 2, 2), 1, cute.size(packed) // 4), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=dtype), layout)


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, add: cutlass.Constexpr[bool]):
    """acc = a b, or acc += a b; one commit group. The caller waits. a, b: (mma, m or n, k steps); a may have more
    steps, of zeros."""
    mma.set(warpgroup.Field.ACCUMULATE, add)
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(b, mode=[2])):
        cute.gemm(mma, acc, a[None, None, step], b[None, None, step], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


class KeyOperands(NamedTuple):
    """Of a warpgroup where no dQ is made; the last mode counts slots."""

    k: cute.Tensor  # A of S^T
    v: cute.Tensor  # A of dP^T
    q: cute.Tensor  # B of S^T
    do: cute.Tensor  # B of dP^T: (mma, parts, k steps, slots)
    q_columns: cute.Tensor  # B of dK
    do_columns: cute.Tensor  # B of dV


class KeyAccumulators(NamedTuple):
    """Registers, as in Accumulators."""

    s: cute.Tensor
    dp: cute.Tensor  # of one part
    dk: cute.Tensor
    dv: cute.Tensor
    p_packed: cute.Tensor
    ds_packed: cute.Tensor


def make_key_operands(mmas: BackwardMmas, rooms: KeyLayouts, group: Int32) -> KeyOperands:
    s_k, s_v, s_q, s_do = rooms
    first = group * WARPGROUP
    scores, gradients, dk, dv = (
        mmas.scores(), mmas.gradients(), mmas.by_keys(mmas.width_qk), mmas.by_keys(mmas.width_v)
    )  # fmt: skip
    part = scores.get_slice(first)
    return KeyOperands(
        k=scores.make_fragment_A(part.partition_A(s_k)),
        v=scores.make_fragment_A(part.partition_A(s_v)),
        q=scores.make_fragment_B(part.partition_B(s_q)),
        do=gradients.make_fragment_B(gradients.get_slice(first).partition_B(s_do)),
        q_columns=dk.make_fragment_B(dk.get_slice(first).partition_B(transposed(s_q))),
        do_columns=dv.make_fragment_B(dv.get_slice(first).partition_B(transposed(s_do))),
    )


def make_key_accumulators(mmas: BackwardMmas) -> KeyAccumulators:
    tile = mmas.tile

    def registers(tiled: cute.TiledMma, columns: int) -> cute.Tensor:
        return cute.make_rmem_tensor(tiled.get_slice(0).partition_shape_C((tile.tile_n, columns)), Float32)

    return KeyAccumulators(
        s=registers(mmas.scores(), tile.tile_m),
        dp=registers(mmas.gradients(), tile.tile_m // mmas.dp_parts),
        dk=registers(mmas.by_keys(mmas.width_qk), mmas.width_qk),
        dv=registers(mmas.by_keys(mmas.width_v), mmas.width_v),
        p_packed=cute.make_rmem_tensor((tile.tile_m // 4,), Int32),
        ds_packed=cute.make_rmem_tensor((tile.tile_m // 4,), Int32),
    )


def block_of(descriptors: cute.Tensor, block: int, slot: Int32) -> cute.Tensor:
    """Of (mma, blocks, k steps, slots), one block of a slot: (mma, 1, k steps)."""
    chosen = descriptors[None, block, None, slot]
    steps = cute.append(cute.make_layout((1, 1), stride=(0, 0)), cute.select(chosen.layout, mode=[1]))
    return cute.make_tensor(chosen.iterator, steps)


def part_of(fragment: cute.Tensor, part: int, parts: int) -> cute.Tensor:
    """One of equal runs of the columns of an accumulator, or of what was packed from it."""
    size = cute.size(fragment) // parts
    layout = cute.make_layout(size)
    if cute.rank(fragment) > 1:
        layout = cute.make_layout(((2, 2, size // 4), 1, 1))
    return cute.make_tensor(fragment.iterator + part * size, layout)
