"""CTAs that share the keys of a row and fit a cluster need no second kernel: parts stay in shared memory.

Each CTA leaves O and the states of its query rows where its ring was, and after a cluster barrier merges some of the
columns out of everybody's, as in common/combine.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.numeric import exp2, finite_or_zero, mul_rn
from ...common.rowstate import inverse_total, log_sum_exp
from .pipeline import MMA_WARPS
from .shares import CacheSizes, Columns, Share

VECTOR = 4  # float32 in 16 bytes
STATE = VECTOR  # floats behind a row's O: its maximum and total; with them rows start four banks apart


def room_for_parts(ring: cute.Pointer, tile_m: int, width_v: int) -> cute.Tensor:
    """(tile_m, width_v + STATE) float32 over the ring, of K and V, whose two slots are larger."""
    pointer = cute.recast_ptr(ring, dtype=Float32)
    return cute.make_tensor(pointer, cute.make_layout((tile_m, width_v + STATE), stride=(width_v + STATE, 1)))


@cute.jit
def leave_part(
    view: cute.Tensor,  # as walk.output_view
    room: cute.Tensor,
    state: tuple,
    share: Share,
    columns: Columns,
    place: tuple,  # (the thread's first column of V, is it the thread of its query rows that writes their states)
    scale_log2: Float32,
):
    """The ring is used up: all MMA threads have met since their last wgmma."""
    first, writes = place
    width = room.shape[1] - STATE
    for c in cutlass.range_constexpr(len(columns.index)):
        row = room[columns.index[c] - share.row_start, None]
        for block in cutlass.range_constexpr(cute.size(view, mode=[2])):
            for r in cutlass.range_constexpr(2):
                row[first + 64 * block + 8 * r] = view[r, c, block]
        if writes != 0:
            row[width] = mul_rn(state.maximum[c], scale_log2)
            row[width + 1] = state.total[c]


def _remote(room: cute.Tensor, row: Int32, column: Int32, rank: Int32, count: int) -> cute.Tensor:
    """(count,) of another CTA's room."""
    local = cute.domain_offset((row, column), room).iterator.align(4 * count)
    return cute.make_tensor(cute.arch.map_dsmem_ptr(local, rank), cute.make_layout(count))


def depart():
    """Who left before the others have read would take its shared memory away."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def _merge(
    room: cute.Tensor,
    results: tuple,
    share: Share,
    sizes: CacheSizes,
    place: tuple,  # (row, column) of the room
    most: cutlass.Constexpr[int],
):
    """Everything is asked for before anything is waited for."""
    out, lse = results
    row, column = place
    width = room.shape[1] - STATE
    states = cute.make_rmem_tensor((2, most), Float32)
    parts = cute.make_rmem_tensor((VECTOR, most), Float32)
    for i in cutlass.range_constexpr(most):
        rank = cutlass.min(Int32(i), sizes.together - 1)  # of a CTA that is not there another, with no weight
        cute.autovec_copy(_remote(room, row, Int32(width), rank, 2), states[None, i])
        cute.autovec_copy(_remote(room, row, column, rank, VECTOR), parts[None, i])
    top = states[0, 0]
    for i in cutlass.range_constexpr(1, most):
        top = cute.arch.fmax(top, states[0, i])
    shift, total = finite_or_zero(top), Float32(0.0)
    sums = [Float32(0.0) for _ in range(VECTOR)]
    for i in cutlass.range_constexpr(most):
        weight = exp2(states[0, i] - shift) * states[1, i]
        weight = Float32(cutlass.select_(i < sizes.together, weight, Float32(0.0)))
        total = total + weight
        for c in cutlass.range_constexpr(VECTOR):
            sums[c] = sums[c] + Float32(cutlass.select_(weight != 0.0, weight * parts[c, i], Float32(0.0)))
    inverse = inverse_total(total)
    token, in_group = divmod(share.row_start + row, sizes.by.group)
    head = share.head * sizes.group + in_group
    result = cute.make_rmem_tensor((VECTOR,), out.element_type)
    for c in cutlass.range_constexpr(VECTOR):
        result[c] = (sums[c] * inverse).to(out.element_type)
    target = cute.domain_offset((share.batch, token, head, column), out).iterator.align(8)
    cute.autovec_copy(result, cute.make_tensor(target, cute.make_layout(VECTOR)))
    if cutlass.const_expr(lse is not None):
        row_of_lse = lse[share.batch, head, None]
        if column == 0:
            row_of_lse[token] = log_sum_exp(shift, total, Float32(1.0))


@cute.jit
def merge_parts(
    room: cute.Tensor,
    results: tuple,  # (out, lse), of all rows
    share: Share,
    sizes: CacheSizes,
    thread: Int32,
    most: cutlass.Constexpr[int],  # CTAs a cluster may have
):
    """By all MMA threads of the cluster, 16 bytes at a time."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    tile_m, width = room.shape[0], room.shape[1] - STATE
    vectors = width // VECTOR
    rows = cutlass.min(sizes.rows - share.row_start, tile_m)
    first = cute.arch.block_idx_in_cluster() + sizes.together * thread
    for index in cutlass.range(first, rows * vectors, 32 * MMA_WARPS * sizes.together, unroll=1):
        row, column = index // vectors, index % vectors * VECTOR
        if column < results[0].shape[3]:
            _merge(room, results, share, sizes, (row, column), most)
    depart()
