"""WHEN: who waits for whom. Every edge is a plain mbarrier; a waiter knows the phase by counting its own steps.

edge          for each    arrivals                                   who waits, for what
q_full        query tile  load warp + tx bytes; packed: 4 softmax    MMA: Q is there
                          warps
q_free        query tile  commit of the last Q K^T                   load: the room of Q may be filled
ring_full     slot        load warp + tx bytes                       MMA: a chunk of K or V is there
ring_free     slot        commit of its last product                 load: the slot may be filled
s_full        S slot      commit of Q K^T                            softmax: S is there
p_ready       S slot      4 softmax warps, 4 correction warps        MMA: P begins, O is rescaled (or free, at first)
p_tail        S slot      4 softmax warps                            MMA: the last quarter of P is there
factor_full   query tile  4 softmax warps                            correction: the factors of the rows
factor_free   query tile  4 correction warps                         softmax: the factors have been read
o_full        query tile  commit of P V: of the last one, with a     correction: O may be read
                          single query tile of every one

In a pair of CTAs the leader's MMA warp waits for both: TMA of either arrives at the leader's q_full and ring_full, the
warps of both at its p_ready and p_tail (twice the arrivals), and commits arrive in both CTAs. Operands of products and
tensor memory cross, which tcgen05's fences order; no thread reads what a thread of the other CTA wrote.

S needs no edge back to the MMA warp: P over S says that S has been read, and products run in the order of issue. With
two query tiles s_full also says that O of the step before is complete, whose products were issued before; with one, the
next Q K^T is issued ahead of P V, and o_full says it.

named barrier     threads              meaning
O_STORED          128: correction      O of a query tile is in shared memory
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05

from .schedule import LEADER, WARPS_PER_GROUP
from .tiles import SCORE_SLOTS

O_STORED = 1  # id; 0 belongs to __syncthreads
BOTH = 0b11  # mask of the CTAs of a pair


class Barriers(NamedTuple):
    q_full: cute.Pointer
    q_free: cute.Pointer
    ring_full: cute.Pointer
    ring_free: cute.Pointer
    s_full: cute.Pointer
    p_ready: cute.Pointer
    p_tail: cute.Pointer
    factor_full: cute.Pointer
    factor_free: cute.Pointer
    o_full: cute.Pointer


@dataclass(frozen=True)
class Edge:
    name: str
    count: int  # barriers
    arrivals: int


def edges(query_tiles: int, slots: int, ctas: int = 1, packed: bool = False) -> tuple[Edge, ...]:
    warps = WARPS_PER_GROUP
    return (
        Edge("q_full", query_tiles, warps if packed else 1),
        Edge("q_free", query_tiles, 1),
        Edge("ring_full", slots, 1),
        Edge("ring_free", slots, 1),
        Edge("s_full", SCORE_SLOTS, 1),
        Edge("p_ready", SCORE_SLOTS, 2 * warps * ctas),
        Edge("p_tail", SCORE_SLOTS, warps * ctas),
        Edge("factor_full", query_tiles, warps),
        Edge("factor_free", query_tiles, warps),
        Edge("o_full", query_tiles, 1),
    )


def barrier_count(query_tiles: int, slots: int) -> int:
    """The same for one CTA and for each of a pair."""
    return sum(edge.count for edge in edges(query_tiles, slots))


@cute.jit
def open_barriers(first: cute.Pointer, shape: cutlass.Constexpr) -> Barriers:
    """Initialised by one thread. The caller fences and synchronises the CTAs."""
    thread, _, _ = cute.arch.thread_idx()
    table = edges(shape.query_tiles, shape.tile.stages, shape.ctas, shape.packed)
    starts = {edge.name: first + sum(other.count for other in table[:i]) for i, edge in enumerate(table)}
    if thread == 0:
        for edge in table:
            for i in cutlass.range_constexpr(edge.count):
                cute.arch.mbarrier_init(starts[edge.name] + i, edge.arrivals)
    return Barriers(**starts)


class Ring(NamedTuple):
    """A place in the K/V ring, or among the S slots. A ring's producer waits for the other phase: slots begin free."""

    slot: Int32
    phase: Int32


def ring_start() -> Ring:
    return Ring(Int32(0), Int32(0))


@cute.jit
def advanced(ring: Ring, slots: cutlass.Constexpr[int]) -> Ring:
    slot, phase = ring.slot + 1, ring.phase
    if slot == slots:
        slot, phase = Int32(0), phase ^ 1
    return Ring(slot, phase)


def commit(barrier: cute.Pointer, ctas: int):
    """Arrives, in both CTAs of a pair, when every product issued so far is done. One thread speaks for the warp."""
    with cute.arch.elect_one():
        if ctas == 1:
            tcgen05.commit(barrier)
        else:
            tcgen05.commit(barrier, BOTH, tcgen05.CtaGroup.TWO)


@cute.jit
def arrive_warp(barrier: cute.Pointer):
    """One arrival for a converged warp, after whatever its lanes did before."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def arrive_leader(barrier: cute.Pointer, ctas: cutlass.Constexpr[int]):
    """arrive_warp() at the CTA whose MMA warp waits."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(ctas == 1):
            cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.mbarrier_arrive(barrier, LEADER)


def rank_in_pair() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def leads(ctas: int) -> bool | Boolean:
    """Does the MMA warp of this CTA issue the products? A CTA alone does, which is known at compile time."""
    return ctas == 1 or rank_in_pair() == LEADER


@cute.jit
def expect_bytes(barrier: cute.Pointer, size: cutlass.Constexpr[int], ctas: cutlass.Constexpr[int]):
    """Before TMA writes. In a pair the leader speaks for both, and the copies of both arrive at its barrier."""
    if leads(ctas):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


def meet(ctas: int):
    """All threads of the CTAs that multiply together."""
    if ctas == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive(aligned=True)
        cute.arch.cluster_wait()


def before_arrive():
    """Orders this thread's accesses to tensor memory before an arrival."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_wait():
    """Orders this thread's accesses to tensor memory after a wait."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
