"""dQ is summed in global memory, a part of a query tile at a time, by one warp for each part in every CTA.

A word for each part says who was there. The first CTA claims it and stores where the others add, so that the sums need
no zeros; who comes while that store is on its way waits for it. In a fixed order (deterministic), CTAs wait for their
turn instead, which is the number of those before. Every CTA counts itself when its addition is complete; whoever is the
last of those that visit the tile (blocks.seeing_tiles) fetches the sums back, from L2 mostly, rounds and stores them.
A step of the walk adds a tile, counts the one before, whose addition is complete by then, and rounds the one before
that if it has landed: nothing is waited for that was not begun a step earlier.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.spec.mask import Mask
from cute_flash.spec.plan import Tile

from ...common.blocks import seeing_tiles
from ...common.delta import Scratch
from ...common.numeric import pack_fragment
from ...common.order import Sizes
from ..schedule import ROWS_PER_WARPGROUP
from .memory import dq_place
from .pipeline import DQ_EMPTY, DQ_FULL, DQ_THREADS
from .schedule import Unit

SENDER = 0  # the lane that asks for bulk copies: only it can wait for them
CLAIMED, STORED = 1 << 30, 1 << 29  # bits of a word; those below count


@dataclass(frozen=True)
class SumShape:
    """What is fixed at trace time."""

    tile: Tile
    columns: int  # of a part, which has 64 rows
    mask: Mask
    dtype: type
    in_turn: bool
    three: bool


class Sums(NamedTuple):
    """What the adding warps work with; read-only."""

    parts: cute.Tensor  # (elements, warpgroups) in shared memory: dQ as the MMA warpgroups leave it
    landing: cute.Tensor  # the same: sums come back
    landed: cute.Pointer  # an mbarrier a warpgroup
    scratch: Scratch
    dq: cute.Tensor  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32
    sizes: Sizes


class Place(NamedTuple):
    """Of a query tile."""

    tile: Int32
    head: Int32
    batch: Int32


@cute.jit
def _next(place: Place, unit: Unit) -> Place:
    """The tile that the walk visits after this one."""
    tile, head = place.tile + 1, place.head
    if tile == unit.tiles.last:
        tile, head = unit.tiles.first, head + 1
    return Place(tile, head, place.batch)


@cute.jit
def _seen_by(sums: Sums, place: Place, shape: cutlass.Constexpr):
    """-> key tiles [first, last) that visit it."""
    sizes, row_start = sums.sizes, place.tile * shape.tile.tile_m
    seqlens, bounds = (sizes.seqlen_q, sizes.seqlen_k), (sizes.left, sizes.right)
    return seeing_tiles(row_start, shape.tile, seqlens, bounds, shape.mask)


def _proxy_fence():
    """Between what words say and what bulk copies move."""
    cute.arch.inline_ptx("fence.proxy.async.global;")


def _word(sums: Sums, place: Place, group: Int32):
    """Its address."""
    words = sums.scratch.words[None, place.tile, place.head, place.batch]
    return (words.iterator + group).toint()


def _read(word) -> Int32:
    seen = cute.arch.inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[word]
    )
    return cute.arch.make_warp_uniform(seen)


@cute.jit
def _mark(word, operation: cutlass.Constexpr[str], value: Int32):
    if cute.arch.lane_idx() == SENDER:
        cute.arch.inline_ptx(f"red.release.gpu.global.{operation} [{{$r0}}], {{$r1}};", read_only_args=[word, value])


@cute.jit
def _exchange(word, operation: cutlass.Constexpr[str], value: Int32) -> Int32:
    """-> what was there, in the lane that sends."""
    before = Int32(0)
    if cute.arch.lane_idx() == SENDER:
        before = cute.arch.inline_ptx(
            f"atom.{operation} {{$w0}}, [{{$r0}}], {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[word, value],
        )
    return before


@cute.jit
def _claim(word, seen: Int32) -> Boolean:
    """Is this CTA the first? Otherwise the first one's store is complete. `seen`: the word, a moment ago."""
    first = Boolean(False)
    if seen & STORED == 0:
        before = _exchange(word, "relaxed.gpu.global.or.b32", Int32(CLAIMED))
        first = cute.arch.shuffle_sync(before, SENDER) & CLAIMED == 0
        if not first:
            while seen & STORED == 0:
                seen = _read(word)
    return first


