"""WHICH NEXT: the load warp draws the CTA's next unit from a counter and tells all other warps through a ring."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32

from .memory import TICKET_SLOTS, TICKET_WORDS


class UnitRing(NamedTuple):
    pipe: pipelines.PipelineAsync
    words: cute.Tensor  # (TICKET_WORDS, TICKET_SLOTS) Int32: is there a unit, then what describes it


def open_units(barriers: cute.Pointer, words: cute.Pointer, warps: int) -> UnitRing:
    """`warps` receive, each by one arrival."""
    pipe = pipelines.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=TICKET_SLOTS,
        producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread),
        consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, warps),
        defer_sync=True,
    )
    return UnitRing(pipe, cute.make_tensor(words, cute.make_layout((TICKET_WORDS, TICKET_SLOTS))))


def unit_states(role: pipelines.PipelineUserType) -> pipelines.PipelineState:
    return pipelines.make_pipeline_state(role, TICKET_SLOTS)


@cute.jit
def announce(ring: UnitRing, state: pipelines.PipelineState, ticket: tuple):
    """By the load warp. `ticket`: at most TICKET_WORDS integers. -> the state, moved on"""
    ring.pipe.producer_acquire(state)
    with cute.arch.elect_one():
        words = ring.words[None, state.index]
        for i in cutlass.range_constexpr(len(ticket)):
            words[i] = ticket[i]
        ring.pipe.producer_commit(state)
    state.advance()
    return state


@cute.jit
def receive(ring: UnitRing, state: pipelines.PipelineState):
    """By a whole warp. -> (the ticket, the state moved on)"""
    ring.pipe.consumer_wait(state)
    words = ring.words[None, state.index]
    ticket = tuple(cute.arch.make_warp_uniform(words[i]) for i in range(TICKET_WORDS))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ring.pipe.consumer_release(state)
    state.advance()
    return ticket, state


@cute.jit
def draw(counter: cute.Tensor, which: int) -> Int32:
    """How often was drawn before, one number for the warp."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(counter.iterator + which, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(number, 0)
