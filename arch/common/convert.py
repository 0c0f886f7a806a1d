"""After a backward: dQ leaves the order in which it was summed, is scaled and rounded.

The sums of 64 rows lie as a warpgroup's wgmma accumulators: four registers of a thread together, then the 128 threads,
then the next four. Registers 4 j to 4 j + 3 of lane l of warp w are row 16 w + l / 4, columns 8 j + 2 (l % 4) and the
one after it, then the same columns of the row 8 below (PTX ISA, wgmma accumulator layout). So the four lanes of a row
hold 64 bytes that become 16 bytes of two rows: one thread of this kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .numeric import pack_pair

THREADS = 256
WARPGROUP = 128


@cute.kernel
def convert_kernel(
    sums: cute.Tensor,  # (tile_m * width_qk, query tiles, heads_q, batch) float32
    dq: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
    scale: Float32,
    shape: cutlass.Constexpr,  # (tile_m, width_qk, columns of a warpgroup's part, which has 64 rows)
):
    tile_m, width, columns = shape
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    here, rows = sums[None, tile, head, batch], dq[batch, None, head, None]
    eights = width // 8
    for step in cutlass.range_constexpr((tile_m // 2 * eights + THREADS - 1) // THREADS):
        index = step * THREADS + thread
        pair, eight = index // eights, index % eights  # the upper of two rows, eight columns
        if pair < tile_m // 2:
            row = pair // 8 * 16 + pair % 8
            part = row // 64 * (width // columns) + eight // (columns // 8)
            lane = row % 64 // 16 * 32 + row % 8 * 4
            offset = part * (64 * columns) + (eight % (columns // 8)) * (4 * WARPGROUP) + lane * 4
            quad = cute.make_tensor((here.iterator + offset).align(16), cute.make_layout(16)).load() * scale
            values = [quad[i] for i in range(16)]
            for half in cutlass.range_constexpr(2):
                pairs = [(values[4 * i + 2 * half], values[4 * i + 2 * half + 1]) for i in range(4)]
                packed = [pack_pair(*pair, dq.element_type) for pair in pairs]
                target = tile * tile_m + row + 8 * half
                if target < rows.shape[0] and eight * 8 < rows.shape[1]:
                    address = cute.domain_offset((target, eight * 8), rows).iterator.toint()
                    cute.arch.inline_ptx(
                        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *packed]
                    )
