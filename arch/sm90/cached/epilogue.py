"""O and LSE leave, or a share's part of them: from registers, by the few rows that exist."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.numeric import mul_rn, pack_pair
from ...common.rowstate import RowState, log_sum_exp
from ..mma import first_column, rows_view
from .shares import CacheSizes, Partials, Rows, Share


@cute.jit
def store_rows(o: cute.Tensor, out: cute.Tensor, share: Share, rows: Rows, thread: Int32):
    """out (batch, seqlen_q, heads_q, head_dim_v): two columns a store."""
    view, head_dim_v = rows_view(o), out.shape[3]
    for r in cutlass.range_constexpr(2):
        if rows.exist[r] != 0:
            place = (share.batch, rows.token[r], rows.head[r], first_column(thread))
            address = cute.domain_offset(place, out).iterator.toint()
            for eight in cutlass.range_constexpr(cute.size(view, mode=[1]) // 2):
                word = pack_pair(view[r, 2 * eight], view[r, 2 * eight + 1], out.element_type)
                cute.arch.inline_ptx(
                    f"st.global.b32 [{{$r0}} + {16 * eight}], {{$r1}};",
                    read_only_args=[address, word],
                    predicate=8 * eight < head_dim_v,
                )


@cute.jit
def store_lse(lse: cute.Tensor, state: RowState, share: Share, rows: Rows, thread: Int32, scale_log2: Float32):
    """lse (batch, heads_q, seqlen_q). One lane of the four that share a row writes it."""
    for r in cutlass.range_constexpr(2):
        if (rows.exist[r] != 0) & (thread % 4 == 0):
            lse[share.batch, rows.head[r], rows.token[r]] = log_sum_exp(state.maximum[r], state.total[r], scale_log2)


@cute.jit
def store_share(
    o: cute.Tensor,
    partials: Partials,
    state: RowState,
    share: Share,
    rows: Rows,
    sizes: CacheSizes,
    thread: Int32,
    scale_log2: Float32,
):
    """O of a share that has no keys is not written: nobody reads it."""
    view = rows_view(o)
    for r in cutlass.range_constexpr(2):
        if rows.exist[r] != 0:
            head_row = Int64(share.batch) * sizes.heads_kv + share.head
            row = head_row * sizes.rows + rows.token[r] * sizes.group + (rows.head[r] - share.head * sizes.group)
            if thread % 4 == 0:
                partials.state[share.split, row, 0] = mul_rn(state.maximum[r], scale_log2)
                partials.state[share.split, row, 1] = state.total[r]
            if share.first < share.last:
                address = cute.domain_offset((share.split, row, first_column(thread)), partials.o).iterator.toint()
                for eight in cutlass.range_constexpr(cute.size(view, mode=[1]) // 2):
                    cute.arch.inline_ptx(
                        f"st.global.v2.f32 [{{$r0}} + {32 * eight}], {{{{$r1}}, {{$r2}}}};",
                        read_only_args=[address, view[r, 2 * eight], view[r, 2 * eight + 1]],
                    )
