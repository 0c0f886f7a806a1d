"""Forward on the GPU: every backend against float64, no further off than 1.05x of PyTorch's flash kernel."""

import math

import pytest
import torch

import cute_flash
from cute_flash.arch.sm90 import tiles
from cute_flash.spec import settings
from tests import cases, oracle
from tests.device.gpu import BACKENDS, CAPABILITY, DEVICE, SPECIAL, judge_forward, runner
from tests.runner import ALLOWED_RATIO, HALF_ULP

OTHERS = tuple(name for name in BACKENDS if name not in SPECIAL)


def pairs(some, backends):
    """(case, backend) with a case's backends side by side, so that its float64 answer is computed once."""
    return [pytest.param(case, backend, id=f"{backend}-{case}") for case in some for backend in backends]


def main_grid():
    """This GPU's own kernels see every group at every length; the others a rotation of the groups."""
    thin = set(cases.thin_cases())
    grid = [(case, SPECIAL + OTHERS if case in thin else SPECIAL) for case in cases.forward_cases()]
    return [param for case, backends in grid for param in pairs([case], backends)]


# PyTorch's flash kernel splits the keys of few query rows, and in each part the largest probability is exactly 1: what
# matters most carries no rounding error. A kernel that does not split is up to 9% further off there, by that alone.
UNSPLIT_RATIO = 1.10
SPLITS = ("sm90",)


def allowed_ratio(case, backend) -> float:
    heads = case.heads_kv if case.seqlen_q == 1 else case.heads_q  # of one row flash makes its group's a tile
    flash_splits = case.seqlen_k > 256 and case.batch * heads * math.ceil(case.seqlen_q / 64) < 256
    return UNSPLIT_RATIO if flash_splits and not (backend in SPLITS and splits(case, backend)) else ALLOWED_RATIO


def splits(case, backend) -> bool:
    shapes = (
        (case.batch, case.seqlen_q, case.heads_q, case.head_dim),
        *((case.batch, case.seqlen_k, case.heads_kv, dim) for dim in (case.head_dim, case.head_dim_v)),
    )
    q, k, v = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in shapes)
    sentences = cute_flash.explain(q, k, v, causal=case.causal, backend=backend).sharing
    return any("CTAs" in sentence for sentence in sentences)  # heads of a group in one tile split nothing


def check(case, backend, ratios, floor: float = 0.0) -> None:
    judged = judge_forward(case)
    out, lse = runner(backend)(*judged.inputs.qkv, causal=case.causal, scale=case.scale, return_lse=True)
    assert out.dtype == judged.inputs.q.dtype
    assert out.is_contiguous()
    error, yardstick = oracle.relative_error(out, judged.exact[0]), judged.errors[0]
    if yardstick > 0 and not floor:
        ratios("forward", backend, case, judged.yardstick, error / yardstick)
    assert error <= max(allowed_ratio(case, backend) * yardstick, floor), f"{judged.yardstick} has {yardstick:.3e}"
    assert oracle.lse_excess(lse, judged.exact[1]) <= 1


@pytest.mark.parametrize(("case", "backend"), main_grid())
def test_main_grid(case, backend, ratios):
    check(case, backend, ratios)


@pytest.mark.skipif("sm90" not in SPECIAL, reason="plans of few query rows are Hopper's")
@pytest.mark.parametrize("case", cases.thin_cases(), ids=str)
def test_plans_of_many_query_rows(case, ratios, monkeypatch):
    """These cases have few, and so tiles of 64 rows above."""
    monkeypatch.setattr(tiles, "small", lambda problem: False)
    with settings.override():  # calls that are remembered had another plan
        check(case, "sm90", ratios)


@pytest.mark.parametrize(("case", "backend"), pairs(cases.odd_dim_cases(), BACKENDS))
def test_odd_head_dims(case, backend, ratios):
    check(case, backend, ratios)


@pytest.mark.parametrize(("case", "backend"), pairs(cases.float16_cases(), BACKENDS))
def test_float16(case, backend, ratios):
    check(case, backend, ratios)


