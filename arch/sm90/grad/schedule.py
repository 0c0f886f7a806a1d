"""WHO: one feeding warpgroup and the MMA warpgroups, 64 keys each; the registers each may hold.

warp of the feeding warpgroup    does
0                                TMA: K and V once, then Q with its row values and dO, a query tile at a time
1 + w                            adds the part of dQ that MMA warpgroup w left in shared memory to global memory
"""

from ..schedule import BUDGETS, ROWS_PER_WARPGROUP, Schedule

__all__ = ["FIRST_ADD_WARP", "LOAD_WARP", "backward_schedule"]

LOAD_WARP, FIRST_ADD_WARP = 0, 1


def backward_schedule(tile_n: int) -> Schedule:
    count = tile_n // ROWS_PER_WARPGROUP
    load, mma = BUDGETS[count]
    return Schedule(count, load, mma, ping_pong=False)
