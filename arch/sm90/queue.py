"""WHICH NEXT: the load warp decides what the CTA works on, and tells the MMA warps through a ring.

In a fixed order, there and back over the CTAs; or, where units are unequal, by drawing numbers from a counter in global
memory, which the last draw of a launch sets back to zero.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32

from ..common.order import Rounds, WorkTile
from ..common.ragged import Place, Rows
from .memory import TICKET_SLOTS


class Ticket(NamedTuple):
    live: Int32  # 0: there is nothing more to do
    work: WorkTile
    split: Int32
    place: Place | None = None  # of packed sequences, the one that the unit is of


class TicketRing(NamedTuple):
    pipe: pipelines.PipelineAsync
    words: cute.Tensor  # (TICKET_WORDS, TICKET_SLOTS) Int32: live, m_block, head, then batch and
    # split, or of packed sequences first row and rows of q, first row and rows of k; padding


def open_tickets(barriers: cute.Pointer, words: cute.Tensor, mma_threads: int) -> TicketRing:
    pipe = pipelines.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=TICKET_SLOTS,
        producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, 32),
        consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, mma_threads),
        defer_sync=True,
    )
    return TicketRing(pipe, words)


def ticket_states(role: pipelines.PipelineUserType) -> pipelines.PipelineState:
    return pipelines.make_pipeline_state(role, TICKET_SLOTS)


@cute.jit
def publish(ring: TicketRing, state: pipelines.PipelineState, ticket: Ticket):
    """By all lanes of the load warp. -> the state, moved on."""
    ring.pipe.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        words = ring.words[None, state.index]
        words[0] = ticket.live
        words[1], words[2] = ticket.work.m_block, ticket.work.head
        if cutlass.const_expr(ticket.place is None):
            words[3], words[4] = ticket.work.batch, ticket.split
        else:
            (words[3], words[4]), (words[5], words[6]) = ticket.place
    ring.pipe.producer_commit(state)
    state.advance()
    return state


@cute.jit
def receive(ring: TicketRing, state: pipelines.PipelineState, packed: cutlass.Constexpr[bool]):
    """By every MMA thread. -> (ticket, the state moved on)."""
    ring.pipe.consumer_wait(state)
    words = ring.words[None, state.index]
    read = [cute.arch.make_warp_uniform(words[i]) for i in range(7 if packed else 5)]
    ring.pipe.consumer_release(state)
    state.advance()
    if cutlass.const_expr(packed):
        place = Place(Rows(read[3], read[4]), Rows(read[5], read[6]))
        return Ticket(read[0], WorkTile(read[1], read[2], Int32(0)), Int32(0), place), state
    return Ticket(read[0], WorkTile(read[1], read[2], read[3]), read[4]), state


@cute.jit
def draw(counter: cute.Tensor, units: Int32) -> Int32:
    """The number drawn, one for the warp. A launch draws once for each unit: the last one leaves zero behind."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        if number == units - 1:
            counter[0] = Int32(0)
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def following_unit(rounds: Rounds, step: Int32, units: Int32, counter: cute.Tensor | None) -> Int32:
    """Index of the CTA's unit after its `step`-th; from `units` on there is none."""
    if cutlass.const_expr(counter is None):
        return rounds.unit(step + 1)
    return rounds.ctas + draw(counter, units)
