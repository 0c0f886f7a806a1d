"""From a cache's kernel to a compiled function: its operands as the contract has them (cute_flash/spec/backend.py)."""

import warnings
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_flash.spec.plan import Plan

from ...common.operands import DTYPES


def compile_cache(kernel: Callable[..., Any], plan: Plan, options: str = ""):
    """kernel(q, k, v, out, lse, cache_seqlens, page_table, cache_batch_idx, k_new, v_new, splits, split_keys, scale
    [, left, right, softcap], scratch, stream), compiled to a TVM-FFI function."""
    dtype = DTYPES[plan.dtype]
    batch, seqlen_q, heads_q, heads_kv, head_dim, head_dim_v = (cute.sym_int() for _ in range(6))
    cache_rows, length, pages, new_keys = (cute.sym_int() for _ in range(4))
    step = 128 // dtype.width

    def rows(*sizes):
        strides = (*(cute.sym_int64(divisibility=step) for _ in range(3)), 1)
        return make_fake_tensor(dtype, sizes, strides, assumed_align=16)

    def per_row():
        return make_fake_tensor(cutlass.Int32, (batch,), (1,), assumed_align=4)

    lse = None
    if plan.lse:
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        lse = make_fake_tensor(cutlass.Float32, (batch, heads_q, seqlen_q), strides, assumed_align=4)
    page_table = None
    if plan.page_size:
        page_table = make_fake_tensor(cutlass.Int32, (batch, pages), (cute.sym_int64(), 1), assumed_align=4)
        length = plan.page_size
    new = (None, None)
    if plan.appends:
        new = rows(batch, new_keys, heads_kv, head_dim), rows(batch, new_keys, heads_kv, head_dim_v)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")  # see common/operands.py
        return cute.compile(
            kernel,
            rows(batch, seqlen_q, heads_q, head_dim),
            rows(cache_rows, length, heads_kv, head_dim),
            rows(cache_rows, length, heads_kv, head_dim_v),
            rows(batch, seqlen_q, heads_q, head_dim_v),
            lse,
            per_row(),
            page_table,
            per_row() if plan.chosen else None,
            *new,
            cutlass.Int32(1),
            cutlass.Int32(0),
            cutlass.Float32(1.0),
            *(() if plan.plain else (cutlass.Int32(0), cutlass.Int32(0), cutlass.Float32(0.0))),
            make_fake_tensor(cutlass.Float32, (cute.sym_int64(),), (1,), assumed_align=16),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {plan.arch} {options}",
        )
