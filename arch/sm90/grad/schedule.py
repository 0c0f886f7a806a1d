"""WHO: one feeding warpgroup and the MMA warpgroups, and the registers each may hold.

warp of the feeding warpgroup    does
0                                TMA: K and V once, then Q with its row values and dO, a query tile at a time
1 + w                            adds the part of dQ that MMA warpgroup w left in shared memory to global memory
3                                zeroes sums of dQ that others will add to

Where they are added in turn, a warp waits for its turn and until its addition is complete for all to see, which takes
longer than a tile. Warps 1 to 3 then add by turns, and nobody zeroes: who comes first stores.
"""

from ..schedule import BUDGETS, Schedule

LOAD_WARP, FIRST_ADD_WARP, ZERO_WARP = 0, 1, 3
ADDERS = 3  # warps that add in turn


def backward_schedule(warpgroups: int) -> Schedule:
    load, mma = BUDGETS[warpgroups]
    return Schedule(warpgroups, load, mma, ping_pong=False)
