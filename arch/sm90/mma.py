"""wgmma: S = Q K^T with both operands in shared memory, O += P V with P in registers."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_flash.spec.plan import Tile

from .schedule import ROWS_PER_WARPGROUP, WARPGROUP


@dataclass(frozen=True)
class ForwardMmas:
    """The two tiled MMAs, made anew where they are used: setting ACCUMULATE changes one, and no loop carries that."""

    tile: Tile
    width_v: int
    dtype: type

    def _make(self, b_major: OperandMajorMode, columns: int, source: warpgroup.OperandSource) -> cute.TiledMma:
        warpgroups = (self.tile.tile_m // ROWS_PER_WARPGROUP, 1, 1)
        instruction = (ROWS_PER_WARPGROUP, columns)
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, warpgroups, instruction, source
        )

    def qk(self, half: bool = False) -> cute.TiledMma:
        """`half`: of the first half of the keys."""
        columns = self.tile.tile_n // 2 if half else self.tile.tile_n
        return self._make(OperandMajorMode.K, columns, warpgroup.OperandSource.SMEM)

    def pv(self) -> cute.TiledMma:
        return self._make(OperandMajorMode.MN, self.width_v, warpgroup.OperandSource.RMEM)


class Fragments(NamedTuple):
    """What one warpgroup multiplies. q, k, v are shared-memory descriptors; the others are registers."""

    q: cute.Tensor  # (mma, 1, width_qk / 16, q_slots)
    k: cute.Tensor  # (mma, 1, width_qk / 16, stages)
    k_half: cute.Tensor  # the same of the first half of the keys
    v: cute.Tensor  # (mma, 1, tile_n / 16, stages)
    s: cute.Tensor  # ((2, 2, tile_n / 8), 1, 1) float32: scores, then probabilities
    p: cute.Tensor  # ((2, 2, 2), 1, tile_n / 16) 16-bit: the A operand of PV, a view of p_packed
    p_packed: cute.Tensor  # (tile_n / 4,) Int32: the same registers, two values each, in the order of s
    o: cute.Tensor  # ((2, 2, width_v / 8), 1, 1) float32, not yet divided by the row sum


def make_fragments(mmas: ForwardMmas, smem: tuple, group: Int32) -> Fragments:
    """`group`, warp-uniform, stands for its first thread: descriptors are then formed in uniform registers."""
    s_q, s_k, s_v = smem
    tile, tiled_qk, tiled_pv = mmas.tile, mmas.qk(), mmas.pv()
    qk, pv = tiled_qk.get_slice(group * WARPGROUP), tiled_pv.get_slice(group * WARPGROUP)
    tiled_half = mmas.qk(half=True)
    keys_half = cute.local_tile(s_k, (tile.tile_n // 2, s_k.shape[1], tile.stages), (0, 0, 0))
    s = cute.make_rmem_tensor(qk.partition_shape_C((tile.tile_m, tile.tile_n)), Float32)
    p_packed = cute.make_rmem_tensor((tile.tile_n // 4,), Int32)
    # the C fragment of S, read four columns at a time, is the A fragment of PV: no shuffle, no shared memory
    as_operand = cute.make_layout(((2, 2, 2), 1, tile.tile_n // 16), stride=((1, 2, 4), 0, 8))
    return Fragments(
        q=tiled_qk.make_fragment_A(qk.partition_A(s_q)),
        k=tiled_qk.make_fragment_B(qk.partition_B(s_k)),
        k_half=tiled_half.make_fragment_B(tiled_half.get_slice(group * WARPGROUP).partition_B(keys_half)),
        v=tiled_pv.make_fragment_B(pv.partition_B(s_v)),
        s=s,
        p=cute.make_tensor(cute.recast_ptr(p_packed.iterator, dtype=mmas.dtype), as_operand),
        p_packed=p_packed,
        o=cute.make_rmem_tensor(pv.partition_shape_C((tile.tile_m, mmas.width_v)), Float32),
    )


def rows_view(acc: cute.Tensor) -> cute.Tensor:
    """A wgmma accumulator as (row, column): a thread holds rows lane/4 and lane/4 + 8 of its warp's 16."""
    (_, _, eights) = acc.shape[0]
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, eights)), stride=(2, (1, 4))))


def first_half(acc: cute.Tensor) -> cute.Tensor:
    """The first half of a wgmma accumulator's columns, an accumulator itself."""
    (_, _, eights) = acc.shape[0]
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, 2, eights // 2), 1, 1), stride=((1, 2, 4), 0, 0)))


def first_row(thread: Int32) -> Int32:
    """Row of the tile that accumulator row 0 of this MMA thread stands for; row 1 is 8 below (PTX, wgmma D layout)."""
    return (thread // 32) * 16 + (thread % 32) // 4


def first_column(thread: Int32) -> Int32:
    """Column of accumulator column 0; column c is at + 8 * (c // 2) + c % 2."""
    return 2 * (thread % 4)


@cute.jit
def issue_scores(
    mmas: cutlass.Constexpr, frags: Fragments, q_slot: Int32, k_slot: Int32, half: cutlass.Constexpr[bool] = False
):
    """S = Q K^T, one commit group. The caller waits. `half`: only the first half of S."""
    mma, q = mmas.qk(half), frags.q[None, None, None, q_slot]
    k, s = frags.k[None, None, None, k_slot], frags.s
    if cutlass.const_expr(half):
        k, s = frags.k_half[None, None, None, k_slot], first_half(frags.s)
    mma.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(q, mode=[2])):
        cute.gemm(mma, s, q[None, None, step], k[None, None, step], s)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def issue_output(mmas: cutlass.Constexpr, frags: Fragments, slot: Int32):
    """O += P V, one commit group. O starts at zero, so that every step may accumulate."""
    mma, v = mmas.pv(), frags.v[None, None, None, slot]
    mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(frags.p, mode=[2])):
        cute.gemm(mma, frags.o, frags.p[None, None, step], v[None, None, step], frags.o)
    warpgroup.commit_group()
