"""What a load role moves: K and V of a unit once, Q with its row values and dO tile by tile, all through TMA."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.spec.plan import Tile

from ...common.keyunits import Unit, first_stop, next_stop
from ...common.order import Sizes
from ...common.ragged import Rows, ragged_view, sequence_heads
from .memory import TmaSource
from .pipeline import BackwardPipelines
from .schedule import LOAD_WARP

# For each query tile that a unit has less than the longest, see give_way. NVIDIA H200, 2026-12-01, one causal sequence,
# TFLOP/s of any order / in turn / in turn with 200 / FA4: d=128 16 heads S=1024 193 202 210 212, 8 heads 2048 256 - 268
# 269, 16 heads 512 76 - 80 88. In any order without / 200 / 400: d=64 32 heads 1024 208 206 206, d=96 21 heads 216 215
# 215, d=256 8 heads 201 201 195.
GIVE_WAY_NS = 200


class Sources(NamedTuple):
    """What a kernel reads through TMA."""

    q: TmaSource
    k: TmaSource
    v: TmaSource
    do: TmaSource


def sources_of(
    moved: tuple, layouts: NamedTuple, tile: Tile, widths: tuple[int, int, int], packed: bool = False
) -> Sources:
    """`moved`: (q, k, v, do), modes (batch, seqlen, heads, head_dim); `widths`: (of q, of k, of v and do); `packed`: as
    ragged_view has them."""

    def source(tensor, layout, rows, width):
        batched = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))
        view = ragged_view(tensor) if packed else batched
        box, op = cute.slice_(layout, (None, None, 0)), cpasync.CopyBulkTensorTileG2SOp()
        return TmaSource(*cpasync.make_tiled_tma_atom(op, view, box, (rows, width)))

    q, k, v, do = moved
    width_q, width_k, width_v = widths
    return Sources(
        q=source(q, layouts.q, tile.tile_m, width_q),
        k=source(k, layouts.k, tile.tile_n, width_k),
        v=source(v, layouts.v, tile.tile_n, width_v),
        do=source(do, layouts.do, tile.tile_m, width_v),
    )


class TileCopy(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor  # (box, row tiles, heads)
    target: cute.Tensor  # (box, slots)


class Feed(NamedTuple):
    """What one CTA reads, and where to."""

    k: TileCopy
    v: TileCopy
    q: TileCopy
    do: TileCopy
    row_values: cute.Tensor  # (2 * tile_m, query tiles, heads_q) float32 in global memory
    s_rows: cute.Tensor  # (2 * tile_m, stages) float32


def tile_copy(tma: TmaSource, smem: cute.Tensor, tile: tuple[int, int], place: Int32 | Rows) -> TileCopy:
    """Tiles of every head, of a batch entry or of the rows of a packed sequence, ready for TMA."""
    packed = isinstance(place, Rows)
    rows = sequence_heads(tma.tensor, place) if packed else tma.tensor[None, None, None, place]
    tiles = cute.local_tile(rows, tile, (None, 0, None))
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TileCopy(tma.atom, source, target)


def fetch(pipe: pipelines.PipelineTmaAsync, state: pipelines.PipelineState, copy: TileCopy, tile: Int32, head: Int32):
    pipe.producer_acquire(state)
    cute.copy(
        copy.atom,
        copy.source[None, tile, head],
        copy.target[None, state.index],
        tma_bar_ptr=pipe.producer_get_barrier(state),
    )


def fetch_queries(pipes: BackwardPipelines, state: pipelines.PipelineState, feed: Feed, tile: Int32, head: Int32):
    """Q and its row values fill one slot together. Runs in one converged warp."""
    fetch(pipes.q, state, feed.q, tile, head)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32)
    source, target = feed.row_values[None, tile, head], feed.s_rows[None, state.index]
    with cute.arch.elect_one():
        cute.copy(atom, source, target, mbar_ptr=pipes.q.producer_get_barrier(state))


@cute.jit
def prefetch_descriptors(warp: Int32, sources: tuple):
    """By the load warp, while barriers are made."""
    if warp == LOAD_WARP:
        for source in cutlass.range_constexpr(len(sources)):
            cpasync.prefetch_descriptor(sources[source].atom)


@cute.jit
def feed_unit(pipes: BackwardPipelines, states: tuple, feed: Feed, unit: Unit, in_turn: cutlass.Constexpr):
    """K comes last of the first four: its room is given back last. -> the states moved on"""
    kv_state, q_state, do_state = states
    stop = first_stop(unit, in_turn)
    for step in cutlass.range(unit.tiles.count * unit.group, unroll=1):
        at, head = stop[0], unit.head_first + stop[1]
        fetch_queries(pipes, q_state, feed, at, head)
        q_state.advance()
        if step == 0:
            fetch(pipes.v, kv_state, feed.v, unit.key_block, unit.head_kv)
        fetch(pipes.do, do_state, feed.do, at, head)
        do_state.advance()
        if step == 0:
            fetch(pipes.k, kv_state, feed.k, unit.key_block, unit.head_kv)
        stop = next_stop(stop, unit, in_turn)
    if unit.tiles.count <= 0:
        fetch(pipes.v, kv_state, feed.v, unit.key_block, unit.head_kv)
        fetch(pipes.k, kv_state, feed.k, unit.key_block, unit.head_kv)
    kv_state.advance()
    return kv_state, q_state, do_state


@cute.jit
def give_way(tiles: Int32, units: Int32, sizes: Sizes, tile_m: cutlass.Constexpr):
    """Where every CTA has one unit the longest decides: memory, which all ask at once, serves it first."""
    if units <= cute.arch.grid_dim()[0]:
        longest = cutlass.min(sizes.seqlen_q, sizes.seqlen_k) // tile_m
        fewer = cutlass.max(longest - tiles, 0)
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[fewer * GIVE_WAY_NS])
