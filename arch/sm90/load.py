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
from .pipeline import ForwardPipelines


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, cols, head, batch): (cols, rows, ...) for V."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class TileCopy(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor  # (box, tiles)
    target: cute.Tensor  # (box, slots)


def tile_copy(
    tma: TmaSource,
    smem: cute.Tensor,
    tile: tuple[int, int],
    coord: tuple,
    row: tuple[Int32, Int32],
    part: tuple[Int32, int] = (0, 1),
) -> TileCopy:
    """Tiles of one (head, batch), ready for TMA. `coord` keeps the mode that is walked as None; `part`: (i, n) for the
    i-th of n parts of each tile, with an atom for n CTAs."""
    tiles = cute.local_tile(tma.tensor[None, None, *row], tile, coord)
    index, parts = part
    target, source = cpasync.tma_partition(
        tma.atom, index, cute.make_layout(parts), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TileCopy(tma.atom, source, target)


def _copy(copy: TileCopy, tile_index: Int32, slot: Int32, barrier: cute.Pointer, ctas: Int16 | None = None):
    """`ctas`: bits of those in the cluster that receive it."""
    target = copy.target[None, slot]
    cute.copy(copy.atom, copy.source[None, tile_index], target, tma_bar_ptr=barrier, mcast_mask=ctas)


@cute.jit
def _fetch(
    pipe: pipelines.PipelineTmaAsync,
    state: pipelines.PipelineState,
    copies: tuple,
    tile_index: Int32,
    together: Int32 | None,
):
    """`copies`: of the whole tile; or of this CTA's part of it, which all of the cluster receive, then of the other
    parts, which it loads itself where it is alone."""
    pipe.producer_acquire(state)
    barrier = pipe.producer_get_barrier(state)
    if cutlass.const_expr(together is None):
        _copy(copies[0], tile_index, state.index, barrier)
    else:
        everyone = Int16((1 << together) - 1)
        _copy(copies[0], tile_index, state.index, barrier, everyone)
        if together == 1:
            for i in cutlass.range_constexpr(1, len(copies)):
                _copy(copies[i], tile_index, state.index, barrier, everyone)


class Loads(NamedTuple):
    """Of one query tile; q.source has a single tile. For K and V see _fetch."""

    q: TileCopy
    k: tuple[TileCopy, ...]
    v: tuple[TileCopy, ...]
    together: Int32 | None  # see Sizes


@cute.jit
def load_first(pipes: ForwardPipelines, states: tuple, loads: Loads, tiles: KeyTiles):
    """Q and the first K. These run in one converged warp. -> the states, moved on."""
    q_state, k_state, v_state = states
    q = loads.q
    pipes.q.producer_acquire(q_state)
    cute.copy(q.atom, q.source, q.target[None, q_state.index], tma_bar_ptr=pipes.q.producer_get_barrier(q_state))
    q_state.advance()
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
