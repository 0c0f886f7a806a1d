"""Single instructions against their meaning in plain Python and numpy."""

import numpy as np
import pytest
import torch

from .bare import per_lane

RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
OTHERS = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
FLOATS = RNG.standard_normal(32).astype(np.float32)
MORE = RNG.standard_normal(32).astype(np.float32)
SMALL = np.arange(32, dtype=np.uint32) * 3 % 37
LANE = np.arange(32)


def signed(x):
    return x.view(np.int32).astype(object)


def wrap(values):
    return np.array([int(v) & 0xFFFFFFFF for v in values], np.uint32)


INTEGER = {
    "add.s32 %r9, %r1, %r2;": lambda a, b: wrap(a.astype(object) + b),
    "sub.s32 %r9, %r1, %r2;": lambda a, b: wrap(a.astype(object) - b),
    "mul.lo.s32 %r9, %r1, %r2;": lambda a, b: wrap(a.astype(object) * b),
    "mul.hi.u32 %r9, %r1, %r2;": lambda a, b: wrap((a.astype(object) * b.astype(object)) // 2**32),
    "mul.hi.s32 %r9, %r1, %r2;": lambda a, b: wrap(
        [(int(x) * int(y)) >> 32 for x, y in zip(signed(a), signed(b), strict=True)]
    ),
    "mad.lo.s32 %r9, %r1, %r2, 7;": lambda a, b: wrap(a.astype(object) * b + 7),
    "div.s32 %r9, %r1, %r2;": lambda a, b: wrap(
        [int(x / y) if abs(x) < 2**52 else 0 for x, y in zip(signed(a), signed(b), strict=True)]
    ),
    "rem.u32 %r9, %r1, %r2;": lambda a, b: a % b,
    "min.s32 %r9, %r1, %r2;": lambda a, b: wrap(np.minimum(signed(a), signed(b))),
    "and.b32 %r9, %r1, %r2;": lambda a, b: a & b,
    "not.b32 %r9, %r1;": lambda a, b: ~a,
    "shl.b32 %r9, %r1, 5;": lambda a, b: a << np.uint32(5),
    "shr.s32 %r9, %r1, 40;": lambda a, b: wrap(signed(a) // 2**31 // 2),
    "shr.u32 %r9, %r1, 33;": lambda a, b: a * 0,
    "popc.b32 %r9, %r1;": lambda a, b: wrap(bin(x).count("1") for x in a),
    "clz.b32 %r9, %r1;": lambda a, b: wrap(32 - int(x).bit_length() for x in a),
    "brev.b32 %r9, %r1;": lambda a, b: wrap(int(f"{x:032b}"[::-1], 2) for x in a),
    "bfe.u32 %r9, %r1, 5, 9;": lambda a, b: a >> np.uint32(5) & np.uint32(511),
    "bfe.s32 %r9, %r1, 5, 9;": lambda a, b: wrap(((int(x) >> 5 & 511) ^ 256) - 256 for x in a),
    "bfi.b32 %r9, %r1, %r2, 4, 8;": lambda a, b: b & np.uint32(0xFFFFF00F) | (a & np.uint32(255)) << np.uint32(4),
    "prmt.b32 %r9, %r1, %r2, 0x5410;": lambda a, b: a & np.uint32(0xFFFF) | (b & np.uint32(0xFFFF)) << np.uint32(16),
    "lop3.b32 %r9, %r1, %r2, 255, 0xEA;": lambda a, b: a & b | np.uint32(255),
    "shf.l.wrap.b32 %r9, %r1, %r2, 8;": lambda a, b: b << np.uint32(8) | a >> np.uint32(24),
    "shf.r.clamp.b32 %r9, %r1, %r2, 32;": lambda a, b: b,
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;": lambda a, b: wrap(signed(a) < signed(b)),
    "setp.ge.u32 %p1|%p2, %r1, %r2; selp.b32 %r9, 1, 0, %p2;": lambda a, b: (a < b).astype(np.uint32),
    "cvt.s32.s8 %r9, %r1;": lambda a, b: wrap(a.astype(np.int8)),
    "cvt.u32.u16 %r9, %r1;": lambda a, b: a & np.uint32(0xFFFF),
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r9, {%h2, %h1};": lambda a, b: a << np.uint32(16) | a >> np.uint32(16),
    "mov.b64 %d20, {%r1, %r2}; mov.b64 {%r3, %r9}, %d20;": lambda a, b: b,
}


@pytest.mark.parametrize("body", INTEGER)
def test_integer(body):
    assert (per_lane(body, WORDS, OTHERS) == INTEGER[body](WORDS, OTHERS)).all()


def test_shift_by_a_register():
    assert (
        per_lane("shl.b32 %r9, %r1, %r2;", WORDS, SMALL) == wrap(WORDS.astype(object) << SMALL.astype(object))
    ).all()
    want = wrap(signed(WORDS) >> SMALL.astype(object))
    assert (per_lane("shr.s32 %r9, %r1, %r2;", WORDS, SMALL) == want).all()


def bf16(x):
    return (
        torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    )


def f16(x):
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def fp8(x, dtype):
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).view(torch.uint8).numpy().astype(np.uint32)


FLOATING = {
    "add.f32 %r9, %r1, %r2;": lambda a, b: (a + b).view(np.uint32),
    "fma.rn.f32 %r9, %r1, %r2, %r1;": lambda a, b: (a.astype(float) * b + a).astype(np.float32).view(np.uint32),
    "max.f32 %r9, %r1, %r2;": lambda a, b: np.maximum(a, b).view(np.uint32),
    "max.f32 %r9, %r1, %r2, 0f3F000000;": lambda a, b: np.maximum(np.maximum(a, b), np.float32(0.5)).view(np.uint32),
    "mul.f32 %r9, %r1, 0f40000000;": lambda a, b: (a * 2).view(np.uint32),
    "neg.f32 %r9, %r1;": lambda a, b: (-a).view(np.uint32),
    "cvt.rn.bf16x2.f32 %r9, %r1, %r2;": lambda a, b: bf16(a) << np.uint32(16) | bf16(b),
    "cvt.rn.f16x2.f32 %r9, %r1, %r2;": lambda a, b: f16(a) << np.uint32(16) | f16(b),
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2; cvt.u32.u16 %r9, %h1;": lambda a, b: (
        fp8(a, torch.float8_e4m3fn) << np.uint32(8) | fp8(b, torch.float8_e4m3fn)
    ),
    "cvt.rn.satfinite.e5m2x2.f32 %h1, %r1, %r2; cvt.u32.u16 %r9, %h1;": lambda a, b: (
        fp8(a, torch.float8_e5m2) << np.uint32(8) | fp8(b, torch.float8_e5m2)
    ),
    "cvt.rzi.s32.f32 %r9, %r1;": lambda a, b: wrap(np.trunc(a)),
    "cvt.rmi.f32.f32 %r9, %r1;": lambda a, b: np.floor(a).view(np.uint32),
    "setp.gt.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;": lambda a, b: (a > b).astype(np.uint32),
    "min.f32 %r3, %r1, %r2; sub.f32 %r9, %r3, %r1;": lambda a, b: (np.minimum(a, b) - a).view(np.uint32),
    "copysign.f32 %r9, %r1, %r2;": lambda a, b: np.copysign(b, a).view(np.uint32),
}


