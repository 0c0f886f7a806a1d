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

from .ahead import bound_types, compile_kernel, launch_options, operand_types
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
    store_tile,
    zeros,
)
from .tiles import PADDED, dq_tile


@triton.jit
def _row_values(workspace, batch, head, sizes, spec: tl.constexpr):
    """Where one head's LSE in base 2 and its delta start: (batch, heads_q, 2, seqlen_q rounded up to dQ's tiles)."""
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
    rows = start + tl.arange(0, tile_m)
    tl.store(lse_base + rows, lse_log2)
    tl.store(delta_base + rows, delta)
    return lse_log2, delta


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
    qkv, outs, row_values, dq, seqlen_q, seqlen_k, heads, group, scale, left, right, softcap, spec: tl.constexpr
):
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    q, k, v = qkv
    out, dout = outs
    sizes = Sizes(seqlen_q, seqlen_k, heads, group, left, right)
    tile_m: tl.constexpr = spec.tile_m
    tile, head, batch = grid_place(seqlen_q, heads, tile_m)
    if spec.causal:  # longest rows first
        tile = tl.cdiv(seqlen_q, tile_m) - 1 - tile
    start = tile * tile_m
    rows = start + tl.arange(0, tile_m)

    do_tile = load_tile(head_start(dout, batch, head, v_columns), dout, start, seqlen_q, tile_m, v_columns)
    out_tile = load_tile(head_start(out, batch, head, v_columns), out, start, seqlen_q, tile_m, v_columns)
    place = (batch, head, start)
    lse_log2, delta = _leave_row_values(do_tile, out_tile, row_values, place, sizes, spec)

    q_tile = load_tile(head_start(q, batch, head, qk_columns), q, start, seqlen_q, tile_m, qk_columns)
    kv_head = head // group
    kv = (head_start(k, batch, kv_head, qk_columns), k, head_start(v, batch, kv_head, v_columns), v)
    fixed = (q_tile, do_tile, lse_log2, delta)
    factors = cap_factors(scale * LOG2_E, softcap, spec)
    span = key_span(start, sizes, spec)
    acc = _walk_keys(zeros(tile_m, qk_columns), fixed, kv, rows, span, sizes, factors, spec)
    store_tile(scaled(acc, scale), head_start(dq, batch, head, qk_columns), dq, start, seqlen_q, qk_columns)


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
    q_base = head_start(q, batch, head, qk_columns)
    do_base = head_start(dout, batch, head, v_columns)
    lse_base, delta_base = _row_values(workspace, batch, head, sizes, spec)
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
        p = tl.exp2(s * scale_log2 - tl.load(lse_base + rows)[None, :])
        bounded: tl.constexpr = spec.causal or spec.right or spec.left
        if bounded and (spec.mask_all or start < span.whole or (spec.left and start >= span.full)):
            p = tl.where(in_window(rows[None, :], keys[:, None], sizes, spec), p, 0.0)
        dv = add_dot(dv, p.to(dout.ptr.dtype.element_ty), do_tile, spec)
        ds = p * (dot_transposed(v_tile, do_tile, spec) - tl.load(delta_base + rows)[None, :])
        if spec.softcap:
            ds = ds * slope
        dk = add_dot(dk, ds.to(q.ptr.dtype.element_ty), q_tile, spec)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_dkdv(
    qkv, dout, workspace, grads, seqlen_q, seqlen_k, heads, group, scale, left, right, softcap, spec: tl.constexpr
):
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    q, k, v = qkv
    dk, dv = grads
    sizes = Sizes(seqlen_q, seqlen_k, heads, group, left, right)
    tile_n: tl.constexpr = spec.tile_n
    tile, kv_head, batch = grid_place(seqlen_k, heads // group, tile_n)  # causal: the first keys have the most rows
    start = tile * tile_n
    keys = start + tl.arange(0, tile_n)

    k_tile = load_tile(head_start(k, batch, kv_head, qk_columns), k, start, seqlen_k, tile_n, qk_columns)
    v_tile = load_tile(head_start(v, batch, kv_head, v_columns), v, start, seqlen_k, tile_n, v_columns)
    fixed = (k_tile, v_tile)
    state = (zeros(tile_n, qk_columns), zeros(tile_n, v_columns))
    span = row_span(start, sizes, spec)
    factors = cap_factors(scale * LOG2_E, softcap, spec)
    for member in tl.range(0, group):
        queries = (q, dout, workspace, batch, kv_head * group + member)
        state = _walk_rows(state, fixed, queries, keys, span, sizes, factors, spec)

    dk_acc, dv_acc = state
    store_tile(scaled(dk_acc, scale), head_start(dk, batch, kv_head, qk_columns), dk, start, seqlen_k, qk_columns)
    store_tile(dv_acc, head_start(dv, batch, kv_head, v_columns), dv, start, seqlen_k, v_columns)


def _specs(plan: Plan) -> tuple[Callable[..., Spec], Callable[..., Spec]]:
    """Of the dQ kernel, and of the dK/dV kernel, whose tile_m counts keys and tile_n query rows."""
    tile = dq_tile(plan)
    if tile.tile_m % plan.tile.tile_n:
        raise ValueError(f"dQ's tile_m={tile.tile_m} is no multiple of dK/dV's tile_n={plan.tile.tile_n}")
    return spec_maker(plan, tile.tile_m, tile.tile_n), spec_maker(plan, plan.tile.tile_n, plan.tile.tile_m)


def compile_ahead(plan: Plan) -> tuple[Any, ...]:
    x = operand_types(plan.dtype)
    dlse = "*fp32" if plan.lse_grad else None
    numbers = ("i32", "i32", "i32", "i32", "fp32", *bound_types(plan))
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
    bound_values = bound_picker(plan)
    tile_q, tile_k = dq_tile(plan).tile_m, plan.tile.tile_m

    def backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, *numbers: float) -> None:
        batch, seqlen_q, heads, head_dim = q.shape
        seqlen_k, heads_kv, head_dim_v = v.shape[1:]
        scale, *bounds = numbers
        numbers = (seqlen_q, seqlen_k, heads, heads // heads_kv, scale, *bound_values(*bounds))
        dims = (head_dim, head_dim_v, alignment(head_dim, q, k, dq, dk), alignment(head_dim_v, v, out, dout, dv))
        tiles_q = triton.cdiv(seqlen_q, tile_q)
        workspace = torch.empty((batch, heads, 2, tiles_q * tile_q), dtype=torch.float32, device=q.device)
        row_values = (lse.contiguous(), None if dlse is None else dlse.contiguous(), workspace)
        qkv, dout = (operand(q), operand(k), operand(v)), operand(dout)
        attention_backward_dq[(tiles_q * heads * batch,)](
            qkv, (operand(out), dout), row_values, operand(dq), *numbers, specs_dq(*dims), **options_dq
        )
        attention_backward_dkdv[(triton.cdiv(seqlen_k, tile_k) * heads_kv * batch,)](
            qkv, dout, workspace, (operand(dk), operand(dv)), *numbers, specs_dkdv(*dims), **options_dkdv
        )

    return backward
