"""Gradients on the GPU against float64, no further off than 1.05x of PyTorch's flash kernel."""

import pytest
import torch

from tests import cases, oracle
from tests.cases import Case
from tests.device.gpu import DEVICE, GRADIENT_BACKENDS, judge_backward, runner
from tests.runner import ALLOWED_RATIO, HALF_ULP, ONE_KEY_ATOL

NAMES = ("dq", "dk", "dv")


def pairs(some):
    return [
        pytest.param(case, backend, id=f"{backend or 'auto'}-{case}") for case in some for backend in GRADIENT_BACKENDS
    ]


def check(case: Case, backend, ratios, floor: float = 0.0) -> None:
    judged = judge_backward(case)
    inputs = judged.inputs
    _, grads = runner(backend).gradients(*inputs.qkv, inputs.dout, causal=case.causal, scale=case.scale)
    errors = [oracle.relative_error(value, exact) for value, exact in zip(grads, judged.exact, strict=True)]
    compared = list(zip(NAMES, grads, errors, judged.errors, strict=True))
    if case.seqlen_k == 1:
        assert all(value.abs().max() <= ONE_KEY_ATOL for value in grads[:2])
        compared = compared[2:]
    if not floor:
        worst = max((error / yardstick for _, _, error, yardstick in compared if yardstick > 0), default=0.0)
        ratios("backward", backend, case, judged.yardstick, worst)
    for name, value, error, yardstick in compared:
        assert value.dtype == inputs.q.dtype
        limit = max(ALLOWED_RATIO * yardstick, floor)
        assert error <= limit, f"{name}: {error:.3e}, {judged.yardstick} has {yardstick:.3e}"


@pytest.mark.parametrize(("case", "backend"), pairs(cases.thin_cases()))
def test_main_grid(case, backend, ratios):
    check(case, backend, ratios)


@pytest.mark.parametrize(("case", "backend"), pairs(cases.odd_dim_cases()))
def test_odd_head_dims(case, backend, ratios):
    check(case, backend, ratios)


@pytest.mark.parametrize(("case", "backend"), pairs(cases.long_cases()))
def test_long(case, backend, ratios):
    check(case, backend, ratios)


@pytest.mark.parametrize(("case", "backend"), pairs(cases.float16_cases()))
def test_float16(case, backend, ratios):
    check(case, backend, ratios)


def peaked(case: Case) -> bool:
    """Scores spread widely. All equal, or one far above all, they leave dq = dk = 0: no relative error there."""
    return case.values in ("rising", "falling", "outliers", "large") and case.seqlen_k == 1000


