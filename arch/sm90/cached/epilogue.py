"""O and LSE leave, or a share's part of them: from registers, where a thread holds some columns of few query rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.numeric import mul_rn
from ...common.rowstate import log_sum_exp
from .shares import CacheSizes, Columns, Partials, Share


@cute.jit
def store_rows(view: cute.Tensor, out: cute.Tensor, share: Share, columns: Columns, first: Int32):
    """view: as walk.output_view; `first`: its first column of V; out (batch, seqlen_q, heads_q, head_dim_v)."""
    for c in cutlass.range_constexpr(len(columns.token)):
        row = out[share.batch, columns.token[c], columns.head[c], None]
        for block in cutlass.range_constexpr(cute.size(view, mode=[2])):
            for r in cutlass.range_constexpr(2):
                place = first + 64 * block + 8 * r
                if (columns.exist[c] != 0) & (place < out.shape[3]):
                    row[place] = view[r, c, block].to(out.element_type)


@cute.jit
def store_lse(lse: cute.Tensor, state: tuple, share: Share, columns: Columns, writes: Int32, scale_log2: Float32):
    """lse (batch, heads_q, seqlen_q). `writes`: the threads of which each query row has one."""
    for c in cutlass.range_constexpr(len(columns.token)):
        if (columns.exist[c] != 0) & (writes != 0):
            value = log_sum_exp(state.maximum[c], state.total[c], scale_log2)
            lse[share.batch, columns.head[c], columns.token[c]] = value


@cute.jit
def store_share(
    view: cute.Tensor,
    partials: Partials,
    state: tuple,
    share: Share,
    columns: Columns,
    sizes: CacheSizes,
    place: tuple,  # (the thread's first column of V, writes)
    scale_log2: Float32,
):
    """O of a share that has no keys is not written: nobody reads it."""
    first, writes = place
    for c in cutlass.range_constexpr(len(columns.token)):
        if columns.exist[c] != 0:
            row = (cutlass.Int64(share.batch) * sizes.heads_kv + share.head) * sizes.rows + columns.index[c]
            if writes != 0:
                partials.state[share.split, row, 0] = mul_rn(state.maximum[c], scale_log2)
                partials.state[share.split, row, 1] = state.total[c]
            if share.count > 0:
                columns_of_v = partials.o[share.split, row, None]
                for i in cutlass.range_constexpr(2 * cute.size(view, mode=[2])):
                    columns_of_v[first + 8 * i + 48 * (i // 2)] = view[i % 2, c, i // 2]
