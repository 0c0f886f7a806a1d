"""The load role: one warp moves Q once, then K and V tiles from the last to the first, through TMA.

V runs one tile behind K, the order in which the MMA warps ask for them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from ..common.blocks import KeyTiles
from .pipeline import ForwardPipelines, rank_in_cluster
from .schedule import CLUSTER


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, cols, head, batch): (cols, rows, ...) for V."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class TileCopy(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor  # (box, tiles)
    target: cute.Tensor  # (box, slots)


class SharedTiles(NamedTuple):
    """The same before it is known which part of a tile is asked for: CTAs of a cluster load one each."""

    atom: cute.CopyAtom
    source: cute.Tensor  # (tile, tiles)
    target: cute.Tensor  # (tile, slots)


def shared_tiles(
    tma: TmaSource, smem: cute.Tensor, tile: tuple[int, int], coord: tuple, head: Int32, batch: Int32
) -> SharedTiles:
    """Tiles of one head. `coord` keeps the mode that is walked as None."""
    tiles = cute.local_tile(tma.tensor[None, None, head, batch], tile, coord)
    return SharedTiles(tma.atom, cute.group_modes(tiles, 0, 2), cute.group_modes(smem, 0, 2))


def part_copy(tiles: SharedTiles, part: Int32 | int, parts: int) -> TileCopy:
    """Ready for TMA."""
    target, source = cpasync.tma_partition(tiles.atom, part, cute.make_layout(parts), tiles.target, tiles.source)
    return TileCopy(tiles.atom, source, target)


def tile_copy(
    tma: TmaSource, smem: cute.Tensor, tile: tuple[int, int], coord: tuple, head: Int32, batch: Int32
) -> TileCopy:
    return part_copy(shared_tiles(tma, smem, tile, coord, head, batch), 0, 1)


@cute.jit
def _fetch(
    pipe: pipelines.PipelineTmaAsync,
    state: pipelines.PipelineState,
    copy: TileCopy | SharedTiles,
    tile_index: Int32,
    together: Int32 | None,
):
    """A CTA of a cluster of `together` loads its part of the tile for all of them, or all parts where it is alone."""
    pipe.producer_acquire(state)
    barrier = pipe.producer_get_barrier(state)
    if cutlass.const_expr(together is None):
        cute.copy(copy.atom, copy.source[None, tile_index], copy.target[None, state.index], tma_bar_ptr=barrier)
    else:
        first, everyone = rank_in_cluster(), Int16((1 << together) - 1)
        for i in cutlass.range(CLUSTER // together, unroll=1):
            part = part_copy(copy, first + i, CLUSTER)
            source, target = part.source[None, tile_index], part.target[None, state.index]
            cute.copy(part.atom, source, target, tma_bar_ptr=barrier, mcast_mask=everyone)


@cute.jit
def prefetch(copy: TileCopy):
    """A tile into L2."""
    with cute.arch.elect_one():
        cute.prefetch(copy.atom, copy.source)


class Loads(NamedTuple):
    """Of one query tile; q.source has a single tile."""

    q: TileCopy
    k: TileCopy | SharedTiles
    v: TileCopy | SharedTiles
    together: Int32 | None  # see Sizes


@cute.jit
def load_first(
    pipes: ForwardPipelines, states: tuple, loads: Loads, tiles: KeyTiles, keys_first: cutlass.Constexpr[bool]
):
    """Q and the first K. These run in one converged warp. -> the states, moved on.

    `keys_first` where Q has one slot: K has a free one a step before the last scores are done with Q."""
    q_state, k_state, v_state = states
    q = loads.q
    if cutlass.const_expr(keys_first):
        _fetch(pipes.k, k_state, loads.k, tiles.last - 1, loads.together)
    pipes.q.producer_acquire(q_state)
    cute.copy(q.atom, q.source, q.target[None, q_state.index], tma_bar_ptr=pipes.q.producer_get_barrier(q_state))
    q_state.advance()
    if cutlass.const_expr(not keys_first):
        _fetch(pipes.k, k_state, loads.k, tiles.last - 1, loads.together)
    k_state.advance()
    return q_state, k_state, v_state


@cute.jit
def load_keys(pipes: ForwardPipelines, states: tuple, loads: Loads, first: Int32, last: Int32):
    """K of tiles [first, last) from the last to the first, each with the V after it."""
    q_state, k_state, v_state = states
    for step in cutlass.range(last - first, unroll=1):
        _fetch(pipes.k, k_state, loads.k, last - 1 - step, loads.together)
        k_state.advance()
        _fetch(pipes.v, v_state, loads.v, last - step, loads.together)
        v_state.advance()
    return q_state, k_state, v_state


@cute.jit
def load_last(pipes: ForwardPipelines, states: tuple, loads: Loads, tiles: KeyTiles):
    q_state, k_state, v_state = states
    _fetch(pipes.v, v_state, loads.v, tiles.first, loads.together)
    v_state.advance()
    return q_state, k_state, v_state
