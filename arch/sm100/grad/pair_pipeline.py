"""WHEN, of a pair: as pipeline.py, but that the leader's MMA warp waits for both CTAs, and commits arrive in both.

edge            arrivals                          who waits, for what
k, v, k_columns one at the leader, tx bytes of    MMA: they are there, to stay
                both
q_rows,         likewise                          MMA: it is there
q_columns,
do_rows, ...
..._free        commit of the last product        load warps: it may be filled
rows_full       own load warp + tx bytes, 2 slots weighing warps: LSE and delta
rows_free       8 weighing warps, 2 slots         own load warp
s_full          commit of S^T                     weighing warps
p_ready         8 weighing warps of each          MMA
dp_full         commit of dP^T                    weighing warps
ds_ready        8 weighing warps of each          MMA: dS^T in tensor memory, and dS in the shared memory of both
dq_full         commit of dQ^T                    reducing warps; weighing warps: sdS of both CTAs has been read
dq_free         4 reducing warps of each          MMA: dP^T may be written, over dQ^T
sums_full       commit of everything              weighing warps
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from ..pipeline import Edge
from ..schedule import WARPS_PER_GROUP
from ..tiles import PAIR
from .pair_memory import ROW_SLOTS
from .schedule import HALVES


class PairBarriers(NamedTuple):
    k_full: cute.Pointer
    v_full: cute.Pointer
    k_columns_full: cute.Pointer
    q_rows_full: cute.Pointer
    q_rows_free: cute.Pointer
    q_columns_full: cute.Pointer
    q_columns_free: cute.Pointer
    do_rows_full: cute.Pointer
    do_rows_free: cute.Pointer
    do_columns_full: cute.Pointer
    do_columns_free: cute.Pointer
    rows_full: cute.Pointer
    rows_free: cute.Pointer
    s_full: cute.Pointer
    p_ready: cute.Pointer
    dp_full: cute.Pointer
    ds_ready: cute.Pointer
    dq_full: cute.Pointer
    dq_free: cute.Pointer
    sums_full: cute.Pointer


def edges() -> tuple[Edge, ...]:
    weighing = HALVES * WARPS_PER_GROUP
    many = {
        "rows_full": (ROW_SLOTS, 1),
        "rows_free": (ROW_SLOTS, weighing),
        "p_ready": (1, PAIR * weighing),
        "ds_ready": (1, PAIR * weighing),
        "dq_free": (1, PAIR * WARPS_PER_GROUP),
    }
    return tuple(Edge(name, *many.get(name, (1, 1))) for name in PairBarriers._fields)


def barrier_count() -> int:
    return sum(edge.count for edge in edges())


@cute.jit
def open_pair_barriers(first: cute.Pointer) -> PairBarriers:
    """Initialised by one thread. The caller fences and synchronises the pair."""
    thread, _, _ = cute.arch.thread_idx()
    table = edges()
    starts = {edge.name: first + sum(other.count for other in table[:i]) for i, edge in enumerate(table)}
    if thread == 0:
        for edge in table:
            for i in cutlass.range_constexpr(edge.count):
                cute.arch.mbarrier_init(starts[edge.name] + i, edge.arrivals)
    return PairBarriers(**starts)
