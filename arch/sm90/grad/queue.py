"""WHICH NEXT: the load warp draws the CTA's next key tile from a counter and tells all other warps through a ring."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32

from ...common.blocks import RowTiles
from ...common.order import Sizes
from .memory import TICKET_SLOTS, TICKET_WORDS
from .schedule import Unit, unit_count, unit_of


class UnitRing(NamedTuple):
    pipe: pipelines.PipelineAsync
    words: cute.Tensor  # (TICKET_WORDS, TICKET_SLOTS) Int32: is it live, key_block, head_kv, batch, then RowTiles
    group: Int32  # query heads of a head of K and V


def open_units(barriers: cute.Pointer, words: cute.Tensor, warps: int, group: Int32) -> UnitRing:
    """`warps` receive, each by one arrival."""
    pipe = pipelines.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=TICKET_SLOTS,
        producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread),
        consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, warps),
        defer_sync=True,
    )
    return UnitRing(pipe, words, group)


@cute.jit
def announce(
    ring: UnitRing, state: pipelines.PipelineState, index: Int32, sizes: Sizes, shape: cutlass.Constexpr
) -> tuple:
    """By the load warp. `shape`: (tile, widths, mask), see unit_of. -> (does it exist, unit, the state moved on)"""
    tile, widths, mask = shape
    live = Int32(index < unit_count(sizes, tile))
    unit = unit_of(index, sizes, tile, widths, mask)
    ring.pipe.producer_acquire(state)
    with cute.arch.elect_one():
        words = ring.words[None, state.index]
        words[0] = live
        words[1], words[2], words[3] = unit.key_block, unit.head_kv, unit.batch
        words[4], words[5], words[6], words[7] = unit.tiles
        ring.pipe.producer_commit(state)
    state.advance()
    return live, unit, state


@cute.jit
def receive(ring: UnitRing, state: pipelines.PipelineState):
    """By a whole warp. -> (live, unit, the state moved on)"""
    ring.pipe.consumer_wait(state)
    words = ring.words[None, state.index]
    read = [cute.arch.make_warp_uniform(words[i]) for i in range(TICKET_WORDS)]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ring.pipe.consumer_release(state)
    state.advance()
    key_block, head_kv, batch = read[1:4]
    return read[0], Unit(key_block, head_kv, batch, head_kv * ring.group, ring.group, RowTiles(*read[4:])), state


def unit_states(role: pipelines.PipelineUserType) -> pipelines.PipelineState:
    return pipelines.make_pipeline_state(role, TICKET_SLOTS)


@cute.jit
def draw(counter: cute.Tensor) -> Int32:
    """How often was drawn before, one number for the warp."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(number, 0)
