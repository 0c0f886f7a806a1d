"""A CuTe-DSL program that runs on the CPU: real compiling, exporting, loading and argument checks, with no GPU.

It signs the forward's calling convention with a kernel nobody would call attention: out = q, lse = scale.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

CPU = cutlass.AddressSpace.generic  # fake tensors are on a GPU unless told otherwise
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@cute.jit
def copy_rows(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse, scale: cutlass.Float32):
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            for h in range(q.shape[2]):
                for d in range(q.shape[3]):
                    out[b, s, h, d] = q[b, s, h, d]
                if cutlass.const_expr(lse is not None):
                    lse[b, h, s] = scale


def _rows(dtype, sizes):
    """The layout rule of the Hopper kernels: 16-byte rows, last dimension contiguous."""
    strides = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(3)), 1)
    return make_fake_tensor(dtype, sizes, strides, assumed_align=16, memspace=CPU)


def compile_copy(dtype_name: str, with_lse: bool):
    dtype = DTYPES[dtype_name]
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim, dim_v = (cute.sym_int() for _ in range(7))
    lse = None
    if with_lse:
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        lse = make_fake_tensor(cutlass.Float32, (batch, heads_q, seqlen_q), strides, assumed_align=4, memspace=CPU)
    return cute.compile(
        copy_rows,
        _rows(dtype, (batch, seqlen_q, heads_q, dim)),
        _rows(dtype, (batch, seqlen_k, heads_kv, dim)),
        _rows(dtype, (batch, seqlen_k, heads_kv, dim_v)),
        _rows(dtype, (batch, seqlen_q, heads_q, dim_v)),
        lse,
        cutlass.Float32(1.0),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