@pytest.mark.parametrize("body", FLOATING)
def test_floating(body):
    assert (per_lane(body, FLOATS, MORE) == FLOATING[body](FLOATS, MORE)).all()


def test_nan_rules():
    nan = np.full(32, np.nan, np.float32)
    assert (per_lane("max.f32 %r9, %r1, %r2;", nan, FLOATS).view(np.float32) == FLOATS).all()
    assert np.isnan(per_lane("max.NaN.f32 %r9, %r1, %r2;", nan, FLOATS).view(np.float32)).all()
    for op, want in (("eq", 0), ("ne", 0), ("lt", 0), ("neu", 1), ("ltu", 1), ("nan", 1), ("num", 0)):
        assert (per_lane(f"setp.{op}.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;", nan, FLOATS) == want).all()


def test_packed_f32x2():
    a, b = (np.stack([FLOATS, MORE], 1).copy(), np.stack([MORE, FLOATS], 1).copy())
    words = (a.view(np.uint64).ravel(), b.view(np.uint64).ravel())
    got = per_lane("fma.rn.f32x2 %d19, %d11, %d12, %d11;", *words, dtype=np.uint64).view(np.float32).reshape(32, 2)
    assert (got == (a.astype(float) * b + a).astype(np.float32)).all()
    down = per_lane("add.rm.f32x2 %d19, %d11, %d12;", *words, dtype=np.uint64).view(np.float32).reshape(32, 2)
    exact = a.astype(float) + b
    assert (down <= exact).all() and (np.nextafter(down, np.float32(np.inf)) > exact).all()


