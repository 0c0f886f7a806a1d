"""Backward attention in two kernels, each the only writer of what it writes: no atomics, so always deterministic.

dQ: one program walks all keys of one tile of query rows. It has dO and O at hand, so it also leaves
LSE in base 2 and delta = rowsum(dO * O) - dLSE for the second kernel.
dK/dV: one program walks, for one tile of keys, all query rows of every query head of its group.
Both recompute P = exp(S - LSE); dS = P * (dP - delta).
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

from .ahead import bound_types, compile_kernel, launch_options, length_types, operand_types
from .operands import (
    LOG2_E,
    UNSPECIALIZED,
    Sizes,
    Spec,
    add_dot,
    alignment,
    bound_picker,
    cap_factors,
    capped_and_slope,
    dot_transposed,
    grid_place,
    head_start,
    in_window,
    key_span,
    load_rows,
    load_tile,
    operand,
    row_dots,
    row_span,
    rows_start,
    scaled,
    sees,
    spec_maker,
    store_rows,
    store_tile,
    zeros,
)
from .sequences import lengths_taker, sequence_place, tiles_of
from .tiles import PADDED, dq_tile


@triton.jit
def _row_values(workspace, batch, head, sizes, spec: tl.constexpr):
    """Where one head's LSE in base 2 and its delta start: (batch, heads_q, 2, seqlen_q rounded up to dQ's tiles).

    Packed rows lie as everywhere, with no gap between sequences: what reads them has to stop at a sequence's end.
    """
    if spec.packed:
        base = workspace + head.to(tl.int64) * 2 * sizes.total_q + sizes.first_q
        return base, base + sizes.total_q
    else:
        rows = tl.cdiv(sizes.seqlen_q, spec.row_pad) * spec.row_pad
        base = workspace + (batch.to(tl.int64) * sizes.heads_q + head) * 2 * rows
        return base, base + rows


@triton.jit
def _leave_row_values(do_tile, out_tile, row_values, place, sizes, spec: tl.constexpr):
    """LSE in base 2 and delta of this program's rows, returned and left in the workspace.

    Rows that saw no key, or do not exist, get LSE +inf and delta 0: their P is then exactly 0, and 0 * NaN cannot be.
    """
    lse, dlse, workspace = row_values
    batch, head, start = place
    tile_m: tl.constexpr = spec.tile_m
    value = load_rows(rows_start(lse, batch, head, sizes), start, sizes.seqlen_q, tile_m, float("-inf"))
    delta = row_dots(do_tile, out_tile)
    if spec.lse_grad:
        delta -= load_rows(rows_start(dlse, batch, head, sizes), start, sizes.seqlen_q, tile_m, 0.0)
    dead = value == float("-inf")
    lse_log2 = tl.where(dead, float("inf"), value * LOG2_E)
    delta = tl.where(dead, 0.0, delta)
    lse_base, delta_base = _row_values(workspace, batch, head, sizes, spec)
    if spec.packed:
        store_rows(lse_log2, lse_base, start, sizes.seqlen_q)
        store_rows(delta, delta_base, start, sizes.seqlen_q)
    else:
        rows = start + tl.arange(0, tile_m)
        tl.store(lse_base + rows, lse_log2)
        tl.store(delta_base + rows, delta)
    return lse_log2, delta


@triton.jit
def _left_row_values(bases, start, sizes, spec: tl.constexpr):
    """What _leave_row_values left; of rows that do not exist too."""
    lse_base, delta_base = bases
    if spec.packed:
        lse_log2 = load_rows(lse_base, start, sizes.seqlen_q, spec.tile_m, float("inf"))
        return lse_log2, load_rows(delta_base, start, sizes.seqlen_q, spec.tile_m, 0.0)
    else:
        rows = start + tl.arange(0, spec.tile_m)
        return tl.load(lse_base + rows), tl.load(delta_base + rows)


@triton.jit
def _walk_keys(acc, fixed, kv, rows, span, sizes, factors, spec: tl.constexpr):
    """Add dS @ K of a span's keys to dQ."""
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    q_tile, do_tile, lse_log2, delta = fixed
    k_base, k, v_base, v = kv
    cap_factor, scale_log2 = factors
    for start in tl.range(span.first, span.last, spec.tile_n):
        k_tile = load_tile(k_base, k, start, sizes.seqlen_k, spec.tile_n, qk_columns)
        v_tile = load_tile(v_base, v, start, sizes.seqlen_k, spec.tile_n, v_columns)
        s = dot_transposed(q_tile, k_tile, spec)
        slope = 1.0
        if spec.softcap:
            s, slope = capped_and_slope(s, cap_factor)
        p = tl.exp2(s * scale_log2 - lse_log2[:, None])
        if spec.mask_all or start >= span.full or (spec.left and start < span.whole):
            keys = start + tl.arange(0, spec.tile_n)
            p = tl.where(sees(rows[:, None], keys[None, :], sizes, spec), p, 0.0)
        ds = p * (dot_transposed(do_tile, v_tile, spec) - delta[:, None])
        if spec.softcap:
            ds = ds * slope
        acc = add_dot(acc, ds.to(k.ptr.dtype.element_ty), k_tile, spec)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_dq(
    qkv, outs, row_values, dq, lengths,
    seqlen_q, seqlen_k, sequences, heads, group, scale, left, right, softcap, spec: tl.constexpr,
):  # fmt: skip
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    q, k, v = qkv
    out, dout = outs
    tile_m: tl.constexpr = spec.tile_m
    sizes = Sizes(seqlen_q, seqlen_k, heads, group, left, right, seqlen_q)
    tile, head, batch = grid_place(sizes, sequences, tile_m, False, spec)
    if spec.packed:
        tile, first_q, rows_q, first_k, keys_k = sequence_place(tile, lengths, sequences, sizes, tile_m, False)
        sizes = Sizes(rows_q, keys_k, heads, group, left, right, seqlen_q, first_q, first_k)
        if tile * tile_m >= sizes.seqlen_q:
            return
    start = tile * tile_m
    rows = start + tl.arange(0, tile_m)

    do_base = head_start(dout, batch, head, sizes.first_q, v_columns)
    do_tile = load_tile(do_base, dout, start, sizes.seqlen_q, tile_m, v_columns)
    out_base = head_start(out, batch, head, sizes.first_q, v_columns)
    out_tile = load_tile(out_base, out, start, sizes.seqlen_q, tile_m, v_columns)
    place = (batch, head, start)
    lse_log2, delta = _leave_row_values(do_tile, out_tile, row_values, place, sizes, spec)

    q_base = head_start(q, batch, head, sizes.first_q, qk_columns)
    q_tile = load_tile(q_base, q, start, sizes.seqlen_q, tile_m, qk_columns)
    kv_head = head // group
    k_base = head_start(k, batch, kv_head, sizes.first_k, qk_columns)
    kv = (k_base, k, head_start(v, batch, kv_head, sizes.first_k, v_columns), v)
    fixed = (q_tile, do_tile, lse_log2, delta)
    factors = cap_factors(scale * LOG2_E, softcap, spec)
    span = key_span(start, sizes, spec)
    acc = _walk_keys(zeros(tile_m, qk_columns), fixed, kv, rows, span, sizes, factors, spec)
    dq_base = head_start(dq, batch, head, sizes.first_q, qk_columns)
    store_tile(scaled(acc, scale), dq_base, dq, start, sizes.seqlen_q, qk_columns)


