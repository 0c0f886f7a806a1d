"""WHO: one load warpgroup and two or three MMA warpgroups, and the registers each may hold."""

from dataclasses import dataclass

from cute_flash.spec.plan import Tile

WARPGROUP = 128  # threads
ROWS_PER_WARPGROUP = 64  # wgmma's M


@dataclass(frozen=True)
class Schedule:
    mma_warpgroups: int
    load_registers: int
    mma_registers: int
    ping_pong: bool  # warpgroups take turns issuing matmuls, so that one's softmax runs under another's matmuls

    @property
    def mma_threads(self) -> int:
        return self.mma_warpgroups * WARPGROUP

    @property
    def threads(self) -> int:
        return self.mma_threads + WARPGROUP

    @property
    def mma_warps(self) -> int:
        return self.mma_threads // 32


# MMA warpgroups -> registers a thread, by role. Both count in eights. A CTA starts with 65536 // threads registers a
# thread, rounded down to eight, and setmaxnreg only moves those: asking for more waits for ever.
BUDGETS = {1: (24, 232), 2: (24, 240), 3: (32, 160), 4: (24, 112)}


def forward_schedule(tile: Tile, width_v: int) -> Schedule:
    count = tile.tile_m // ROWS_PER_WARPGROUP
    load, mma = BUDGETS[count]
    return Schedule(count, load, mma, ping_pong=count > 1 and width_v <= 128)
