"""Constants and scalar maths of the softmax, in base 2: exp(x) = exp2(x * log2(e)), one MUFU.EX2 each."""

import math

import cutlass.cute as cute
from cutlass import Float32

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