@triton.jit
def _walk_rows(state, fixed, queries, keys, span, sizes, factors, spec: tl.constexpr):
    """Add one query head's rows of a span to dK and dV.

    Keys beyond seqlen_k need no mask: their dK and dV rows are never stored.
    """
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    dk, dv = state
    k_tile, v_tile = fixed
    q, dout, workspace, batch, head = queries
    q_base = head_start(q, batch, head, sizes.first_q, qk_columns)
    do_base = head_start(dout, batch, head, sizes.first_q, v_columns)
    row_values = _row_values(workspace, batch, head, sizes, spec)
    cap_factor, scale_log2 = factors
    tile_m: tl.constexpr = spec.tile_m
    for start in tl.range(span.first, span.last, tile_m):
        q_tile = load_tile(q_base, q, start, sizes.seqlen_q, tile_m, qk_columns)
        do_tile = load_tile(do_base, dout, start, sizes.seqlen_q, tile_m, v_columns)
        rows = start + tl.arange(0, tile_m)
        s = dot_transposed(k_tile, q_tile, spec)  # (tile_n, tile_m)
        slope = 1.0
        if spec.softcap:
            s, slope = capped_and_slope(s, cap_factor)
        lse_log2, delta = _left_row_values(row_values, start, sizes, spec)
        p = tl.exp2(s * scale_log2 - lse_log2[None, :])
        bounded: tl.constexpr = spec.causal or spec.right or spec.left
        if bounded and (spec.mask_all or start < span.whole or (spec.left and start >= span.full)):
            p = tl.where(in_window(rows[None, :], keys[:, None], sizes, spec), p, 0.0)
        dv = add_dot(dv, p.to(dout.ptr.dtype.element_ty), do_tile, spec)
        ds = p * (dot_transposed(v_tile, do_tile, spec) - delta[None, :])
        if spec.softcap:
            ds = ds * slope
        dk = add_dot(dk, ds.to(q.ptr.dtype.element_ty), q_tile, spec)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_dkdv(
    qkv, dout, workspace, grads, lengths,
    seqlen_q, seqlen_k, sequences, heads, group, scale, left, right, softcap, spec: tl.constexpr,
):  # fmt: skip
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    q, k, v = qkv
    dk, dv = grads
    tile_n: tl.constexpr = spec.tile_n
    sizes = Sizes(seqlen_q, seqlen_k, heads, group, left, right, seqlen_q)
    tile, kv_head, batch = grid_place(sizes, sequences, tile_n, True, spec)  # causal: the first keys have the most rows
    if spec.packed:
        tile, first_q, rows_q, first_k, keys_k = sequence_place(tile, lengths, sequences, sizes, tile_n, True)
        sizes = Sizes(rows_q, keys_k, heads, group, left, right, seqlen_q, first_q, first_k)
        if tile * tile_n >= sizes.seqlen_k:
            return
    start = tile * tile_n
    keys = start + tl.arange(0, tile_n)

    k_base = head_start(k, batch, kv_head, sizes.first_k, qk_columns)
    k_tile = load_tile(k_base, k, start, sizes.seqlen_k, tile_n, qk_columns)
    v_base = head_start(v, batch, kv_head, sizes.first_k, v_columns)
    v_tile = load_tile(v_base, v, start, sizes.seqlen_k, tile_n, v_columns)
    fixed = (k_tile, v_tile)
    state = (zeros(tile_n, qk_columns), zeros(tile_n, v_columns))
    span = row_span(start, sizes, spec)
    factors = cap_factors(scale * LOG2_E, softcap, spec)
    for member in tl.range(0, group):
        queries = (q, dout, workspace, batch, kv_head * group + member)
        state = _walk_rows(state, fixed, queries, keys, span, sizes, factors, spec)

    dk_acc, dv_acc = state
    dk_base = head_start(dk, batch, kv_head, sizes.first_k, qk_columns)
    store_tile(scaled(dk_acc, scale), dk_base, dk, start, sizes.seqlen_k, qk_columns)
    dv_base = head_start(dv, batch, kv_head, sizes.first_k, v_columns)
    store_tile(dv_acc, dv_base, dv, start, sizes.seqlen_k, v_columns)


