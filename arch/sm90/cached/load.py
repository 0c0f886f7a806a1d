"""The load role: one warp moves K and V tiles through TMA, each tile in as many boxes as it has pages.

K of a tile, then its V, from the first tile of a share to the last. The first may come before the length that says
whether there is one. Boxes past the row's last key are loaded too, from whatever
page a clamped number names: their scores are hidden, and their rows of V zeroed (walk.py).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..load import TileCopy, TmaSource
from .pipeline import KeyPipelines

LANES = 32


class Run(NamedTuple):
    """Key tiles first, first + step, ..."""

    first: Int32
    step: Int32

    def tile(self, number: Int32) -> Int32:
        return self.first + number * self.step


class Boxes(NamedTuple):
    """How tiles lie in pages; ints, known at trace time. A cache that is not paged has one page a row."""

    per_tile: int  # boxes
    per_page: int  # tiles, where a tile is a box
    rows: int  # of a box


def boxes_of(page_size: int, tile_n: int) -> Boxes:
    if page_size == 0:
        return Boxes(1, 1, tile_n)
    return Boxes(max(1, tile_n // page_size), max(1, page_size // tile_n), min(page_size, tile_n))


class Loads(NamedTuple):
    k: TileCopy  # source (box, boxes of a page, pages), target (box, (boxes of a slot), slots)
    v: TileCopy
    policy: Int64  # of L2


# L2 policies as TMA takes them. What passes through lines of its own pushes out nothing that must be written back.
# NVIDIA H200, 2026-11-30, after a flush that left L2 dirty, us of the kernel before / this one with evict_first (keys
# as rows came at the same time): K and V of 33 MB 20.1 19.1, 134 MB 48.6 45.7 and 50.0 45.2, 268 MB 77.7 78.1, 537 MB
# 134.1 140.7, 2.1 GB 488 510. So large caches go without; which of the two slowed them was not measured apart.
EVICT_FIRST, EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000
STREAMED_BYTES = 192 << 20  # of K and V at most, that are to pass so


def policy_of(kv_bytes: Int64) -> Int64:
    return Int64(cutlass.select_(kv_bytes <= STREAMED_BYTES, Int64(EVICT_FIRST), Int64(EVICT_NORMAL)))


def box_copy(tma: TmaSource, smem: cute.Tensor, box: tuple[int, int], head: Int32, keys_first: bool) -> TileCopy:
    """`box`, and modes of the source, are (keys, columns) or the reverse."""
    coord = (None, 0, None) if keys_first else (0, None, None)
    boxes = cute.local_tile(tma.tensor[None, None, head, None], box, coord)
    slots = cute.zipped_divide(smem, box)
    parts = cute.group_modes(boxes, 0, 2)
    target, source = cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), slots, parts)
    return TileCopy(tma.atom, source, target)


class Pages(NamedTuple):
    """Of a row."""

    table: cute.Tensor  # (pages a row,)
    limit: Int32  # pages in the cache


class PageNumbers(NamedTuple):
    """Of a share's pages, a lane each: as many registers as a tile's need, and those that follow."""

    now: tuple
    ahead: tuple


def _chunk(boxes: Boxes) -> tuple[int, int]:
    """(registers, tiles) whose pages are read at a time."""
    registers = max(1, boxes.per_tile // LANES)
    return registers, LANES * registers // boxes.per_tile


def read_pages(pages: Pages, run: Run, chunk: Int32, boxes: Boxes) -> tuple:
    """Clamped on both sides."""
    registers, tiles = _chunk(boxes)
    numbers = []
    for i in range(registers):
        place = LANES * i + cute.arch.lane_idx()
        tile = run.tile(chunk * tiles + place // boxes.per_tile)
        index = tile // boxes.per_page * boxes.per_tile + place % boxes.per_tile
        index = cutlass.min(index, pages.table.shape[0] - 1)
        numbers.append(cutlass.min(cutlass.max(pages.table[index], 0), pages.limit - 1))
    return tuple(numbers)


def open_pages(pages: Pages, run: Run, boxes: Boxes) -> PageNumbers:
    return PageNumbers(*(read_pages(pages, run, Int32(chunk), boxes) for chunk in range(2)))


@cute.jit
def load_dense(
    pipes: KeyPipelines, loads: Loads, run: Run, numbers: tuple, cache_row: Int32, state: pipelines.PipelineState
):
    """Tiles numbers[0] to numbers[1] - 1 of the run. -> the state moved on; so below"""
    for number in cutlass.range(numbers[0], numbers[1], unroll=1):
        for pipe, copy, place in ((pipes.k, loads.k, (0, 0)), (pipes.v, loads.v, (0, 0))):
            pipe.producer_acquire(state)
            _copy_box(pipe, state, copy, (run.tile(number), cache_row), place, loads.policy)
        state.advance()
    return state


@cute.jit
def load_paged(
    pipes: KeyPipelines,
    loads: Loads,
    run: Run,
    numbers: tuple,
    pages: Pages,
    known: PageNumbers,
    boxes: cutlass.Constexpr,
    state: pipelines.PipelineState,
):
    """-> (state, known). The table is read a chunk ahead."""
    registers, chunk_tiles = _chunk(boxes)
    now, ahead = list(known.now), list(known.ahead)
    for number in cutlass.range(numbers[0], numbers[1], unroll=1):
        place = number % chunk_tiles
        if (place == 0) & (number > 0):
            fresh = read_pages(pages, run, number // chunk_tiles + 1, boxes)
            for i in cutlass.range_constexpr(registers):
                now[i], ahead[i] = ahead[i], fresh[i]
        block = run.tile(number) % boxes.per_page
        for pipe, copy, keys_first in ((pipes.k, loads.k, True), (pipes.v, loads.v, False)):
            pipe.producer_acquire(state)
            for i in cutlass.range_constexpr(boxes.per_tile):
                lane = (place * boxes.per_tile + i) % LANES
                page = cute.arch.shuffle_sync(now[i // LANES], lane)
                _copy_box(pipe, state, copy, (block, page), (i, 0) if keys_first else (0, i), loads.policy)
        state.advance()
    return state, PageNumbers(tuple(now), tuple(ahead))


def _copy_box(pipe, state, copy: TileCopy, source: tuple, place: tuple, policy: Int64):
    cute.copy(
        copy.atom,
        copy.source[(None, *source)],
        copy.target[None, (*place, state.index)],
        tma_bar_ptr=pipe.producer_get_barrier(state),
        cache_policy=policy,
    )
