"""Few query rows over a key-value cache, dense or paged: programs share the keys of a tile, and a second kernel merges.

The query rows of all heads of a group share a tile, so that K and V are read once a group: row r of a tile is token
r // group of head r % group. Where several programs share the keys, each leaves its own O and LSE, and the merge weighs
them by the LSE identity, in the order of the shares.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from cute_flash.spec.plan import Plan

from .ahead import bound_types, compile_kernel, launch_options, operand_types
from .operands import (
    LN_2,
    LOG2_E,
    Operand,
    Sizes,
    Spec,
    add_dot,
    aligned,
    alignment,
    bound_picker,
    cap_factors,
    capped,
    dot_transposed,
    furthest,
    gather_tile,
    in_window,
    load_tile,
    nearest,
    operand,
    scaled,
    scatter_tile,
    spec_maker,
    zeros,
)
from .tiles import PADDED

UNSPECIALIZED = [
    "table_stride", "cache_rows", "capacity", "appended", "seqlen_q", "heads", "group", "splits", "split_keys", "left",
    "right", "rows",
]  # fmt: skip
CHUNK = tl.constexpr(16)  # shares that the merge reads at a time


@triton.jit
def _length(seqlens, batch, capacity):
    """Keys of a row before what is appended; clamped before anything is added, which would pass 32 bits."""
    return tl.minimum(tl.maximum(tl.load(seqlens + batch), 0), capacity)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def append_keys(new, caches, tables, table_stride, cache_rows, capacity, appended, heads, spec: tl.constexpr):
    """One new key of one head a program, K and V; dropped where the row has no room. heads: of the cache."""
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    k_new, v_new = new
    k, v = caches
    seqlens, page_table, batch_idx = tables
    place = tl.program_id(0)
    head = (place % heads).to(tl.int64)
    key = place // heads % appended
    batch = place // heads // appended
    position = _length(seqlens, batch, capacity) + key
    if position >= capacity:
        return
    if spec.page_size == 0:
        page = batch
        if batch_idx is not None:
            page = tl.load(batch_idx + batch)
    else:
        page = tl.load(page_table + batch.to(tl.int64) * table_stride + position // spec.page_size)
        position = position % spec.page_size
    page = tl.minimum(tl.maximum(page, 0), cache_rows - 1).to(tl.int64)
    row = tl.zeros((1,), tl.int64)
    source = batch.to(tl.int64) * k_new.batch + key.to(tl.int64) * k_new.row + head * k_new.head
    k_row = gather_tile(k_new.ptr + source, k_new, row, row == 0, qk_columns)
    source = batch.to(tl.int64) * v_new.batch + key.to(tl.int64) * v_new.row + head * v_new.head
    v_row = gather_tile(v_new.ptr + source, v_new, row, row == 0, v_columns)
    target = page * k.batch + position.to(tl.int64) * k.row + head * k.head
    scatter_tile(k_row, k.ptr + target, k.col, row, row == 0, qk_columns)
    target = page * v.batch + position.to(tl.int64) * v.row + head * v.head
    scatter_tile(v_row, v.ptr + target, v.col, row, row == 0, v_columns)


@triton.jit
def _share(split, splits, split_keys, tokens, sizes, spec: tl.constexpr):
    """Keys [begin, end) of one share of a tile with query tokens [first, last); begin is a multiple of tile_n, and may
    come before the first key that a window shows."""
    first_token, last_token = tokens
    first = 0
    last = sizes.seqlen_k
    if spec.causal or spec.right:
        last = tl.maximum(tl.minimum(last, last_token + furthest(sizes, spec)), 0)
    if spec.left:
        first = tl.maximum(first_token + nearest(sizes, spec), 0) // spec.tile_n * spec.tile_n
    run = split_keys
    start = split * run
    if split_keys == 0:
        run = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), spec.tile_n), splits) * spec.tile_n
        start = first + split * run
    return tl.maximum(start, first), tl.minimum(start + run, last)


@triton.jit
def _offsets(x, start, keys, inside, pages, cache_rows, columns: tl.constexpr, spec: tl.constexpr):
    """Where the rows of keys lie, from the start of their head: of the cache row, or through its page table."""
    row_stride = aligned(x.row, columns)
    if spec.page_size == 0:
        return keys.to(tl.int64) * row_stride
    else:
        if spec.page_size % spec.tile_n == 0:  # the whole tile lies in one page
            page = tl.load(pages + start // spec.page_size)
        else:
            page = tl.load(pages + keys // spec.page_size, mask=inside, other=0)
        page = tl.minimum(tl.maximum(page, 0), cache_rows - 1)
        return page.to(tl.int64) * aligned(x.batch, columns) + (keys % spec.page_size).to(tl.int64) * row_stride


@triton.jit
def _walk_keys(state, q_tile, kv, pages, tokens, share, sizes, factors, spec: tl.constexpr):
    """Take the keys of a share into the running softmax."""
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    acc, row_sum, row_max = state
    k_base, k, v_base, v, cache_rows = kv
    cap_factor, scale_log2 = factors
    begin, end = share
    for start in tl.range(begin, end, spec.tile_n):
        keys = start + tl.arange(0, spec.tile_n)
        inside = keys < end
        k_offsets = _offsets(k, start, keys, inside, pages, cache_rows, qk_columns, spec)
        k_tile = gather_tile(k_base, k, k_offsets, inside, qk_columns)
        s = dot_transposed(q_tile, k_tile, spec)
        if spec.softcap:
            s = capped(s, cap_factor)
        visible = inside[None, :]
        if spec.causal or spec.right or spec.left:
            visible = visible & in_window(tokens[:, None], keys[None, :], sizes, spec)
        s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet keeps -inf
        p = tl.exp2(s * scale_log2 - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        v_offsets = _offsets(v, start, keys, inside, pages, cache_rows, v_columns, spec)
        v_tile = gather_tile(v_base, v, v_offsets, inside, v_columns)
        acc = add_dot(scaled(acc, correction[:, None]), p.to(v.ptr.dtype.element_ty), v_tile, spec)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_cache(
    qkv, out, lse, partial, tables, table_stride, cache_rows, capacity, appended,
    seqlen_q, heads, group, splits, split_keys, scale_log2, left, right, softcap, spec: tl.constexpr,
):  # fmt: skip
    """appended: keys that stand behind seqlens already.

    partial: None, or (O (splits, rows, width of v) float32, LSE in base 2 (splits, rows)), rows as LSE has them.
    """
    qk_columns: tl.constexpr = spec.qk
    v_columns: tl.constexpr = spec.v
    tile_m: tl.constexpr = spec.tile_m
    q, k, v = qkv
    seqlens, page_table, batch_idx = tables
    tiles = tl.cdiv(seqlen_q * group, tile_m)
    place = tl.program_id(0)
    split = place % splits
    tile = place // splits % tiles
    kv_head = place // splits // tiles % (heads // group)
    batch = place // splits // tiles // (heads // group)
    batch_64 = batch.to(tl.int64)

    row = tile * tile_m + tl.arange(0, tile_m)
    tokens = row // group
    head = kv_head * group + row % group
    exists = row < seqlen_q * group
    seqlen_k = tl.minimum(_length(seqlens, batch, capacity) + appended, capacity)
    sizes = Sizes(seqlen_q, seqlen_k, heads, group, left, right, seqlen_q)
    last_token = tl.minimum((tile * tile_m + tile_m - 1) // group + 1, seqlen_q)
    begin, end = _share(split, splits, split_keys, (tile * tile_m // group, last_token), sizes, spec)

    lse_rows = (batch_64 * heads + head) * seqlen_q + tokens
    if spec.split:
        o_partial, lse_partial = partial
        rows = tl.num_programs(0).to(tl.int64) // splits // tiles * group * seqlen_q
        lse_rows += split * rows
        if begin >= end:
            tl.store(lse_partial + lse_rows, tl.full((tile_m,), float("-inf"), tl.float32), mask=exists)
            return

    q_offsets = tokens.to(tl.int64) * aligned(q.row, qk_columns) + head.to(tl.int64) * aligned(q.head, qk_columns)
    q_base = q.ptr + batch_64 * aligned(q.batch, qk_columns)
    q_tile = gather_tile(q_base, q, q_offsets, exists, qk_columns)
    k_base = k.ptr + kv_head.to(tl.int64) * aligned(k.head, qk_columns)
    v_base = v.ptr + kv_head.to(tl.int64) * aligned(v.head, v_columns)
    pages = page_table
    if spec.page_size == 0:
        cache_row = batch
        if batch_idx is not None:
            cache_row = tl.minimum(tl.maximum(tl.load(batch_idx + batch), 0), cache_rows - 1)
        k_base += cache_row.to(tl.int64) * aligned(k.batch, qk_columns)
        v_base += cache_row.to(tl.int64) * aligned(v.batch, v_columns)
    else:
        pages = page_table + batch_64 * table_stride

    row_max = tl.full((tile_m,), float("-inf"), tl.float32)
    state = (zeros(tile_m, v_columns), tl.zeros((tile_m,), tl.float32), row_max)
    factors = cap_factors(scale_log2, softcap, spec)
    kv = (k_base, k, v_base, v, cache_rows)
    acc, row_sum, row_max = _walk_keys(state, q_tile, kv, pages, tokens, (begin, end), sizes, factors, spec)

    acc = scaled(acc, tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None])  # a row that saw no key: 0
    lse_log2 = row_max + tl.log2(row_sum)
    if spec.split:
        tl.store(lse_partial + lse_rows, lse_log2, mask=exists)
        scatter_tile(acc, o_partial, 1, lse_rows * v_columns.tile, exists, v_columns)
    else:
        offsets = tokens.to(tl.int64) * aligned(out.row, v_columns) + head.to(tl.int64) * aligned(out.head, v_columns)
        out_base = out.ptr + batch_64 * aligned(out.batch, v_columns)
        scatter_tile(acc, out_base, out.col, offsets, exists, v_columns)
        if spec.lse:
            tl.store(lse + lse_rows, lse_log2 * LN_2, mask=exists)


@triton.jit
def _weighted_rows(parts, weights):
    """(1, width) parts: sums over rows, weighed; a row of weight 0 may hold anything."""
    alive = weights[:, None] > 0.0
    first = tl.sum(tl.where(alive, parts[0] * weights[:, None], 0.0), 0)[None, :]
    if len(parts) == 1:
        return (first,)
    else:
        return (first, tl.sum(tl.where(alive, parts[1] * weights[:, None], 0.0), 0)[None, :])


@triton.jit
def _sum(a, b):
    if len(a) == 1:
        return (a[0] + b[0],)
    else:
        return (a[0] + b[0], a[1] + b[1])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_shares(o_partial, lse_partial, out, lse, seqlen_q, heads, rows, splits, spec: tl.constexpr):
    """One query row of one head a program."""
    v_columns: tl.constexpr = spec.v
    row = tl.program_id(0)
    token = row % seqlen_q
    head = row // seqlen_q % heads
    batch = row // seqlen_q // heads
    shares = tl.arange(0, CHUNK)
    lse_base = lse_partial + row
    top = float("-inf")
    for start in tl.range(0, splits, CHUNK):
        share = start + shares
        values = tl.load(lse_base + share.to(tl.int64) * rows, mask=share < splits, other=float("-inf"))
        top = tl.maximum(top, tl.max(values, 0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = zeros(1, v_columns)
    shared = Operand(o_partial, 0, rows * v_columns.tile, 0, 1)
    base = o_partial + row.to(tl.int64) * v_columns.tile
    for start in tl.range(0, splits, CHUNK):
        share = start + shares
        values = tl.load(lse_base + share.to(tl.int64) * rows, mask=share < splits, other=float("-inf"))
        weights = tl.exp2(values - shift)
        total += tl.sum(weights, 0)
        acc = _sum(acc, _weighted_rows(load_tile(base, shared, start, splits, CHUNK, v_columns), weights))
    acc = scaled(acc, tl.where(total == 0.0, 0.0, 1.0 / total))
    one = tl.zeros((1,), tl.int64)
    out_base = out.ptr + batch.to(tl.int64) * out.batch + head.to(tl.int64) * out.head + token.to(tl.int64) * out.row
    scatter_tile(acc, out_base, out.col, one, one == 0, v_columns)
    if spec.lse:
        tl.store(lse + row, (top + tl.log2(total)) * LN_2)


def _specs(plan: Plan) -> Callable[..., Spec]:
    return spec_maker(plan, plan.tile.tile_m, plan.tile.tile_n)


def compile_ahead(plan: Plan) -> tuple[Any, ...]:
    """The kernel that walks alone, the one that shares, the merge, and the append."""
    x, i32 = operand_types(plan.dtype), "i32"
    lse = "*fp32" if plan.lse else None
    spec = _specs(plan)(plan.head_dim, plan.head_dim_v, 1, 1)
    tables = ("*i32", "*i32" if plan.page_size else None, None)
    numbers = (i32, i32, i32, i32, i32, i32, i32, i32, i32, "fp32", *bound_types(plan))
    sharing = replace(spec, split=True)
    return (
        compile_kernel(attention_cache, ((x, x, x), x, lse, None, tables, *numbers, spec), plan.arch, plan.tile),
        compile_kernel(
            attention_cache, ((x, x, x), x, lse, ("*fp32", "*fp32"), tables, *numbers, sharing), plan.arch, plan.tile
        ),
        compile_kernel(merge_shares, ("*fp32", "*fp32", x, lse, i32, i32, i32, i32, spec), plan.arch, plan.tile),
        compile_kernel(append_keys, ((x, x), (x, x), tables, i32, i32, i32, i32, i32, spec), plan.arch, plan.tile),
    )


def build(plan: Plan) -> Callable[..., None]:
    """Compiles for the usual launch (see ahead.py); unusual strides and padded head dims compile at their first."""
    if PADDED not in plan.variant and not triton.knobs.runtime.interpret:
        compile_ahead(plan)
    specs, options = _specs(plan), launch_options(plan.tile)
    bound_values = bound_picker(plan)

    def forward(
        q, k, v, out, lse, cache_seqlens, page_table, cache_batch_idx, k_new, v_new, splits: int, split_keys: int,
        *numbers: float,
    ) -> None:  # fmt: skip
        batch, seqlen_q, heads, head_dim = q.shape
        cache_rows, length, heads_kv, head_dim_v = v.shape
        spec = specs(head_dim, head_dim_v, alignment(head_dim, q, k), alignment(head_dim_v, v, out))
        group = heads // heads_kv
        table_stride, capacity = 0, length
        if page_table is not None:
            table_stride, capacity = page_table.stride(0), length * page_table.shape[1]
        tables, appended = (cache_seqlens, page_table, cache_batch_idx), 0 if k_new is None else k_new.shape[1]
        if appended:
            append_keys[(batch * appended * heads_kv,)](
                (operand(k_new), operand(v_new)), (operand(k), operand(v)), tables, table_stride, cache_rows, capacity,
                appended, heads_kv, spec, **options,
            )  # fmt: skip
        scale, *bounds = numbers
        rows, partial = batch * heads * seqlen_q, None
        if splits > 1:
            spec = replace(spec, split=True)
            o_partial = torch.empty((splits, rows, plan.head_dim_v), dtype=torch.float32, device=q.device)
            partial = (o_partial, torch.empty((splits, rows), dtype=torch.float32, device=q.device))
        tiles = triton.cdiv(seqlen_q * group, plan.tile.tile_m)
        attention_cache[(splits * tiles * heads_kv * batch,)](
            (operand(q), operand(k), operand(v)), operand(out), lse, partial,
            tables, table_stride, cache_rows, capacity, appended,
            seqlen_q, heads, group, splits, split_keys, scale * LOG2_E.value, *bound_values(*bounds), spec, **options,
        )  # fmt: skip
        if partial is not None:
            spec = replace(spec, split=False)
            merge_shares[(rows,)](*partial, operand(out), lse, seqlen_q, heads, rows, splits, spec, **options)

    return forward
