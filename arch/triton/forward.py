"""Forward attention: one program walks all keys of one tile of query rows with a running softmax."""

import functools
from collections.abc import Callable

import triton
import triton.language as tl

from cute_flash.spec.plan import Plan

from .operands import (
    LN_2,
    LOG2_E,
    Sizes,
    add_dot,
    dot_transposed,
    head_start,
    key_bounds,
    load_tile,
    operand,
    rows_of,
    scaled,
    sees,
    spec_of,
    store_rows,
    store_tile,
    zeros,
)


@triton.jit
def _sweep(state, q_tile, kv, rows, bounds, sizes, scale_log2, spec: tl.constexpr, masked: tl.constexpr):
    """Take keys [bounds) into the running softmax. `masked` = some (row, key) pairs of these tiles are hidden."""
    acc, row_sum, row_max = state
    k_base, k, v_base, v = kv
    end = None
    if masked:
        end = sizes.seqlen_k
    for start in tl.range(bounds[0], bounds[1], spec.tile_n):
        k_tile = load_tile(k_base, k, start, end, spec.tile_n, spec.head_dim, spec.tile_d)
        s = dot_transposed(q_tile, k_tile, spec)
        if masked:
            keys = start + tl.arange(0, spec.tile_n)
            s = tl.where(sees(rows[:, None], keys[None, :], sizes, spec), s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        shift = new_max
        if masked:  # a row that has seen no key yet keeps -inf as its maximum: only the exponent gets a finite stand-in
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s * scale_log2 - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        v_tile = load_tile(v_base, v, start, end, spec.tile_n, spec.head_dim_v, spec.tile_dv)
        acc = add_dot(scaled(acc, correction[:, None]), p.to(v.ptr.dtype.element_ty), v_tile, spec)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["sizes"])
def attention_forward(q, k, v, out, lse, sizes, scale_log2, spec: tl.constexpr):
    tile_m: tl.constexpr = spec.tile_m
    tiles = tl.cdiv(sizes.seqlen_q, tile_m)
    tile = tl.program_id(0) % tiles
    if spec.causal:  # longest rows first
        tile = tiles - 1 - tile
    batch = tl.program_id(0) // tiles // sizes.heads
    head = tl.program_id(0) // tiles % sizes.heads
    start = tile * tile_m
    rows = start + tl.arange(0, tile_m)

    q_tile = load_tile(head_start(q, batch, head), q, start, sizes.seqlen_q, tile_m, spec.head_dim, spec.tile_d)
    kv_head = head // sizes.group
    kv = (head_start(k, batch, kv_head), k, head_start(v, batch, kv_head), v)
    row_max = tl.full((tile_m,), float("-inf"), tl.float32)
    state = (zeros(tile_m, spec.tile_dv), tl.zeros((tile_m,), tl.float32), row_max)
    full, last = key_bounds(start, sizes, spec)
    state = _sweep(state, q_tile, kv, rows, (0, full), sizes, scale_log2, spec, False)
    state = _sweep(state, q_tile, kv, rows, (full, last), sizes, scale_log2, spec, True)

    acc, row_sum, row_max = state
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)  # a row that saw no key: output 0
    store_tile(scaled(acc, inverse[:, None]), head_start(out, batch, head), out, start, sizes.seqlen_q, spec.head_dim_v)
    if spec.lse:
        store_rows((row_max + tl.log2(row_sum)) * LN_2, lse, batch, head, start, sizes.seqlen_q)


def build(plan: Plan) -> Callable[..., None]:
    specs = functools.lru_cache(maxsize=None)(functools.partial(spec_of, plan))
    options = {"num_warps": plan.tile.warps, "num_stages": plan.tile.stages}

    def forward(q, k, v, out, lse, scale: float) -> None:
        batch, seqlen_q, heads, head_dim = q.shape
        sizes = Sizes(seqlen_q, k.shape[1], heads, heads // k.shape[2])
        grid = (triton.cdiv(seqlen_q, plan.tile.tile_m) * heads * batch,)
        attention_forward[grid](
            operand(q), operand(k), operand(v), operand(out), rows_of(lse),
            sizes, scale * LOG2_E.value, specs(head_dim, v.shape[3]), **options,
        )  # fmt: skip

    return forward
