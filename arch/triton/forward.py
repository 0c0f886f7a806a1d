"""Forward attention: one program walks all keys of one tile of query rows with a running softmax."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from cute_flash.spec.plan import Plan

from .ahead import bound_types, compile_kernel, launch_options, length_types, operand_types
from .operands import (
    LN_2,
    LOG2_E,
    UNSPECIALIZED,
    Sizes,
    Spec,
    add_dot,
    alignment,
    bound_picker,
    cap_factors,
    capped,
    dot_transposed,
    grid_place,
    head_start,
    key_span,
    load_tile,
    operand,
    rows_start,
    scaled,
    sees,
    spec_maker,
    store_rows,
    store_tile,
    zeros,
)
from .sequences import lengths_taker, sequence_place, tiles_of
from .tiles import PADDED


@triton.jit
def _walk_keys(state, q_tile, kv, rows, span, sizes, factors, spec: tl.constexpr):
    """Take the keys of a span into the running softmax.

    One loop with a branch, not an unmasked and a masked loop: with the accumulator passing from one loop to another
    ptxas serialises every wgmma of both (its remark C7515).
    """
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    acc, row_sum, row_max = state
    k_base, k, v_base, v = kv
    cap_factor, scale_log2 = factors
    for start in tl.range(span.first, span.last, spec.tile_n):
        k_tile = load_tile(k_base, k, start, sizes.seqlen_k, spec.tile_n, qk_columns)
        s = dot_transposed(q_tile, k_tile, spec)
        if spec.softcap:
            s = capped(s, cap_factor)
        if spec.mask_all or start >= span.full or (spec.left and start < span.whole):
            keys = start + tl.arange(0, spec.tile_n)
            s = tl.where(sees(rows[:, None], keys[None, :], sizes, spec), s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        # A row that has seen no key yet keeps -inf as its maximum: only the exponent gets a finite stand-in.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s * scale_log2 - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        v_tile = load_tile(v_base, v, start, sizes.seqlen_k, spec.tile_n, v_columns)
        acc = add_dot(scaled(acc, correction[:, None]), p.to(v.ptr.dtype.element_ty), v_tile, spec)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward(
    qkv, out, lse, lengths,
    seqlen_q, seqlen_k, sequences, heads, group, scale_log2, left, right, softcap, spec: tl.constexpr,
):  # fmt: skip
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    q, k, v = qkv
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

    q_base = head_start(q, batch, head, sizes.first_q, qk_columns)
    q_tile = load_tile(q_base, q, start, sizes.seqlen_q, tile_m, qk_columns)
    kv_head = head // group
    k_base = head_start(k, batch, kv_head, sizes.first_k, qk_columns)
    kv = (k_base, k, head_start(v, batch, kv_head, sizes.first_k, v_columns), v)
    row_max = tl.full((tile_m,), float("-inf"), tl.float32)
    state = (zeros(tile_m, v_columns), tl.zeros((tile_m,), tl.float32), row_max)
    factors = cap_factors(scale_log2, softcap, spec)
    span = key_span(start, sizes, spec)
    acc, row_sum, row_max = _walk_keys(state, q_tile, kv, rows, span, sizes, factors, spec)

    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)  # a row that saw no key: output 0
    out_base = head_start(out, batch, head, sizes.first_q, v_columns)
    store_tile(scaled(acc, inverse[:, None]), out_base, out, start, sizes.seqlen_q, v_columns)
    if spec.lse:
        store_rows((row_max + tl.log2(row_sum)) * LN_2, rows_start(lse, batch, head, sizes), start, sizes.seqlen_q)


def _specs(plan: Plan) -> Callable[..., Spec]:
    return spec_maker(plan, plan.tile.tile_m, plan.tile.tile_n)


def compile_ahead(plan: Plan) -> tuple[Any, ...]:
    x = operand_types(plan.dtype)
    lse = "*fp32" if plan.lse else None
    spec = _specs(plan)(plan.head_dim, plan.head_dim_v, 1, 1)
    lengths, sequences = length_types(plan)
    sizes = ("i32", "i32", sequences, "i32", "i32")
    arguments = ((x, x, x), x, lse, lengths, *sizes, "fp32", *bound_types(plan), spec)
    return (compile_kernel(attention_forward, arguments, plan.arch, plan.tile),)


def build(plan: Plan) -> Callable[..., None]:
    """Compiles for the usual launch (see ahead.py); unusual strides and padded head dims compile at their first."""
    if PADDED not in plan.variant and not triton.knobs.runtime.interpret:
        compile_ahead(plan)
    specs = _specs(plan)
    options = launch_options(plan.tile)
    bound_values = bound_picker(plan)
    take_lengths = lengths_taker(plan)

    def forward(q, k, v, out, lse, *numbers: Any) -> None:
        batch, seqlen_q, heads, head_dim = q.shape
        seqlen_k, heads_kv, head_dim_v = v.shape[1:]
        lengths, sequences, (scale, *bounds) = take_lengths(numbers)
        spec = specs(head_dim, head_dim_v, alignment(head_dim, q, k), alignment(head_dim_v, v, out))
        rows = lse if lse is None or lse.is_contiguous() else torch.empty(lse.shape, device=lse.device)
        attention_forward[(tiles_of(seqlen_q, sequences, plan.tile.tile_m) * heads * batch,)](
            (operand(q), operand(k), operand(v)), operand(out), rows, lengths,
            seqlen_q, seqlen_k, sequences, heads, heads // heads_kv,
            scale * LOG2_E.value, *bound_values(*bounds), spec, **options,
        )  # fmt: skip
        if rows is not lse:
            lse.copy_(rows)

    return forward
