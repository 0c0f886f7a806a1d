"""What is counted, against what the shape of the work says; and the bounds made from it."""

import pytest
import torch

from cute_flash.emulator import emulate
from perf.model import GPUS, by_role, estimate

from ..cases import Case, make_inputs
from . import bare
from .hopper import attend
from .test_faults import tile

ROLES = {"load": range(4), "mma": range(4, 12)}


def launch(arch: str, rows: tuple = (256, 384)):
    q, k = (torch.randn(n, 64).bfloat16() for n in rows)
    s = torch.empty(rows)
    kernel = tile(arch)
    with emulate(arch, seed=1) as emulation:
        kernel(q, k, s)
    return emulation


@pytest.mark.parametrize("arch, shape", [("sm_90a", "m64n128k16 bf16 SS"), ("sm_100a", "m128n128k16 bf16 SS")])
def test_mma_work_and_bytes(arch, shape):
    counters = launch(arch).counters
    assert counters.mma_flops == 2 * 256 * 384 * 64
    assert counters.mma_by_shape == {shape: counters.mma_flops // (2 * int(shape[1 : shape.index("n")]) * 128 * 16)}
    assert counters.l2_read == 2 * (128 + 384) * 64 * 2  # both CTAs read their Q tile and all of K
    assert counters.shared_written >= counters.l2_read
    assert counters.ctas == 2
    assert counters.tmem_read == (0 if arch == "sm_90a" else 256 * 384 * 4)


def test_instructions_by_role():
    counters = launch("sm_90a").counters
    table = counters.by_role(ROLES)
    assert table["load"]["async copy"] == 2 * (1 + 3) and table["mma"]["async copy"] == 0
    assert table["mma"]["mma"] == 2 * 8 * 3 * (1 + 4 + 1 + 1)  # CTAs, warps, tiles: fence, four mma, commit, wait
    assert table["mma"]["global"] == 2 * 8 * 3 * 64
    assert table["load"] + table["mma"] == counters.total()
    assert "async copy" in by_role(counters, ROLES)


def test_counts_do_not_depend_on_the_schedule():
    """Except for the waits, whose loops turn as often as they find nothing."""
    seen = []
    for seed in (1, 2):
        kernel = tile("sm_90a")
        with emulate("sm_90a", seed=seed) as emulation:
            kernel(torch.randn(256, 64).bfloat16(), torch.randn(384, 64).bfloat16(), torch.empty(256, 384))
        seen.append(emulation.counters.total())
    for name in ("mma", "global", "integer", "async copy", "shuffle"):
        assert seen[0][name] == seen[1][name] > 0


def test_forward_tile_bound_on_hopper():
    """128 x 128, d = 128: 2048 cycles of MMA, 1024 of ex2 and a little, 1792 of shared memory before Q, O, tickets."""
    inputs = make_inputs(Case(1, 256, 1024, 1, 1, 128, 128))
    (counters,) = attend(inputs, False, 1, seed=1).counters
    shape = next(iter(counters.mma_by_shape))
    n = int(shape[shape.index("n") + 1 : shape.index("k")])
    tiles = 2 * -(-1024 // n)
    bound = estimate(counters, GPUS["H200"], tiles)
    full = n / 128
    assert bound.cycles["MMA"] == pytest.approx(2048 * full)
    assert 1024 * full <= bound.cycles["ex2"] < 1024 * full * 1.05
    assert 1792 * full <= bound.cycles["shared memory"] < 1792 * full * 1.25
    assert bound.binding == "MMA" and bound.tflops == pytest.approx(989, rel=0.01)
    assert "bound by MMA" in str(bound)


def test_blackwell_has_twice_the_mma_rate():
    counters = launch("sm_100a").counters
    slow, fast = (estimate(counters, GPUS[name], 6).cycles["MMA"] for name in ("H200", "B200"))
    assert slow == 2 * fast == 512  # 2 x 128 x 128 x 64 FLOP a tile at 4096 a clock


def test_packed_arithmetic_has_the_names_of_machine_code():
    """FFMA2, FADD2, FMUL2: two float32 values a lane; a GPU without them issues each twice."""
    body = "mov.b64 %d1, 0; fma.rn.f32x2 %d2, %d1, %d1, %d1; add.rn.f32x2 %d3, %d2, %d1; mul.rn.f32x2 %d4, %d3, %d1;"
    counters = bare.run(body + "mov.b32 %r1, 0; fma.rn.f32 %r2, %r1, %r1, %r1; ex2.approx.f32 %r3, %r2;").counters
    total = counters.total()
    assert {name: total[name] for name in ("ffma2", "fadd/fmul2", "ffma", "ex2")} == {
        "ffma2": 1, "fadd/fmul2": 2, "ffma": 1, "ex2": 1,
    }  # fmt: skip
    hopper, blackwell = (estimate(counters, GPUS[name], 1).cycles for name in ("H200", "B200"))
    assert hopper["FP32"] == (2 * 3 + 1) * 32 / 128 and blackwell["FP32"] == (3 + 1) * 32 / 128
    assert hopper["issue"] - blackwell["issue"] == 3 / 4