@pytest.mark.parametrize(("case", "backend"), pairs(cases.adversarial_cases(), BACKENDS))
def test_adversarial_values(case, backend, ratios):
    # Few distinct values make rounding errors alike, so ratios are luck: half an ulp, one rounding, always passes.
    check(case, backend, ratios, floor=HALF_ULP[case.torch_dtype])


@pytest.mark.parametrize(("case", "backend"), pairs(cases.window_cases() + cases.softcap_cases(), BACKENDS))
def test_windows_and_softcaps(case, backend):
    runner(backend).check(*cases.make_inputs(case, DEVICE).qkv, **case.options)


@pytest.mark.parametrize(("case", "backend"), pairs(cases.layout_cases(), BACKENDS))
def test_layouts(case, backend):
    """Strides change no bit of the result."""
    inputs = cases.make_inputs(case, DEVICE)
    run = runner(backend)
    strided = run(*inputs.qkv, causal=case.causal, return_lse=True)
    packed = run(*(x.contiguous() for x in inputs.qkv), causal=case.causal, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(strided, packed, strict=True))
    run.check(*inputs.qkv, result=strided, causal=case.causal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.3, 1.0, -0.2, 0.0, 1e-20])
def test_scales(backend, scale):
    q, k, v = cases.make_inputs(cases.Case(2, 130, 190, 4, 2, 64, 64), DEVICE).qkv
    for causal in (False, True):
        runner(backend).check(q, k, v, causal=causal, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_without_lse(backend, causal):
    """LSE off is another kernel: its output is the same to the bit."""
    q, k, v = cases.make_inputs(cases.Case(2, 200, 333, 8, 2, 128, 128), DEVICE).qkv
    run = runner(backend)
    assert torch.equal(run(q, k, v, causal=causal), run(q, k, v, causal=causal, return_lse=True)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bitwise_repeatable(backend, causal):
    q, k, v = cases.make_inputs(cases.Case(4, 1000, 1000, 16, 4, 128, 128), DEVICE).qkv
    run = runner(backend)
    first = run(q, k, v, causal=causal, return_lse=True)
    for _ in range(5):
        again = run(q, k, v, causal=causal, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in SPECIAL])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (72, 72)], ids=str)
def test_float32_is_ieee(backend, dims):
    """TF32 would be off by 1e-3 here; float32 sums of some hundred products by 1e-6."""
    for causal in (False, True):
        q, k, v = cases.make_inputs(cases.Case(2, 200, 333, 4, 2, *dims, causal, dtype="float32"), DEVICE).qkv
        runner(backend, torch.float32).check(q, k, v, causal=causal)


def test_float32_may_use_tf32_where_torch_allows_it(monkeypatch):
    q, k, v = cases.make_inputs(cases.Case(2, 200, 333, 4, 2, 64, 64, dtype="float32"), DEVICE).qkv
    exact = oracle.forward(q, k, v).out
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        out = runner(None, torch.float32)(q, k, v)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert oracle.relative_error(out, exact) < 2e-3  # TF32 rounds operands to 2^-11 = 5e-4, in both matmuls
    assert oracle.relative_error(runner(None, torch.float32)(q, k, v), exact) < 1e-5  # and not a call longer


def test_float64_goes_to_the_reference():
    q, k, v = cases.make_inputs(cases.Case(2, 100, 133, 4, 2, 64, 48, dtype="float64"), DEVICE).qkv
    run = runner(None, torch.float64)
    out, lse = run(q, k, v, causal=True, return_lse=True)
    assert lse.dtype == torch.float64
    run.check(q, k, v, result=(out, lse), causal=True)


def test_a_gpu_with_kernels_of_its_own_uses_them():
    q = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    expected = cases.OWN_KERNELS.get(CAPABILITY, "triton")
    assert cute_flash.explain(q, q, q).backend.name == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row(backend):
    q, k, v = cases.make_inputs(cases.Case(1, 300, 300, 2, 1, 64, 64), DEVICE).qkv
    q[0, 130, 1] = math.nan
    out = runner(backend)(q, k, v, causal=True)
    bad = out.isnan().any(-1)
    assert bad[0, 130, 1]
    assert bad.sum() == 1
