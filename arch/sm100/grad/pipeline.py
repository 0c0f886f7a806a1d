"""WHEN: who waits for whom. Every edge is a plain mbarrier; a waiter knows the phase by counting its own steps.

edge       slots      arrivals                          who waits, for what
k_full     1          load warp + tx bytes              MMA: K is there, to stay
v_full     1          load warp + tx bytes              MMA: V likewise
q_full     q slots    load warp + tx bytes              MMA: Q is there; weighing warps: the LSE and delta of its rows
q_free     q slots    commit of dK                      load: the slot may be filled. Row values were read before dS
do_full    do slots   load warp + tx bytes              MMA: dO is there
do_free    do slots   commit of dV                      load: the slot may be filled
s_full     1          commit of S^T                     weighing warps: S^T is there
p_ready    1          8 weighing warps                  MMA: P^T is there, in tensor memory
dp_full    1          commit of dP^T                    weighing warps: dP^T is there
ds_ready   1          8 weighing warps                  MMA: dS^T is there, in tensor memory and in shared memory
dq_full    1          commit of dQ                      reducing warps: dQ is there; weighing warps: sdS has been read
dq_free    1          4 reducing warps                  MMA: the columns of dQ may be written
sums_full  1          commit of everything              weighing warps: dK and dV may be read, sK and sV written

S^T needs no edge back: P^T over it says that it has been read, and products run in the order of issue; dS^T likewise
over dP^T.

named barrier      threads              meaning
DQ_STORED          128: reducing        a chunk of dQ is in shared memory, and the chunk before has been read from it
LEFT + half        128: weighing        dV (half 0) or dK (half 1) is in shared memory
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from ..pipeline import Edge
from ..schedule import WARPS_PER_GROUP
from .memory import BackwardShape
from .schedule import HALVES

DQ_STORED, LEFT = 1, 2  # ids; 0 belongs to __syncthreads


class Barriers(NamedTuple):
    k_full: cute.Pointer
    v_full: cute.Pointer
    q_full: cute.Pointer
    q_free: cute.Pointer
    do_full: cute.Pointer
    do_free: cute.Pointer
    s_full: cute.Pointer
    p_ready: cute.Pointer
    dp_full: cute.Pointer
    ds_ready: cute.Pointer
    dq_full: cute.Pointer
    dq_free: cute.Pointer
    sums_full: cute.Pointer


def edges(shape: BackwardShape) -> tuple[Edge, ...]:
    weighing = HALVES * WARPS_PER_GROUP
    return (
        Edge("k_full", 1, 1),
        Edge("v_full", 1, 1),
        Edge("q_full", shape.q_slots, 1),
        Edge("q_free", shape.q_slots, 1),
        Edge("do_full", shape.do_slots, 1),
        Edge("do_free", shape.do_slots, 1),
        Edge("s_full", 1, 1),
        Edge("p_ready", 1, weighing),
        Edge("dp_full", 1, 1),
        Edge("ds_ready", 1, weighing),
        Edge("dq_full", 1, 1),
        Edge("dq_free", 1, WARPS_PER_GROUP),
        Edge("sums_full", 1, 1),
    )


def barrier_count(shape: BackwardShape) -> int:
    return sum(edge.count for edge in edges(shape))


@cute.jit
def open_barriers(first: cute.Pointer, shape: cutlass.Constexpr[BackwardShape]) -> Barriers:
    """Initialised by one thread. The caller fences and synchronises the CTA."""
    thread, _, _ = cute.arch.thread_idx()
    table = edges(shape)
    starts = {edge.name: first + sum(other.count for other in table[:i]) for i, edge in enumerate(table)}
    if thread == 0:
        for edge in table:
            for i in cutlass.range_constexpr(edge.count):
                cute.arch.mbarrier_init(starts[edge.name] + i, edge.arrivals)
    return Barriers(**starts)
