"""From a Plan to a compiled function: fake tensors with dynamic shapes, so that one compile serves every size."""

import warnings

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_flash.spec.plan import Plan

from .forward import BoundedForwardSm90, ForwardSm90, SplitForwardSm90
from .tiles import SPLIT

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def _rows(dtype: type, sizes: tuple) -> cute.Tensor:
    """(batch, seqlen, heads, width): width contiguous, other strides 64-bit and 16-byte multiples (TMA's rule)."""
    step = 128 // dtype.width
    strides = (*(cute.sym_int64(divisibility=step) for _ in range(3)), 1)
    return make_fake_tensor(dtype, sizes, strides, assumed_align=16)


def compile_forward(plan: Plan, options: str = ""):
    dtype = DTYPES[plan.dtype]
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    head_dim, head_dim_v = cute.sym_int(), cute.sym_int()
    lse = None
    if plan.lse:
        lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
        lse = make_fake_tensor(cutlass.Float32, (batch, heads_q, seqlen_q), lse_strides, assumed_align=4)
    kernel, numbers, partials = ForwardSm90(plan, dtype), (cutlass.Float32(1.0),), ()
    if not plan.plain:
        kernel = BoundedForwardSm90(plan, dtype)
        numbers = (*numbers, cutlass.Int32(0), cutlass.Int32(0), cutlass.Float32(1.0))
    if plan.variant == SPLIT:
        kernel, splits = SplitForwardSm90(plan, dtype), cute.sym_int()
        contiguous = tuple(cute.sym_int64(divisibility=4) for _ in range(4))
        o_shape = (splits, batch, heads_q, seqlen_q, plan.head_dim_v)
        state_strides = (*(cute.sym_int64() for _ in range(3)), 2, 1)
        partials = (
            make_fake_tensor(cutlass.Float32, o_shape, (*contiguous, 1), assumed_align=16),
            make_fake_tensor(cutlass.Float32, (*o_shape[:4], 2), state_strides, assumed_align=4),
        )
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
            *numbers,
            *partials,
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {plan.arch} {options}",
        )