@cute.jit
def _wait_turn(word, turn: Int32):
    """Until a part was added to `turn` times. CTAs of lower index come first: they have started before."""
    seen = Int32(-1)
    while seen != turn:
        seen = _read(word)


@cute.jit
def _send(sums: Sums, place: Place, group: Int32, first: Boolean):
    """A part leaves shared memory, to be stored by the first and added by others. Left in flight, one bulk group."""
    target = sums.scratch.dq[None, place.tile, place.head, place.batch].iterator.toint()
    size = Int32(cute.size(sums.parts, mode=[0]) * Float32.width // 8)
    operands = [target + group * size, sums.parts[None, group].iterator.toint(), size]
    if cute.arch.lane_idx() == SENDER:
        if first:
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=operands
            )
        else:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=operands,
            )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _add(sums: Sums, place: Place, group: Int32, more: Boolean, order: Int32, shape: cutlass.Constexpr):
    """Waits for a part of dQ, sends it and, if `more` follow, gives the room back.

    `order`: how many CTAs add before this one, where they add in turn; else the word, a moment ago.
    """
    word, first = _word(sums, place, group), Boolean(False)
    cute.arch.barrier(barrier_id=DQ_FULL + group, number_of_threads=DQ_THREADS)
    if cutlass.const_expr(shape.in_turn):
        _wait_turn(word, order)
        first = order == 0
    elif cutlass.const_expr(not shape.three):
        first = _claim(word, order)
    _proxy_fence()
    _send(sums, place, group, first)
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    if more:
        cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
    if cutlass.const_expr(shape.in_turn):
        _complete(0)
        _mark(word, "add.u32", Int32(1))
    elif cutlass.const_expr(not shape.three):
        if first:
            _complete(0)
            _mark(word, "or.b32", Int32(STORED))


def _complete(younger: int):
    """All that was sent is in global memory, `younger` bulk groups aside."""
    cute.arch.cp_async_bulk_wait_group(younger, read=False)
    _proxy_fence()


@cute.jit
def _count(sums: Sums, place: Place, group: Int32, shape: cutlass.Constexpr) -> Int32:
    """This CTA has added. -> the word before, in the lane that sends; what it says is asked later, in _is_last."""
    before = Int32(0)
    if cutlass.const_expr(not shape.in_turn):
        before = _exchange(_word(sums, place, group), "release.gpu.global.add.u32", Int32(1))
    return before


@cute.jit
def _is_last(sums: Sums, place: Place, before: Int32, key_block: Int32, shape: cutlass.Constexpr) -> Boolean:
    """Has everybody added, and is this CTA the one to round?"""
    first, last = _seen_by(sums, place, shape)
    verdict = key_block == last - 1
    if cutlass.const_expr(not shape.in_turn):
        verdict = cute.arch.shuffle_sync(before, SENDER) & (STORED - 1) == last - first - 1
    return verdict


@cute.jit
def _fetch(sums: Sums, place: Place, group: Int32):
    """The sums of a part come back."""
    _proxy_fence()
    size = cute.size(sums.landing, mode=[0])
    source = sums.scratch.dq[None, place.tile, place.head, place.batch].iterator + cute.assume(group * size, divby=4)
    layout = cute.make_layout(size)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    barrier = sums.landed + group
    if cute.arch.lane_idx() == SENDER:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size * Float32.width // 8)
        cute.copy(
            atom, cute.make_tensor(source, layout), sums.landing[None, group], mbar_ptr=barrier
        )


