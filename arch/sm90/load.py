"""The load role: one warp moves Q once, then K and V tiles from the last to the first, through TMA.

V runs one tile behind K, the order in which the MMA warps ask for them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..common.blocks import KeyTiles
from ..common.ragged import Rows, sequence_plane
from .pipeline import ForwardPipelines


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, cols, head, batch): (cols, rows, ...) for V. Of packed sequences as
    common/ragged.py has it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class TileCopy(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor  # (box, tiles)
    target: cute.Tensor  # (box, slots)


def plane_of(tma: TmaSource, head: Int32, place: Int32 | Rows, rows_mode: int = 0) -> cute.Tensor:
    """(rows, cols) of one head, of a batch or of the rows of a packed sequence; (cols, rows) with rows_mode 1."""
    if isinstance(place, Rows):
        return sequence_plane(tma.tensor, head, place, rows_mode)
    return tma.tensor[None, None, head, place]


def tile_copy(
    tma: TmaSource, smem: cute.Tensor, tile: tuple[int, int], coord: tuple, head: Int32, place: Int32 | Rows
) -> TileCopy:
    """Tiles of one head, ready for TMA. `coord` keeps the mode that is walked as None."""
    plane = plane_of(tma, head, place, rows_mode=1 if coord[1] is None else 0)
    tiles = cute.local_tile(plane, tile, coord)
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TileCopy(tma.atom, source, target)


def _fetch(pipe: pipelines.PipelineTmaAsync, state: pipelines.PipelineState, copy: TileCopy, tile_index: Int32):
    pipe.producer_acquire(state)
    cute.copy(
        copy.atom,
        copy.source[None, tile_index],
        copy.target[None, state.index],
        tma_bar_ptr=pipe.producer_get_barrier(state),
    )


@cute.jit
def prefetch(copy: TileCopy):
    """A tile into L2."""
    with cute.arch.elect_one():
        cute.prefetch(copy.atom, copy.source)


class Loads(NamedTuple):
    """Of one query tile; q.source has a single tile."""

    q: TileCopy
    k: TileCopy
    v: TileCopy


@cute.jit
def load_first(
    pipes: ForwardPipelines, states: tuple, loads: Loads, tiles: KeyTiles, keys_first: cutlass.Constexpr[bool]
):
    """Q and the first K. These run in one converged warp. -> the states, moved on.

    `keys_first` where Q has one slot: K has a free one a step before the last scores are done with Q."""
    q_state, k_state, v_state = states
    q = loads.q
    if cutlass.const_expr(keys_first):
        _fetch(pipes.k, k_state, loads.k, tiles.last - 1)
    pipes.q.producer_acquire(q_state)
    cute.copy(q.atom, q.source, q.target[None, q_state.index], tma_bar_ptr=pipes.q.producer_get_barrier(q_state))
    q_state.advance()
    if cutlass.const_expr(not keys_first):
        _fetch(pipes.k, k_state, loads.k, tiles.last - 1)
    k_state.advance()
    return q_state, k_state, v_state


@cute.jit
def load_keys(pipes: ForwardPipelines, states: tuple, loads: Loads, first: Int32, last: Int32):
    """K of tiles [first, last) from the last to the first, each with the V after it."""
    q_state, k_state, v_state = states
    for step in cutlass.range(last - first, unroll=1):
        _fetch(pipes.k, k_state, loads.k, last - 1 - step)
        k_state.advance()
        _fetch(pipes.v, v_state, loads.v, last - step)
        v_state.advance()
    return q_state, k_state, v_state


@cute.jit
def load_last(pipes: ForwardPipelines, states: tuple, loads: Loads, tiles: KeyTiles):
    q_state, k_state, v_state = states
    _fetch(pipes.v, v_state, loads.v, tiles.first)
    v_state.advance()
    return q_state, k_state, v_state
