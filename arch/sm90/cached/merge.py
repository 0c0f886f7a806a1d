"""The second kernel: what the CTAs that shared the keys of a row left becomes O and LSE, as in common/combine.py.

One CTA a row; its warps take the shares in turn. It starts beside the last CTAs of the kernel before, and waits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.numeric import NEG_INF, exp2, finite_or_zero
from ...common.rowstate import inverse_total, log_sum_exp
from .shares import CacheSizes, Partials

WARPS = 4
TOGETHER = 4  # shares that a warp reads at a time


@cute.jit
def _merged(state: cute.Tensor, lane: Int32) -> tuple[Float32, Float32]:
    """state (splits, 2) -> (maximum, total) over the shares; (0, 0) where none saw a key. Every lane gets them."""
    splits = state.shape[0]
    top = Float32(NEG_INF)
    for s in cutlass.range(lane, splits, 32, unroll=1):
        top = cute.arch.fmax(top, state[s, 0])
    top = finite_or_zero(cute.arch.warp_reduction_max(top))
    total = Float32(0.0)
    for s in cutlass.range(lane, splits, 32, unroll=1):
        total = total + exp2(state[s, 0] - top) * state[s, 1]
    return top, cute.arch.warp_reduction_sum(total)


@cute.kernel
def merge_kernel(
    partials: Partials, out: cute.Tensor, lse: cute.Tensor | None, sizes: CacheSizes, width: cutlass.Constexpr[int]
):
    cute.arch.griddepcontrol_wait()
    thread, _, _ = cute.arch.thread_idx()
    index, _, _ = cute.arch.block_idx()
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    in_head, head_row = index % sizes.rows, index // sizes.rows
    batch, head = head_row // sizes.heads_kv, head_row % sizes.heads_kv * sizes.group + in_head % sizes.group
    token, columns = in_head // sizes.group, width // 32
    room = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((width, WARPS)), 16)
    state = partials.state[None, index, None]
    maximum, total = _merged(state, lane)
    inverse = inverse_total(total)
    sums = cute.make_rmem_tensor((columns,), Float32)
    sums.fill(0.0)
    for s in cutlass.range(warp, sizes.splits, WARPS, unroll=TOGETHER):
        share_total = state[s, 1]
        weight = exp2(state[s, 0] - maximum) * share_total * inverse
        for c in cutlass.range_constexpr(columns):
            value = partials.o[s, index, c * 32 + lane]  # anything at all where the share saw no key
            sums[c] = sums[c] + Float32(cutlass.select_(share_total != 0.0, weight * value, Float32(0.0)))
    for c in cutlass.range_constexpr(columns):
        room[c * 32 + lane, warp] = sums[c]
    cute.arch.sync_threads()
    for column in cutlass.range(thread, out.shape[3], 32 * WARPS, unroll=1):
        value = Float32(0.0)
        for w in cutlass.range_constexpr(WARPS):
            value = value + room[column, w]
        out[batch, token, head, column] = value.to(out.element_type)
    if cutlass.const_expr(lse is not None):
        row_of_lse = lse[batch, head, None]
        if thread == 0:
            row_of_lse[token] = log_sum_exp(maximum, total, Float32(1.0))


def launch_merge(partials: Partials, out: cute.Tensor, lse: cute.Tensor | None, sizes: CacheSizes, width: int, stream):
    merge_kernel(partials, out, lse, sizes, width).launch(
        grid=(sizes.batch * sizes.heads_kv * sizes.rows, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True
    )
