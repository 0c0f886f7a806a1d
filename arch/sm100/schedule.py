"""WHO: a softmax warpgroup per query tile, one correction warpgroup, and single warps for the MMAs and the loads."""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32

from cute_flash.spec.plan import Tile

WARPGROUP = 128  # threads
ROWS = 128  # tcgen05's M: rows of a query tile, lanes of tensor memory, and threads that own one each
WARPS_PER_GROUP = 4  # arrivals: the first lane of each warp speaks for it
LEADER = 0  # rank in a pair of CTAs: its MMA warp issues the products of both


@dataclass(frozen=True)
class Schedule:
    query_tiles: int  # in flight in a CTA; with two, one's softmax runs under the other's matmuls
    softmax_registers: int
    correction_registers: int
    other_registers: int

    @property
    def correction_warp(self) -> int:
        """First of its four. A warp reaches the quarter of tensor memory's lanes that its number mod 4 names."""
        return WARPS_PER_GROUP * self.query_tiles

    @property
    def mma_warp(self) -> int:
        return self.correction_warp + WARPS_PER_GROUP

    @property
    def load_warp(self) -> int:
        return self.mma_warp + 1

    @property
    def threads(self) -> int:
        """The last warpgroup is padded with idle warps: setmaxnreg speaks to whole warpgroups."""
        return WARPGROUP * (self.query_tiles + 2)


class Run(NamedTuple):
    """The key tiles of one work tile, from the last to the first."""

    last: Int32  # the first step takes key tile last - 1
    steps: Int32
    skip: Int32  # steps that query tile 0 sits out at the start, 0 or 1: it sees one key tile less


# query tiles -> softmax, correction, other. 65536 registers are 512 a slot of 128 threads, and setmaxnreg counts in
# eights.
BUDGETS = {1: (232, 144, 128), 2: (184, 80, 64)}


def forward_schedule(tile: Tile) -> Schedule:
    query_tiles = tile.tile_m // ROWS
    return Schedule(query_tiles, *BUDGETS[query_tiles])
