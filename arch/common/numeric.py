"""Constants and scalar maths of the softmax, in base 2: exp(x) = exp2(x * log2(e)), one MUFU.EX2 or a polynomial."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NEG_INF = -math.inf


def exp2(x: Float32) -> Float32:
    return cute.arch.exp2(x)


# degree -> coefficients from the constant up, minimax on [0, 1) in relative error: python -m scripts.minimax
EXP2_POLYNOMIALS = {
    2: (1.00172472, 0.657636285, 0.337189436),  # 1.72e-03
    3: (0.999925196, 0.695833564, 0.226067156, 0.0780245215),  # 7.48e-05
    4: (1.00000262, 0.693003833, 0.241442755, 0.0520114601, 0.0135341678),  # 2.67e-06
    5: (0.99999994, 0.693153083, 0.240153611, 0.0558263175, 0.00898933969, 0.00187757669),  # 1.48e-07
}
# P is rounded to 16 bits right after: by up to 2^-9 = 1.95e-3 in bfloat16, 2^-12 = 2.44e-4 in float16. Degree 2 would
# nearly double the error of bfloat16, degree 3 adds 1/26 of it; float16 takes degree 4, 1/91 (degree 3: 1/3).
EXP2_DEGREE = {"bfloat16": 3, "float16": 4}
ROUNDER = 1.5 * 2.0**23  # adding it to |x| < 2^22 leaves no bits below the integer; its own low nine bits are zero
EXP2_FLOOR = -126.0  # below, the exponent field would wrap: a polynomial may start a little under 1


def bits(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def from_bits(x: Int32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def exp2_polynomial(x: tuple[Float32, Float32], degree: int) -> tuple[Float32, Float32]:
    """Two exp2 on the FMA pipe, for x < 128; below -126 something tiny and not 0, so not for hidden keys. Blackwell.

    x = n + f, n = floor(x), 2^x = 2^n 2^f. Rounded down, x + ROUNDER holds n in its low bits; 2^f comes from a
    polynomial in [1, 2], and n is added to its exponent field.
    """
    low, high = (cute.arch.fmax(value, EXP2_FLOOR) for value in x)
    rounder, minus = (Float32(ROUNDER), Float32(ROUNDER)), (Float32(-ROUNDER), Float32(-ROUNDER))
    shifted = cute.arch.add_packed_f32x2((low, high), rounder, rnd="rm")
    floor = cute.arch.add_packed_f32x2(shifted, minus)
    f = cute.arch.add_packed_f32x2((low, high), (-floor[0], -floor[1]))
    coefficients = [(Float32(c), Float32(c)) for c in EXP2_POLYNOMIALS[degree]]
    power = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        power = cute.arch.fma_packed_f32x2(power, f, c)
    low, high = (from_bits(bits(p) + (bits(n) << 23)) for p, n in zip(power, shifted, strict=True))
    return low, high


def fresh(x: Int32) -> Int32:
    """x, but the compiler cannot know: what a loop computes from it is not moved out, to hold a register there."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


SIGNALING = 0x7FB12345  # a NaN that no arithmetic makes: its results are quiet


def is_result(x: Float32) -> Boolean:
    """True for whatever an addition or exp2 gives, infinities and NaN included; the compiler cannot know."""
    return bits(x) != SIGNALING


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


def finite_or_nan(x: Float32) -> Float32:
    """The subtrahend for a row maximum where all keys are visible: a row with an infinite score is NaN, as inf - inf
    is. Said to the whole row, because exp2_polynomial clamps NaN to something tiny."""
    text = "fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r0};"  # written as PTX: x * 0 + x is not to be simplified to x
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x])


def capped_weights(score: Float32, lse_log2: Float32, factors: tuple) -> tuple[Float32, Float32]:
    """(P, P * (1 - tanh^2)) of a raw score. factors: (softcap * log2(e), 2 * scale * log2(e) / softcap).

    With e = exp(2 x) and r = 1 / (1 + e), tanh(x) is 1 - 2 r, and 1 - tanh(x)^2 is 4 r (e r), which does not cancel
    where e is small or large.
    """
    scale_log2, cap_factor = factors
    e = exp2(cutlass.min(score * cap_factor, Float32(126.0)))
    inverse = cute.arch.rcp_approx(1.0 + e)
    p = exp2((1.0 - 2.0 * inverse) * scale_log2 - lse_log2)
    p = Float32(cutlass.select_(score == NEG_INF, Float32(0.0), p))  # hidden
    return p, p * (4.0 * inverse * (e * inverse))


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