def test_ex2_and_friends():
    got = per_lane("ex2.approx.ftz.f32 %r9, %r1;", FLOATS).view(np.float32)
    assert np.allclose(got, 2.0 ** FLOATS.astype(float), rtol=1e-6)
    tiny = np.full(32, -140, np.float32)
    assert (per_lane("ex2.approx.ftz.f32 %r9, %r1;", tiny) == 0).all()
    infinite = np.full(32, -np.inf, np.float32)
    assert (per_lane("ex2.approx.ftz.f32 %r9, %r1;", infinite) == 0).all()
    positive = np.abs(FLOATS) + 1
    assert np.allclose(
        per_lane("lg2.approx.ftz.f32 %r9, %r1;", positive).view(np.float32), np.log2(positive), rtol=1e-6
    )


def test_shuffles():
    for body, source in (
        ("shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;", LANE ^ 5),
        ("shfl.sync.idx.b32 %r9, %r1, 3, 31, -1;", LANE * 0 + 3),
        ("shfl.sync.up.b32 %r9, %r1, 2, 0, -1;", np.where(LANE < 2, LANE, LANE - 2)),
        ("shfl.sync.down.b32 %r9, %r1, 4, 31, -1;", np.where(LANE + 4 > 31, LANE, LANE + 4)),
        ("shfl.sync.down.b32 %r9, %r1, 1, 0x1c1f, -1;", np.where(LANE % 4 == 3, LANE, LANE + 1)),
    ):
        assert (per_lane(body, WORDS) == WORDS[source]).all(), body


def test_votes_and_reductions():
    odd = "and.b32 %r3, %r0, 1; setp.eq.s32 %p1, %r3, 1;"
    assert (per_lane(odd + "vote.sync.ballot.b32 %r9, %p1, -1;", WORDS) == 0xAAAAAAAA).all()
    assert (per_lane(odd + "vote.sync.any.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", WORDS) == 1).all()
    assert (per_lane(odd + "vote.sync.all.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", WORDS) == 0).all()
    assert (per_lane("redux.sync.add.s32 %r9, %r1, -1;", WORDS) == wrap([WORDS.astype(object).sum()])).all()
    assert (per_lane("redux.sync.max.u32 %r9, %r1, -1;", WORDS) == WORDS.max()).all()
    got = per_lane("redux.sync.max.f32 %r9, %r1, -1;", FLOATS).view(np.float32)
    assert (got == FLOATS.max()).all()
    elected = per_lane("elect.sync %r3|%p1, -1; selp.b32 %r9, 1, 0, %p1;", WORDS)
    assert elected.sum() == 1
    alike = per_lane("match.any.sync.b32 %r9, %r1, -1;", (LANE % 2).astype(np.uint32))
    assert (alike == np.where(LANE % 2, 0xAAAAAAAA, 0x55555555)).all()


def test_divergent_loop_reconverges():
    """Each lane counts to its own index; then all vote together."""
    body = """
    mov.u32 %r9, 0;
LOOP:
    setp.ge.u32 %p1, %r9, %r0;
    @%p1 bra DONE;
    add.u32 %r9, %r9, 1;
    bra LOOP;
DONE:
    setp.eq.u32 %p2, %r9, %r0;
    vote.sync.all.pred %p3, %p2, -1;
    @!%p3 mov.u32 %r9, 999;
    """
    assert (per_lane(body, WORDS) == LANE).all()


def test_indirect_branch():
    body = """
    and.b32 %r3, %r0, 3;
TABLE:
    .branchtargets A, B, C, D;
    brx.idx %r3, TABLE;
A:  mov.u32 %r9, 10; bra END;
B:  mov.u32 %r9, 11; bra END;
C:  mov.u32 %r9, 12; bra END;
D:  mov.u32 %r9, 13;
END:
    """
    assert (per_lane(body, WORDS) == 10 + LANE % 4).all()


def test_predicates_keep_other_lanes():
    body = "setp.lt.u32 %p1, %r0, 16; mov.u32 %r9, %r1; @%p1 add.u32 %r9, %r9, 1; @!%p1 add.u32 %r9, %r9, 2;"
    assert (per_lane(body, WORDS) == WORDS + np.where(LANE < 16, 1, 2).astype(np.uint32)).all()
