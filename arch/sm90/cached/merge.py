"""The second kernel: what the CTAs that shared the keys of a row left becomes O and LSE, as in common/combine.py.

One CTA a row. It starts beside the last CTAs of the kernel before, and waits. Of 32 shares at a time all states and
outputs are asked for before anything is waited for; a lane holds neighbouring columns.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...common.numeric import NEG_INF, exp2, finite_or_zero
from ...common.rowstate import inverse_total, log_sum_exp
from .shares import CacheSizes, Partials, run_of_group, slot_of, tiles_before

WARPS = 4
LANES = 32
TOGETHER = LANES // WARPS  # shares of a warp among 32


class Parts(NamedTuple):
    """Of a row of the output: where they lie."""

    count: Int32
    row: Int32  # of the partials
    first: Int32  # the group that has the first part, where groups are


def parts_of(index: Int32, seqlens: cute.Tensor, sizes: CacheSizes, tile_n: int) -> Parts:
    """tile_n: of groups, else 0. Lengths are read before the wait: no kernel of a call writes them."""
    if tile_n == 0:
        return Parts(sizes.splits, index, Int32(0))
    head_row, in_head = divmod(index, sizes.by.rows)
    batch, head = divmod(head_row, sizes.by.heads_kv)
    before, mine, total = tiles_before(batch, seqlens, sizes, tile_n)
    size = run_of_group(total, sizes)
    first, last = before // size, (before + mine - 1) // size
    return Parts(last - first + 1, head * sizes.rows + in_head, first)


@cute.kernel
def merge_kernel(
    partials: Partials,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    seqlens: cute.Tensor,
    sizes: CacheSizes,
    width: cutlass.Constexpr[int],
    tile_n: cutlass.Constexpr[int],
):
    """tile_n: keys of a tile where groups share (0: all rows in as many shares, which are read at once)."""
    index, _, _ = cute.arch.block_idx()
    parts = parts_of(index, seqlens, sizes, tile_n)
    if cutlass.const_expr(tile_n > 0):
        if parts.count > 1:  # else the row is done
            merge_row(partials, out, lse, parts, sizes, (width, True))
        elif index == 0:  # one CTA at least waits: who waits for this kernel waits for that one
            cute.arch.griddepcontrol_wait()
    else:
        merge_row(partials, out, lse, parts, sizes, (width, False))


@cute.jit
def merge_row(
    partials: Partials,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    where: Parts,
    sizes: CacheSizes,
    kind: cutlass.Constexpr[tuple],  # (width of V, do groups share?)
):
    width, grouped = kind
    index, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % LANES, cute.arch.make_warp_uniform(thread // LANES)
    head_row, in_head = divmod(index, sizes.by.rows)
    batch, head_kv = divmod(head_row, sizes.by.heads_kv)
    token, in_group = divmod(in_head, sizes.by.group)
    head, columns = head_kv * sizes.group + in_group, width // LANES
    room = SmemAllocator().allocate_tensor(Float32, cute.make_layout((width, WARPS)), 16)
    state, rows = partials.state[None, where.row, None], partials.o[None, where.row, None]
    parts = cute.make_rmem_tensor((columns, TOGETHER), Float32)
    sums = cute.make_rmem_tensor((columns,), Float32)
    sums.fill(0.0)
    top, total = Float32(NEG_INF), Float32(0.0)
    cute.arch.griddepcontrol_wait()
    for start in cutlass.range(0, where.count, LANES, unroll=1):
        for i in cutlass.range_constexpr(TOGETHER):
            # of a share that is not there another's, with no weight
            slot = _slot(cutlass.min(start + warp + WARPS * i, where.count - 1), where, grouped)
            vector = cute.domain_offset((slot, lane * columns), rows).iterator.align(4 * (columns & -columns))
            cute.autovec_copy(cute.make_tensor(vector, cute.make_layout(columns)), parts[None, i])
        share, exists = _slot(cutlass.min(start + lane, where.count - 1), where, grouped), start + lane < where.count
        maximum, share_total = state[share, 0], state[share, 1]
        maximum = Float32(cutlass.select_(exists, maximum, Float32(NEG_INF)))
        new_top = cute.arch.fmax(top, cute.arch.warp_reduction_max(maximum))
        shift = finite_or_zero(new_top)
        rescale = exp2(top - shift)
        weight = exp2(maximum - shift) * Float32(cutlass.select_(exists, share_total, Float32(0.0)))
        total = total * rescale + cute.arch.warp_reduction_sum(weight)
        for c in cutlass.range_constexpr(columns):
            sums[c] = sums[c] * rescale
        for i in cutlass.range_constexpr(TOGETHER):
            mine = cute.arch.shuffle_sync(weight, warp + WARPS * i)
            for c in cutlass.range_constexpr(columns):
                # O of a share that saw no key was not written
                sums[c] += Float32(cutlass.select_(mine != 0.0, mine * parts[c, i], Float32(0.0)))
        top = new_top
    for c in cutlass.range_constexpr(columns):
        room[lane * columns + c, warp] = sums[c]
    cute.arch.sync_threads()
    inverse = inverse_total(total)
    for column in cutlass.range(thread, out.shape[3], LANES * WARPS, unroll=1):
        value = room[column, 0]
        for w in cutlass.range_constexpr(1, WARPS):
            value = value + room[column, w]
        out[batch, token, head, column] = (value * inverse).to(out.element_type)
    if cutlass.const_expr(lse is not None):
        row_of_lse = lse[batch, head, None]
        if thread == 0:
            row_of_lse[token] = log_sum_exp(finite_or_zero(top), total, Float32(1.0))


def _slot(part: Int32, where: Parts, grouped: bool) -> Int32:
    return slot_of(where.first + part, part == 0) if grouped else part


def launch_merge(
    partials: Partials,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    seqlens: cute.Tensor,
    sizes: CacheSizes,
    shape: tuple[int, int],  # (width of V, keys of a tile where groups share, else 0)
    stream,
):
    merge_kernel(partials, out, lse, seqlens, sizes, *shape).launch(
        grid=(sizes.batch * sizes.heads_kv * sizes.rows, 1, 1),
        block=(LANES * WARPS, 1, 1),
        min_blocks_per_mp=1,  # else ptxas saves registers and asks for the outputs one after the other
        stream=stream,
        use_pdl=True,
    )
