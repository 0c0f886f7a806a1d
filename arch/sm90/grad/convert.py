"""After a backward: dQ is scaled and rounded, a query tile a CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..schedule import WARPGROUP
from .sums import Place, round_part

PARTS = 2  # of a query tile, a warpgroup of this kernel each
THREADS = PARTS * WARPGROUP


@cute.kernel
def convert_kernel(
    sums: cute.Tensor,  # (tile_m * width_dq, query tiles, heads_q, batch) float32
    dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32,
    shape: cutlass.Constexpr,  # SumShape
):
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    part, lane = cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP
    size = 64 * shape.columns
    mine = cute.make_tensor(sums[None, tile, head, batch].iterator + part * size, cute.make_layout(size))
    round_part(mine, (dq, scale), Place(tile, head, batch), part, (lane, WARPGROUP), shape)
