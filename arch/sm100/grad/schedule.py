"""WHO: a warpgroup that carries dQ away, two that weigh scores, and single warps for the products and the loads.

warps    do
0-3      dQ: tensor memory -> shared memory -> added to global memory
4-7      P and dS of the first 64 query rows of every tile, a key each thread; at the end dV leaves
8-11     the same of the other 64; at the end dK leaves
12       issues the products
13       TMA: K and V once, then Q with its row values and dO, a query tile at a time
14, 15   nothing: setmaxnreg speaks to whole warpgroups
"""

from dataclasses import dataclass

from ..schedule import WARPGROUP, WARPS_PER_GROUP

HALVES = 2  # of a query tile's rows, a warpgroup each
REGISTERS = 120, 152, 88  # reduce, weigh, other: 65536 are 512 a slot of 128 threads, and setmaxnreg counts in eights


@dataclass(frozen=True)
class BackwardSchedule:
    reduce_registers: int = REGISTERS[0]
    weigh_registers: int = REGISTERS[1]
    other_registers: int = REGISTERS[2]

    first_weigh_warp = WARPS_PER_GROUP
    mma_warp = WARPS_PER_GROUP * (1 + HALVES)
    load_warp = mma_warp + 1
    threads = WARPGROUP * (2 + HALVES)
