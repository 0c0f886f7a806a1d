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
from .pipeline import ForwardPipelines


class TmaSource(NamedTuple):
    """A TMA atom and its tensor, modes (rows, cols, head, batch): (cols, rows, ...) for V."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class TileCopy(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor  # (box, tiles)
    target: cute.Tensor  # (box, slots)


def tile_copy(tma: TmaSource, smem: cute.Tensor, tile: tuple[int, int], coord: tuple, head: Int32, batch: Int32):
    """Tiles of one head, ready for TMA. `coord` keeps the mode that is walked as None."""
    tiles = cute.local_tile(tma.tensor[None, None, head, batch], tile, coord)
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
def load_forward(pipes: ForwardPipelines, states: tuple, q: TileCopy, k: TileCopy, v: TileCopy, tiles: KeyTiles):
    """Q, K and V of one query tile; q.source has a single tile. Runs in one converged warp. -> states moved on."""
    q_state, k_state, v_state = states
    pipes.q.producer_acquire(q_state)
    cute.copy(q.atom, q.source, q.target[None, q_state.index], tma_bar_ptr=pipes.q.producer_get_barrier(q_state))
    q_state.advance()
    _fetch(pipes.k, k_state, k, tiles.last - 1)
    k_state.advance()
    for step in cutlass.range(tiles.last - tiles.first - 1, unroll=1):
        _fetch(pipes.k, k_state, k, tiles.last - 2 - step)
        k_state.advance()
        _fetch(pipes.v, v_state, v, tiles.last - 1 - step)
        v_state.advance()
    _fetch(pipes.v, v_state, v, tiles.first)
    v_state.advance()
    return q_state, k_state, v_state