@cute.jit
def round_part(part: cute.Tensor, sums: tuple, place: Place, group: Int32, worker: tuple, shape: cutlass.Constexpr):
    """part: its 64 * columns sums. `sums`: (dQ, scale); `worker`: (thread, of how many).

    Eight threads take 32 columns of a row, four each, and so on across the part; then the next rows follow.
    """
    dq, scale = sums
    thread, threads = worker
    row_start, column_start = place.tile * shape.tile.tile_m, Int32(0)
    if cutlass.const_expr(shape.tile.tile_m == ROWS_PER_WARPGROUP):
        column_start = group * shape.columns
    else:
        row_start += group * ROWS_PER_WARPGROUP
    rows = dq[place.batch, None, place.head, None]
    row, four, together = thread // 8, thread % 8, threads // 8
    column, blocks = column_start + 4 * four, shape.columns // 32
    source = part.iterator + cute.assume(dq_place(row, four // 2, shape.columns) + four % 2 * 4, divby=4)
    target = cute.domain_offset((row_start + row, column), rows).iterator.toint()
    ahead = rows.stride[0] * (2 * together)
    left = rows.shape[0] - row_start - row
    values = cute.make_rmem_tensor((4, blocks), Float32)
    packed = cute.make_rmem_tensor((2, blocks), Int32)
    for _ in cutlass.range(ROWS_PER_WARPGROUP // together, unroll=1):
        for block in cutlass.range_constexpr(blocks):
            cute.autovec_copy(cute.make_tensor(source + 32 * block, cute.make_layout(4)), values[None, block])
        values.store(values.load() * scale)
        pack_fragment(values, packed, shape.dtype)
        for block in cutlass.range_constexpr(blocks):
            if left > 0 and column + 32 * block < rows.shape[1]:
                cute.arch.inline_ptx(
                    "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
                    read_only_args=[target + 64 * block, packed[0, block], packed[1, block]],
                )
        source += together * shape.columns
        target += ahead
        left -= together


@cute.jit
def _order(sums: Sums, place: Place, group: Int32, unit: Unit, shape: cutlass.Constexpr) -> Int32:
    """See _add."""
    if cutlass.const_expr(shape.in_turn):
        return unit.key_block - _seen_by(sums, place, shape)[0]
    if cutlass.const_expr(shape.three):
        return Int32(0)
    return _read(_word(sums, place, group))


@cute.jit
def add_role(sums: Sums, unit: Unit, group: Int32, shape: cutlass.Constexpr):
    """See above."""
    steps = unit.tiles.count * unit.group
    if steps > 0:
        cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
        if cutlass.const_expr(shape.three):
            _add_all(sums, unit, group, shape)
        else:
            _add_and_round(sums, unit, group, shape)


@cute.jit
def _add_all(sums: Sums, unit: Unit, group: Int32, shape: cutlass.Constexpr):
    steps = unit.tiles.count * unit.group
    place = Place(unit.tiles.first, unit.head_first, unit.batch)
    for step in cutlass.range(steps, unroll=1):
        _add(sums, place, group, step + 1 < steps, _order(sums, place, group, unit, shape), shape)
        place = _next(place, unit)


@cute.jit
def _add_and_round(sums: Sums, unit: Unit, group: Int32, shape: cutlass.Constexpr):
    """What takes long is asked for before the rounding and looked at after it; no store is on its way then, for which
    a fence would wait."""
    steps = unit.tiles.count * unit.group
    place = Place(unit.tiles.first, unit.head_first, unit.batch)
    before, before_that = place, place
    order, fetched, phase = _order(sums, place, group, unit, shape), Boolean(False), Int32(0)
    for step in cutlass.range(steps + 2, unroll=1):
        if step < steps:
            _add(sums, place, group, step + 1 < steps, order, shape)
        counted, word = (step > 0) & (step <= steps), Int32(0)
        if counted:
            if step < steps:
                _complete(1)
            else:
                _complete(0)
            word = _count(sums, before, group, shape)
        following = _next(place, unit)
        if step + 1 < steps:
            order = _order(sums, following, group, unit, shape)
        last = Boolean(False)
        if counted:
            last = _is_last(sums, before, word, unit.key_block, shape)
            if last:
                cute.arch.fence_acq_rel_gpu()
        if fetched:
            cute.arch.mbarrier_wait(sums.landed + group, phase)
            worker = cute.arch.lane_idx(), 32
            round_part(sums.landing[None, group], (sums.dq, sums.scale), before_that, group, worker, shape)
            phase = phase ^ 1
            cute.arch.sync_warp()
        if last:
            _fetch(sums, before, group)
        fetched, before_that, before, place = last, before, place, following
