"""After a backward: dQ leaves the order of its sums (memory.dq_vectors), is scaled and rounded. A row a thread."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.numeric import pack_pair
from ..schedule import ROWS, WARPGROUP
from .memory import dq_vectors

VECTOR = 8  # 16-bit values of a 16-byte access
SHARES = 2  # of the columns, a warpgroup of this kernel each
THREADS = SHARES * WARPGROUP


@cute.kernel
def convert_kernel(
    sums: cute.Tensor,  # (128 * width_qk, query tiles, heads_q, batch) float32
    dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32,
    width: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    share, row = thread // WARPGROUP, thread % WARPGROUP
    mine = cute.make_tensor(sums[None, tile, head, batch].iterator.align(16), dq_vectors(width))[None, None, row]
    values = cute.make_rmem_tensor((VECTOR,), Float32)
    packed = cute.make_rmem_tensor((VECTOR // 2,), Int32)
    at, rows = tile * ROWS + row, dq[batch, None, head, None]
    for i in cutlass.range_constexpr(width // (SHARES * VECTOR)):
        vector = share * (width // (SHARES * VECTOR)) + i
        for part in cutlass.range_constexpr(2):
            cute.autovec_copy(mine[None, 2 * vector + part], cute.make_tensor(values.iterator + 4 * part, 4))
        for pair in cutlass.range_constexpr(VECTOR // 2):
            low, high = values[2 * pair] * scale, values[2 * pair + 1] * scale
            packed[pair] = pack_pair(low, high, dq.element_type)
        if at < rows.shape[0] and vector * VECTOR < rows.shape[1]:
            target = cute.domain_offset((at, vector * VECTOR), rows).iterator.align(16)
            source = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=dq.element_type), cute.make_layout(VECTOR))
            cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(VECTOR)))