def _specs(plan: Plan) -> tuple[Callable[..., Spec], Callable[..., Spec]]:
    """Of the dQ kernel, and of the dK/dV kernel, whose tile_m counts keys and tile_n query rows."""
    tile = dq_tile(plan)
    if plan.form != PACKED and tile.tile_m % plan.tile.tile_n:
        raise ValueError(f"dQ's tile_m={tile.tile_m} is no multiple of dK/dV's tile_n={plan.tile.tile_n}")
    return spec_maker(plan, tile.tile_m, tile.tile_n), spec_maker(plan, plan.tile.tile_n, plan.tile.tile_m)


def compile_ahead(plan: Plan) -> tuple[Any, ...]:
    x = operand_types(plan.dtype)
    dlse = "*fp32" if plan.lse_grad else None
    lengths, sequences = length_types(plan)
    numbers = (lengths, "i32", "i32", sequences, "i32", "i32", "fp32", *bound_types(plan))
    spec_dq, spec_dkdv = (make(plan.head_dim, plan.head_dim_v, 1, 1) for make in _specs(plan))
    dq = ((x, x, x), (x, x), ("*fp32", dlse, "*fp32"), x, *numbers, spec_dq)
    dkdv = ((x, x, x), x, "*fp32", (x, x), *numbers, spec_dkdv)
    return (
        compile_kernel(attention_backward_dq, dq, plan.arch, dq_tile(plan)),
        compile_kernel(attention_backward_dkdv, dkdv, plan.arch, plan.tile),
    )


def build(plan: Plan) -> Callable[..., None]:
    """Compiles for the usual launch (see ahead.py); unusual strides and padded head dims compile at their first."""
    if PADDED not in plan.variant and not triton.knobs.runtime.interpret:
        compile_ahead(plan)
    specs_dq, specs_dkdv = _specs(plan)
    options_dq, options_dkdv = launch_options(dq_tile(plan)), launch_options(plan.tile)
    bound_values, take_lengths = bound_picker(plan), lengths_taker(plan)
    tile_q, tile_k = dq_tile(plan).tile_m, plan.tile.tile_m

    def backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, *numbers: Any) -> None:
        batch, seqlen_q, heads, head_dim = q.shape
        seqlen_k, heads_kv, head_dim_v = v.shape[1:]
        lengths, sequences, (scale, *bounds) = take_lengths(numbers)
        numbers = (
            lengths, seqlen_q, seqlen_k, sequences, heads, heads // heads_kv, scale, *bound_values(*bounds)
        )  # fmt: skip
        dims = (head_dim, head_dim_v, alignment(head_dim, q, k, dq, dk), alignment(head_dim_v, v, out, dout, dv))
        tiles_q, tiles_k = tiles_of(seqlen_q, sequences, tile_q), tiles_of(seqlen_k, sequences, tile_k)
        padded_rows = seqlen_q if lengths is not None else tiles_q * tile_q
        workspace = torch.empty((batch, heads, 2, padded_rows), dtype=torch.float32, device=q.device)
        row_values = (lse.contiguous(), None if dlse is None else dlse.contiguous(), workspace)
        qkv, dout = (operand(q), operand(k), operand(v)), operand(dout)
        attention_backward_dq[(tiles_q * heads * batch,)](
            qkv, (operand(out), dout), row_values, operand(dq), *numbers, specs_dq(*dims), **options_dq
        )
        attention_backward_dkdv[(tiles_k * heads_kv * batch,)](
            qkv, dout, workspace, (operand(dk), operand(dv)), *numbers, specs_dkdv(*dims), **options_dkdv
        )

    return backward
