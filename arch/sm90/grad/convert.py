"""After a backward: dQ leaves the order in which it was summed, is scaled and rounded.

The sums of 64 rows lie as a warpgroup's wgmma accumulators (memory.dq_chunks): 128 threads read them as they lie, each
16 bytes beside its neighbour's, and four lanes exchange their words so that each stores 16 bytes of a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...common.delta import row_tile_of
from ..epilogue import store_direct, store_transposed
from ..schedule import WARPGROUP
from .memory import dq_chunks


@cute.kernel
def convert_kernel(
    sums: cute.Tensor,  # (tile_m * width_dq, query tiles, heads_q, batch) float32
    dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32,
    shape: cutlass.Constexpr,  # (tile_m, columns of a part); a warpgroup of this kernel a part
):
    tile_m, columns = shape
    turned = tile_m % 64 != 0  # a part holds all rows, transposed; else 64
    registers = (tile_m if turned else 64) * columns // WARPGROUP
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = row_tile_of(sums)
    _, tiles, heads, batches = sums.shape  # the last sums first: they are in L2 yet
    tile, head, batch = tiles - 1 - tile, heads - 1 - head, batches - 1 - batch
    part, lane = cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP
    start = (sums[None, tile, head, batch].iterator + part * (registers * WARPGROUP)).align(16)
    mine = cute.make_tensor(start, dq_chunks(registers))[None, None, lane]  # (4, registers / 4)
    values = cute.make_rmem_tensor((4, registers // 4), Float32)
    for chunk in cutlass.range_constexpr(registers // 4):
        cute.autovec_copy(mine[None, chunk], values[None, chunk])
    values.store(values.load() * scale)
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
