"""The CTA that is the last of a tile's to leave its part merges them all, as in common/combine.py: no second kernel."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.numeric import NEG_INF, exp2, finite_or_zero
from ...common.rowstate import inverse_total, log_sum_exp
from .pipeline import MMA_WARPS, meet
from .shares import CacheSizes, Partials, Share

TOGETHER = 16  # shares whose parts are asked for before one is waited for
LANES = 32


@cute.jit
def is_last(counters: cute.Tensor, tile: Int32, splits: Int32, word: cute.Tensor, thread: Int32) -> Int32:
    """By all MMA threads; the tile's counter, zero before, is zero again after the last. `word`: of shared memory."""
    meet()
    if thread == 0:
        cute.arch.fence_acq_rel_gpu()  # what all threads of the CTA wrote before they met
        number = cute.arch.atomic_add(counters.iterator + tile, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.fence_acq_rel_gpu()
        if number == splits - 1:
            counters[tile] = Int32(0)
        word[0] = Float32(cutlass.select_(number == splits - 1, Float32(1.0), Float32(0.0)))
    meet()
    return Int32(word[0] != 0.0)


@cute.jit
def merge_rows(
    partials: Partials, out: cute.Tensor, lse: cute.Tensor | None, share: Share, sizes: CacheSizes, tile: tuple
):
    """A warp a query row of the tile; `tile`: (tile_m, thread)."""
    tile_m, thread = tile
    lane, warp = thread % LANES, cute.arch.make_warp_uniform(thread // LANES)
    rows = cutlass.min(sizes.rows - share.row_start, tile_m)
    before = (Int64(share.batch) * sizes.heads_kv + share.head) * sizes.rows + share.row_start
    columns = partials.o.shape[2] // LANES
    for row in cutlass.range(warp, rows, MMA_WARPS, unroll=1):
        state, parts_of = partials.state[None, before + row, None], partials.o[None, before + row, None]
        parts = cute.make_rmem_tensor((columns, TOGETHER), Float32)
        sums = cute.make_rmem_tensor((columns,), Float32)
        sums.fill(0.0)
        top, total = Float32(NEG_INF), Float32(0.0)
        for start in cutlass.range(0, sizes.splits, TOGETHER, unroll=1):
            for i in cutlass.range_constexpr(TOGETHER):
                place = cutlass.min(start + i, sizes.splits - 1), lane * columns
                vector = cute.domain_offset(place, parts_of).iterator.align(4 * (columns & -columns))
                cute.autovec_copy(cute.make_tensor(vector, cute.make_layout(columns)), parts[None, i])
            exists = (start + lane < sizes.splits) & (lane < TOGETHER)
            number = cutlass.min(start + lane, sizes.splits - 1)
            maximum, share_total = state[number, 0], state[number, 1]
            maximum = Float32(cutlass.select_(exists, maximum, Float32(NEG_INF)))
            new_top = cute.arch.fmax(top, cute.arch.warp_reduction_max(maximum))
            shift = finite_or_zero(new_top)
            rescale = exp2(top - shift)
            weight = exp2(maximum - shift) * Float32(cutlass.select_(exists, share_total, Float32(0.0)))
            total = total * rescale + cute.arch.warp_reduction_sum(weight)
            for c in cutlass.range_constexpr(columns):
                sums[c] = sums[c] * rescale
            for i in cutlass.range_constexpr(TOGETHER):
                mine = cute.arch.shuffle_sync(weight, i)
                for c in cutlass.range_constexpr(columns):
                    sums[c] += Float32(cutlass.select_(mine != 0.0, mine * parts[c, i], Float32(0.0)))
            top = new_top
        inverse = inverse_total(total)
        token, in_group = divmod(share.row_start + row, sizes.by.group)
        head = share.head * sizes.group + in_group
        for c in cutlass.range_constexpr(columns):
            if lane * columns + c < out.shape[3]:
                out[share.batch, token, head, lane * columns + c] = (sums[c] * inverse).to(out.element_type)
        if cutlass.const_expr(lse is not None):
            row_of_lse = lse[share.batch, head, None]
            if lane == 0:
                row_of_lse[token] = log_sum_exp(finite_or_zero(top), total, Float32(1.0))
