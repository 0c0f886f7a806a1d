"""After a backward: dQ leaves the order in which it was summed, is scaled and rounded.

The sums of 64 rows lie as a warpgroup's wgmma accumulators (memory.dq_chunks): 128 threads read them as they lie, each
16 bytes beside its neighbour's, and four lanes exchange their words so that each stores 16 bytes of a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.delta import row_tile_of
from ...common.ragged import only_rows, slot_rows
from ..epilogue import store_direct, store_transposed
from ..schedule import WARPGROUP
from .memory import dq_chunks


@cute.jit
def _convert(source: tuple, dq: cute.Tensor, at: tuple, tile: Int32, scale: Float32, shape: cutlass.Constexpr):
    """One tile. `source`: (sums, turns); `at`: (tile of these, head, batch); `tile`: of dQ. The rest as convert_kernel
    has it."""
    sums, turns = source
    tile_m, columns = shape
    turned = tile_m % 64 != 0  # a part holds all rows, transposed; else 64
    registers = (tile_m if turned else 64) * columns // WARPGROUP
    thread, _, _ = cute.arch.thread_idx()
    slot, head, batch = at
    part, lane = cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP
    start = (sums[None, slot, head, batch].iterator + part * (registers * WARPGROUP)).align(16)
    mine = cute.make_tensor(start, dq_chunks(registers))[None, None, lane]  # (4, registers / 4)
    values = cute.make_rmem_tensor((4, registers // 4), Float32)
    for chunk in cutlass.range_constexpr(registers // 4):
        cute.autovec_copy(mine[None, chunk], values[None, chunk])
    values.store(values.load() * scale)
    if cutlass.const_expr(turns is not None):
        added = turns[part, slot, head, batch]
        if added == 0:
            values.fill(0.0)
    rows = dq[batch, None, head, None]
    if cutlass.const_expr(turned):
        store_transposed(values, rows, lane, (tile * tile_m, part * columns), dq.element_type)
    else:
        row, column = tile * tile_m, 0
        if cutlass.const_expr(tile_m == 64):
            column = part * columns
        else:
            row += part * 64
        beyond = cute.make_layout((rows.shape[0], rows.shape[1] - column), stride=rows.stride)
        there = cute.make_tensor(cute.domain_offset((0, column), rows).iterator, beyond)
        store_direct(values, there, lane, row, dq.element_type)


@cute.kernel
def convert_kernel(
    sums: cute.Tensor,  # (tile_m * width_dq, query tiles, heads_q, batch) float32
    dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32,
    shape: cutlass.Constexpr,  # (tile_m, columns of a part); a warpgroup of this kernel a part
    turns: cute.Tensor | None = None,  # see Scratch: sums that nobody added to are not there
    starts: cute.Tensor | None = None,  # of packed sequences; tiles are slots then, see common/ragged.py
):
    at, (_, tiles, heads, batches) = row_tile_of(sums), sums.shape
    at = tiles - 1 - at[0], heads - 1 - at[1], batches - 1 - at[2]  # the last sums first: they are in L2 yet
    if cutlass.const_expr(starts is None):
        _convert((sums, turns), dq, at, at[0], scale, shape)
    else:
        slot = slot_rows(starts, at[0], dq.shape[1], shape[0])
        if slot.tile * shape[0] < slot.rows.count:
            _convert((sums, turns), only_rows(dq, 1, slot.rows), at, slot.tile, scale, shape)
