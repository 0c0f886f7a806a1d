"""dQ leaves a tile at a time: registers -> shared memory -> added to global memory by a warp of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.delta import Scratch
from ...common.keyunits import Unit, first_stop, next_stop, turn_of
from ...common.turns import pass_on, wait_for
from ..schedule import WARPGROUP
from .memory import dq_chunks
from .pipeline import DQ_EMPTY, DQ_FULL, DQ_THREADS, in_turn_full
from .schedule import ADDERS


@cute.jit
def hand_over_dq(dq: cute.Tensor, parts: cute.Tensor, group: Int32, full: Int32, thread: Int32):
    """A warpgroup's accumulators into a part of shared memory, once that has been read.

    parts: (elements, parts), `group`: which; `full`: the barrier at which somebody waits for it.
    """
    cute.arch.barrier(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)
    registers = cute.size(dq)
    part = cute.make_tensor(parts[None, group].iterator.align(16), dq_chunks(registers))
    mine = part[None, None, thread % WARPGROUP]  # (4, registers / 4)
    values = cute.make_tensor(dq.iterator, cute.make_layout((4, registers // 4)))
    for chunk in cutlass.range_constexpr(registers // 4):
        cute.autovec_copy(values[None, chunk], mine[None, chunk])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=full, number_of_threads=DQ_THREADS)


def offer_room(group: Int32):
    """By the warp that adds a part of dQ to global memory: the next may be left in shared memory."""
    cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=DQ_THREADS)


@cute.jit
def add_dq(parts: cute.Tensor, sums: cute.Tensor, group: Int32, full: Int32, adds=True):
    """One warp: waits for a part of dQ and adds it to global memory, or stores it there. Its room is free then.

    parts: (elements, parts) in shared memory, sums: the same tile in global memory; `full`: see hand_over_dq.
    """
    cute.arch.barrier(barrier_id=full, number_of_threads=DQ_THREADS)
    size = Int32(cute.size(parts, mode=[0]) * Float32.width // 8)
    places = [sums[None, group].iterator.toint(), parts[None, group].iterator.toint(), size]
    with cute.arch.elect_one():
        if adds:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=places,
            )
        else:
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=places
            )
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def _sums(scratch: Scratch, unit: Unit, stop: tuple, parts: cute.Tensor) -> cute.Tensor:
    """(elements, parts) of a query tile."""
    tile = scratch.dq[None, stop[0], unit.head_first + stop[1], unit.batch]
    return cute.make_tensor(tile.iterator, parts.layout)


@cute.jit
def add_unit(parts: cute.Tensor, scratch: Scratch, unit: Unit, part: Int32):
    """One warp, a part of dQ of every query tile of a unit. parts: as add_dq has it."""
    stop = first_stop(unit, False)
    for _ in cutlass.range(unit.tiles.count * unit.group, unroll=1):
        sums = _sums(scratch, unit, stop, parts)
        stop = next_stop(stop, unit, False)
        offer_room(part)
        add_dq(parts, sums, part, DQ_FULL + part)


@cute.jit
def add_unit_in_turn(
    parts: cute.Tensor, origin: tuple, jobs: tuple, tile: cutlass.Constexpr, mask: cutlass.Constexpr
) -> tuple:
    """One warp of ADDERS, every so-manyth part of a unit's dQ, each when it is its turn; who comes first stores. The
    room is offered again while the addition is on its way: the matmuls do not wait for that.

    `origin`: (scratch, unit, sizes of its sequence); `jobs`: (which warp, the unit's first job, a part whose room it is
    to offer or -1). -> the last two for the next unit
    """
    scratch, unit, sizes = origin
    adder, job, owed = jobs
    count, left, stop = cute.size(parts, mode=[1]), unit.tiles.count * unit.group, first_stop(unit, True)
    if left > 0 and owed >= 0:
        offer_room(owed)
        owed = Int32(-1)
    for _ in cutlass.range(left, unroll=1):
        left -= 1
        for part in cutlass.range_constexpr(count):
            if job % ADDERS == adder:
                turns = scratch.turns[None, stop[0], unit.head_first + stop[1], unit.batch]
                turn = turn_of(unit, stop[0], sizes, tile, mask)
                wait_for(turns, Int32(part), turn)
                sums = _sums(scratch, unit, stop, parts)
                add_dq(parts, sums, Int32(part), in_turn_full(job, count), turn > 0)
                if left > 0:
                    offer_room(Int32(part))
                else:
                    owed = Int32(part)
                pass_on(turns, Int32(part))
            job += 1
        stop = next_stop(stop, unit, True)
    return job, owed
