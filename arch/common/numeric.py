"""Constants and scalar maths of the softmax, in base 2: exp(x) = exp2(x * log2(e)), one MUFU.EX2 each."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NEG_INF = -math.inf


def exp2(x: Float32) -> Float32:
    return cute.arch.exp2(x)


def mul_rn(a: Float32, b: Float32) -> Float32:
    """a * b rounded by itself: never contracted into a following add, so that the same product has the same bits
    wherever it is formed again."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def finite_or_zero(x: Float32) -> Float32:
    """The subtrahend for a row maximum: 0 where no key was visible yet, so that -inf - x stays -inf and not NaN.

    Only ever subtracted: it must not reach the running maximum, or a row of very negative scores would vanish.
    """
    return Float32(0.0) if x == NEG_INF else x


def pack_pair(low: Float32, high: Float32, dtype: type) -> Int32:
    """Two float32 as one register of 16-bit values, round to nearest even.

    Written as PTX on purpose: LLVM moves a plain conversion across the loop's back edge and then keeps the float32
    values alive instead, 64 registers where 32 do.
    """
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    text = f"cvt.rn.{name}.f32 {{$w0}}, {{$r0}}, {{$r1}};"  # the first source lands in the upper half
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[high, low])


@cute.jit
def pack_fragment(source: cute.Tensor, packed: cute.Tensor, dtype: cutlass.Constexpr):
    """source: float32 registers, read in order; packed: Int32 registers, half as many."""
    flat = cute.make_tensor(source.iterator, cute.make_layout(2 * cute.size(packed)))
    for i in cutlass.range_constexpr(cute.size(packed)):
        packed[i] = pack_pair(flat[2 * i], flat[2 * i + 1], dtype)
