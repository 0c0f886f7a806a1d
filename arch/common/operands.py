"""From a kernel to a compiled function: fake tensors with dynamic shapes, so that one compile serves every size."""

import warnings
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def _rows(dtype: type, sizes: tuple) -> cute.Tensor:
    """(batch, seqlen, heads, width): width contiguous, other strides 64-bit and 16-byte multiples (TMA's rule)."""
    step = 128 // dtype.width
    strides = (*(cute.sym_int64(divisibility=step) for _ in range(3)), 1)
    return make_fake_tensor(dtype, sizes, strides, assumed_align=16)


def _words(count, align: int) -> cute.Tensor:
    return make_fake_tensor(cutlass.Int32, (count,), (1,), assumed_align=align)


def _partials(plan: Plan, rows: tuple) -> tuple[cute.Tensor, cute.Tensor]:
    """O (splits, batch, heads_q, seqlen_q, width_v) and (maximum, total) (splits, batch, heads_q, seqlen_q, 2) of a
    split plan."""
    sizes = (cute.sym_int(), *rows)
    o_strides = (*(cute.sym_int64(divisibility=4) for _ in range(4)), 1)
    state_strides = (*(cute.sym_int64() for _ in range(3)), 2, 1)
    return (
        make_fake_tensor(cutlass.Float32, (*sizes, plan.head_dim_v), o_strides, assumed_align=16),
        make_fake_tensor(cutlass.Float32, (*sizes, 2), state_strides, assumed_align=4),
    )


def compile_forward(kernel: Callable[..., Any], plan: Plan, split: bool, options: str = ""):
    """kernel(q, k, v, out, lse[, cu_seqlens_q, cu_seqlens_k], scale[, left, right, softcap][, o_partial, state_partial]
    [, table][, counter], stream), compiled to a TVM-FFI function."""
    dtype = DTYPES[plan.dtype]
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    head_dim, head_dim_v = cute.sym_int(), cute.sym_int()
    rows = (batch, heads_q, seqlen_q)
    lse = None
    if plan.lse:
        lse = make_fake_tensor(cutlass.Float32, rows, (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    starts = cute.sym_int()
    packed = plan.form == PACKED
    with warnings.catch_warnings():
        # the DSL advises against unrolled loops of 64 and more; loops over registers cannot be others
        warnings.filterwarnings("ignore", message="This static loop has")
        return cute.compile(
            kernel,
            _rows(dtype, (batch, seqlen_q, heads_q, head_dim)),
            _rows(dtype, (batch, seqlen_k, heads_kv, head_dim)),
            _rows(dtype, (batch, seqlen_k, heads_kv, head_dim_v)),
            _rows(dtype, (batch, seqlen_q, heads_q, head_dim_v)),
            lse,
            *((_words(starts, 4), _words(starts, 4)) if packed else ()),
            cutlass.Float32(1.0),
            *(() if plan.plain else (cutlass.Int32(0), cutlass.Int32(0), cutlass.Float32(0.0))),
            *(_partials(plan, rows) if split else ()),
            *((_words(cute.sym_int(), 16),) if packed else ()),
            *((_words(1, 4),) if plan.draws else ()),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {plan.arch} {options}",
        )


def compile_backward(kernel: Callable[..., Any], plan: Plan, options: str = ""):
    """kernel(dout, q, k, v, out, lse, dlse, dq, dk, dv[, cu_seqlens_q, cu_seqlens_k], scale[, left, right, softcap],
    scratch, stream), compiled to a TVM-FFI function."""
    dtype = DTYPES[plan.dtype]
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    head_dim, head_dim_v = cute.sym_int(), cute.sym_int()

    def of(seqlen, heads, width):
        return _rows(dtype, (batch, seqlen, heads, width))

    def per_row():
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(cutlass.Float32, (batch, heads_q, seqlen_q), strides, assumed_align=4)

    q, k, v = (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v)
    out, starts = (seqlen_q, heads_q, head_dim_v), cute.sym_int()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")  # see compile_forward
        return cute.compile(
            kernel,
            *(of(*sizes) for sizes in (out, q, k, v, out)),
            per_row(),
            per_row() if plan.lse_grad else None,
            *(of(*sizes) for sizes in (q, k, v)),
            *((_words(starts, 4), _words(starts, 4)) if plan.form == PACKED else ()),
            cutlass.Float32(1.0),
            *(() if plan.plain else (cutlass.Int32(0), cutlass.Int32(0), cutlass.Float32(0.0))),
            make_fake_tensor(cutlass.Float32, (cute.sym_int64(),), (1,), assumed_align=16),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {plan.arch} {options}",
        )