@pytest.mark.parametrize(("case", "backend"), pairs(filter(peaked, cases.adversarial_cases())))
def test_adversarial_values(case, backend, ratios):
    # Few rows matter, so ratios are luck: a rounding each of P, dS and the result always passes.
    check(case, backend, ratios, floor=3 * HALF_ULP[case.torch_dtype])


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
@pytest.mark.parametrize("values", ["very_negative", "constant", "tiny", "huge_score"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_vanishing_gradients(backend, values, causal):
    """All weights alike, or one of them 1: dv is a mean or a copy, and everything is finite."""
    case = Case(2, 160, 256, 4, 2, 64, 64, causal, values=values)
    inputs = cases.make_inputs(case, DEVICE)
    _, (dq, dk, dv) = runner(backend).gradients(*inputs.qkv, inputs.dout, causal=causal)
    exact = oracle.backward(*inputs.qkv, inputs.dout, causal=causal)
    assert dq.isfinite().all()
    assert dk.isfinite().all()
    assert oracle.relative_error(dv, exact.dv) <= 2 * HALF_ULP[torch.bfloat16]  # P rounded, dV rounded


BOUNDED = cases.window_cases() + cases.softcap_cases() + cases.long_bounded_cases()


@pytest.mark.parametrize(("case", "backend"), pairs(BOUNDED))
def test_windows_and_softcaps(case, backend):
    inputs = cases.make_inputs(case, DEVICE)
    runner(backend).check_gradients(*inputs.qkv, inputs.dout, **case.options)


@pytest.mark.parametrize(("case", "backend"), pairs(c for c in cases.layout_cases() if c.head_dim in (64, 72)))
def test_layouts(case, backend):
    inputs = cases.make_inputs(case, DEVICE)
    runner(backend).check_gradients(*inputs.qkv, inputs.dout, causal=case.causal)


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
@pytest.mark.parametrize("head_dim, seqlen_k", [(64, 130), (192, 1100)])  # the latter: a kernel of long wide heads
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradient_through_lse(backend, head_dim, seqlen_k, causal):
    inputs = cases.make_inputs(Case(2, 300, seqlen_k, 8, 2, head_dim, head_dim), DEVICE)
    dlse = torch.randn(2, 8, 300, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    run = runner(backend)
    _, grads = run.gradients(*inputs.qkv, inputs.dout, dlse, causal=causal)
    exact = oracle.backward(*inputs.qkv, inputs.dout, dlse, causal=causal)
    plain = oracle.plain_16bit_backward(*inputs.qkv, inputs.dout, causal=causal)
    without = oracle.backward(*inputs.qkv, inputs.dout, causal=causal)
    for name, value, reference, yardstick, base in zip(NAMES, grads, exact, plain, without, strict=True):
        # The yardstick has no gradient through LSE; what it adds is of the same size and rounded in the same places.
        limit = ALLOWED_RATIO * oracle.relative_error(yardstick, base)
        assert oracle.relative_error(value, reference) <= max(limit, 2 * HALF_ULP[torch.bfloat16]), name


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
def test_only_lse_is_used(backend):
    inputs = cases.make_inputs(Case(1, 130, 190, 4, 2, 64, 64), DEVICE)
    leaves = inputs.leaves()
    _, lse = runner(backend)(*leaves, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves, allow_unused=True)
    exact = oracle.backward(*inputs.qkv, torch.zeros_like(inputs.dout), torch.ones_like(lse))
    assert dv is None or torch.all(dv == 0)
    for value, reference in ((dq, exact.dq), (dk, exact.dk)):
        assert oracle.relative_error(value, reference) <= 3 * HALF_ULP[torch.bfloat16]  # P or dS, and the result


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40)], ids=str)
def test_float32_is_ieee(backend, dims):
    for causal in (False, True):
        inputs = cases.make_inputs(Case(2, 130, 200, 4, 2, *dims, causal, dtype="float32"), DEVICE)
        runner(backend, torch.float32).check_gradients(*inputs.qkv, inputs.dout, causal=causal)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_of_some_inputs(wanted):
    inputs = cases.make_inputs(Case(2, 130, 200, 4, 2, 64, 64, causal=True), DEVICE)
    exact = oracle.backward(*inputs.qkv, inputs.dout, causal=True)
    tensors = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs.qkv)]
    out = runner(None)(*tensors, causal=True)
    grads = torch.autograd.grad(out, [tensors[i] for i in wanted], inputs.dout)
    for i, grad in zip(wanted, grads, strict=True):
        assert oracle.relative_error(grad, exact[i]) <= 3 * HALF_ULP[torch.bfloat16]  # P, dS, and the result


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("heads_kv", [16, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (500, 300)}], ids=str)
def test_deterministic_beside_a_busy_stream(dims, heads_kv, mask):
    """200 runs of a backward while another stream keeps the GPU busy: every bit the same."""
    inputs = cases.make_inputs(Case(1, 2048, 2048, 16, heads_kv, *dims), DEVICE)
    run, busy = runner(None), torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    leaves = inputs.leaves()
    first = None
    for _ in range(200):
        with torch.cuda.stream(busy):
            torch.mm(noise, noise)
        out = run(*leaves, **mask, deterministic=True)
        grads = torch.autograd.grad(out, leaves, inputs.dout)
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))
    exact = oracle.backward(*inputs.qkv, inputs.dout, **mask)
    for value, reference in zip(first, exact, strict=True):
        assert oracle.relative_error(value, reference) <= 3 * HALF_ULP[torch.bfloat16]  # P, dS, and the result


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256)], ids=str)
def test_deterministic_gradients_of_rows_without_a_key(dims):
    """400 of 1500 rows: nobody adds to their sums of dQ, which lie in memory full of NaN."""
    inputs = cases.make_inputs(Case(2, 1500, 1100, 4, 2, *dims, causal=True), DEVICE)
    leaves = inputs.leaves()
    torch.full((1 << 26,), torch.nan, device=DEVICE)  # the allocator gives its memory away again
    out = runner(None)(*leaves, causal=True, deterministic=True)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    assert torch.all(grads[0][:, :400] == 0)
    for value, exact in zip(grads, oracle.backward(*inputs.qkv, inputs.dout, causal=True), strict=True):
        assert oracle.relative_error(value, exact) <= 3 * HALF_ULP[torch.bfloat16]  # P or dS, and the result


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_expanded_dout(backend, dims, axis):
    """A gradient that is one number, or one slice for a whole axis: strides of 0, which TMA is given as they are."""
    seqlen_k = 1100 if dims == (192, 192) else 200  # not short: the kernel of wide heads
    inputs = cases.make_inputs(Case(3, 130, seqlen_k, 4, 2, *dims, causal=True), DEVICE)
    dout = inputs.dout
    dout = torch.ones_like(dout[:1, :1, :1, :1]) if axis is None else dout.narrow(axis, 0, 1)
    dout = dout.expand(inputs.dout.shape)
    _, grads = runner(backend).gradients(*inputs.qkv, dout, causal=True)
    _, same = runner(backend).gradients(*inputs.qkv, dout.contiguous(), causal=True)
    exact = oracle.backward(*inputs.qkv, dout.contiguous(), causal=True)
    plain = oracle.plain_16bit_backward(*inputs.qkv, dout.contiguous(), causal=True)
    for name, value, other, right, yardstick in zip(NAMES, grads, same, exact, plain, strict=True):
        limit = max(ALLOWED_RATIO * oracle.relative_error(yardstick, right), 3 * HALF_ULP[torch.bfloat16])
        assert oracle.relative_error(value, right) <= limit, name
        assert oracle.relative_error(other, right) <= limit, name


def test_torch_deterministic_mode_implies_it(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    inputs = cases.make_inputs(Case(1, 512, 512, 8, 2, 64, 64), DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        results = [runner(None).gradients(*inputs.qkv, inputs.dout)[1] for _ in range(10)]
    finally:
        torch.use_deterministic_algorithms(False)
    for grads in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], grads, strict=True))
