"""dQ leaves: whoever was the last to add to a query tile fetches the sums back, rounds and stores them.

The adding warps tell a fourth one, through a ring, which of their additions are complete; only it counts them in global
memory and looks whether others are missing, so that the adding warps wait for nothing new.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.spec.mask import Mask
from cute_flash.spec.plan import Tile

from ...common.blocks import seeing_tiles
from ...common.delta import Scratch
from ...common.numeric import pack_pair
from ...common.order import Sizes
from ..schedule import ROWS_PER_WARPGROUP, WARPGROUP
from .memory import TOKENS, dq_chunks
from .schedule import Unit


@dataclass(frozen=True)
class RoundShape:
    """What is fixed at trace time."""

    tile: Tile
    columns: int  # of a part, which has 64 rows
    mask: Mask
    dtype: type
    in_turn: bool
    parts: int


class Rounding(NamedTuple):
    """Read-only."""

    tokens: pipelines.PipelineAsync
    landing: cute.Tensor  # (elements, parts) in shared memory
    landed: cute.Pointer  # an mbarrier a part
    scratch: Scratch
    dq: cute.Tensor  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32
    sizes: Sizes


class Place(NamedTuple):
    """Of a query tile."""

    tile: Int32
    head: Int32
    batch: Int32


def open_tokens(barriers: cute.Pointer, adders: int) -> pipelines.PipelineAsync:
    return pipelines.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=TOKENS,
        producer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, adders),
        consumer_group=pipelines.CooperativeGroup(pipelines.Agent.Thread, 1),
        defer_sync=True,
    )


def token_state(role: pipelines.PipelineUserType) -> pipelines.PipelineState:
    return pipelines.make_pipeline_state(role, TOKENS)


@cute.jit
def tell(tokens: pipelines.PipelineAsync, state: pipelines.PipelineState, younger: cutlass.Constexpr[int]):
    """By an adding warp: one more of its additions is complete, `younger` ones aside. -> the state, moved on."""
    cute.arch.cp_async_bulk_wait_group(younger, read=False)
    tokens.producer_acquire(state)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        tokens.producer_commit(state)
    state.advance()
    return state


@cute.jit
def _next(place: Place, unit: Unit) -> Place:
    """The tile that the walk visits after this one."""
    tile, head = place.tile + 1, place.head
    if tile == unit.tiles.last:
        tile, head = unit.tiles.first, head + 1
    return Place(tile, head, place.batch)


@cute.jit
def _count(work: Rounding, place: Place, shape: cutlass.Constexpr) -> Int32:
    """This CTA has added. -> how many have before, in lane 0; looked at later."""
    before = Int32(0)
    if cutlass.const_expr(not shape.in_turn):
        word = cute.domain_offset((place.tile, place.head, place.batch), work.scratch.counts).iterator.toint()
        if cute.arch.lane_idx() == 0:
            before = cute.arch.inline_ptx(
                "atom.release.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[word]
            )
    return before


@cute.jit
def _is_last(work: Rounding, place: Place, before: Int32, key_block: Int32, shape: cutlass.Constexpr) -> Boolean:
    sizes, row_start = work.sizes, place.tile * shape.tile.tile_m
    seqlens, bounds = (sizes.seqlen_q, sizes.seqlen_k), (sizes.left, sizes.right)
    first, last = seeing_tiles(row_start, shape.tile, seqlens, bounds, shape.mask)
    verdict = key_block == last - 1
    if cutlass.const_expr(not shape.in_turn):
        verdict = cute.arch.shuffle_sync(before, 0) == last - first - 1
    if verdict:
        cute.arch.fence_acq_rel_gpu()
        cute.arch.inline_ptx("fence.proxy.async.global;")
    return verdict


@cute.jit
def _fetch(work: Rounding, place: Place, part: cutlass.Constexpr[int]):
    size = cute.size(work.landing, mode=[0])
    source = work.scratch.dq[None, place.tile, place.head, place.batch].iterator + part * size
    atom, barrier = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), work.landed + part
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size * Float32.width // 8)
        layout = cute.make_layout(size)
        cute.copy(atom, cute.make_tensor(source, layout), work.landing[None, part], mbar_ptr=barrier)


@cute.jit
def _round(work: Rounding, place: Place, part: cutlass.Constexpr[int], phase: Int32, shape: cutlass.Constexpr):
    """A part that has come back; a lane takes what four threads of the MMA warpgroup held, one after the other."""
    row_start, column_start = place.tile * shape.tile.tile_m, part * shape.columns
    if cutlass.const_expr(shape.tile.tile_m != ROWS_PER_WARPGROUP):
        row_start, column_start = row_start + part * ROWS_PER_WARPGROUP, 0
    rows = work.dq[place.batch, None, place.head, None]
    lane, chunks = cute.arch.lane_idx(), shape.columns // 8
    column = column_start + 2 * (lane % 4)
    target = cute.domain_offset((row_start + lane // 4, column), rows).iterator.toint()
    left = rows.shape[0] - row_start - lane // 4
    below, ahead = rows.stride[0] * 16, rows.stride[0] * 32  # bytes of 8 rows and of 16
    source = work.landing[None, part].iterator + cute.assume(4 * lane, divby=4)
    values = cute.make_rmem_tensor((4,), Float32)
    cute.arch.mbarrier_wait(work.landed + part, phase)
    for _ in cutlass.range(4, unroll=1):
        for chunk in cutlass.range_constexpr(chunks):
            cute.autovec_copy(cute.make_tensor(source + 4 * WARPGROUP * chunk, cute.make_layout(4)), values)
            inside = column + 8 * chunk < rows.shape[1]
            for r in cutlass.range_constexpr(2):
                word = pack_pair(values[2 * r] * work.scale, values[2 * r + 1] * work.scale, shape.dtype)
                if inside and left > 8 * r:
                    cute.arch.inline_ptx(
                        "st.global.b32 [{$r0}], {$r1};", read_only_args=[target + r * below + 16 * chunk, word]
                    )
        source += 128
        target += ahead
        left -= 16


@cute.jit
def round_role(work: Rounding, unit: Unit, shape: cutlass.Constexpr):
    """One warp."""
    steps = unit.tiles.count * unit.group
    state = token_state(pipelines.PipelineUserType.Consumer)
    place = Place(unit.tiles.first, unit.head_first, unit.batch)
    before, fetched, phase = place, Boolean(False), Int32(0)
    for step in cutlass.range(steps + 1 if steps > 0 else 0, unroll=1):
        word, last = Int32(0), Boolean(False)
        if step < steps:
            work.tokens.consumer_wait(state)
            word = _count(work, place, shape)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                work.tokens.consumer_release(state)
            state.advance()
        for part in cutlass.range_constexpr(shape.parts):
            if fetched:
                _round(work, before, part, phase, shape)
            if cutlass.const_expr(part == 0):
                if step < steps:
                    last = _is_last(work, place, word, unit.key_block, shape)
            if last:
                _fetch(work, place, part)
        if fetched:
            phase = phase ^ 1
        fetched, before, place = last, place, _next(place, unit)
