"""Packed sequences on the GPU: every backend that has them against float64, beside plain attention's error."""

import itertools
import math

import pytest
import torch

import cute_flash
from cute_flash import attention_varlen
from tests import oracle, packed
from tests.device.gpu import DEVICE
from tests.packed import LONG, SHORT, SHORTEST, PackedCase, cases, make_inputs, same
from tests.runner import ALLOWED_RATIO, HALF_ULP

ROUNDINGS = 3  # of a gradient: O or P, dS, and itself


def _serves(name: str, gradients: bool) -> bool:
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=gradients)
    starts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    try:
        cute_flash.explain(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, backend=name)
    except cute_flash.UnsupportedError:
        return False
    return True


BACKENDS = [name for name in ("sm100", "sm90", "triton", "reference") if _serves(name, gradients=False)]
GRADIENT_BACKENDS = [name for name in BACKENDS if _serves(name, gradients=True)]

GRID = [
    *cases(head_dim=64, head_dim_v=64, dtype="bfloat16", heads_q=4, heads_kv=2),
    *cases(head_dim=128, head_dim_v=128, dtype="bfloat16", heads_q=4, heads_kv=1)[::3],
    *cases(head_dim=192, head_dim_v=128, dtype="float16")[1::4],
    *cases(head_dim=72, head_dim_v=40, dtype="bfloat16")[2::4],
    *cases(head_dim=256, head_dim_v=256, dtype="bfloat16")[::5],
    same(700, 1, 1300, 129, 0, 2048, head_dim=128, head_dim_v=128, dtype="bfloat16", causal=True),
    PackedCase((1500, 10, 300), (700, 2000, 300), causal=True, dtype="float16", window=(400, None)),
]


def limits(case: PackedCase, inputs, right) -> dict[str, float]:
    (out, _), grads = packed.plain(case, inputs)
    half = HALF_ULP[inputs.q.dtype]
    found = {"out": max(ALLOWED_RATIO * oracle.relative_error(out, right[0].out), half)}
    for name, grad, reference in zip(("dq", "dk", "dv"), grads, right[1], strict=True):
        found[name] = max(ALLOWED_RATIO * oracle.relative_error(grad, reference), ROUNDINGS * half)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_against_float64(case, backend):
    inputs = make_inputs(case).to(DEVICE)
    right = packed.exact(case, inputs)
    allowed = limits(case, inputs, right)
    options = {**case.options, **inputs.lengths, **LONG, "backend": backend, "return_lse": True}
    for hints in (LONG, SHORT, SHORTEST):
        out, lse = attention_varlen(inputs.q, inputs.k, inputs.v, **{**options, **hints})
        assert oracle.relative_error(out, right[0].out) <= allowed["out"]
        assert oracle.lse_excess(lse, right[0].lse) <= 1
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if backend == "sm90" and case.head_dim > 192:  # of its two kernels for wider heads neither takes sequences
        with pytest.raises(cute_flash.UnsupportedError, match="backward of packed sequences is built up to"):
            attention_varlen(*leaves, **options)
        return
    out, lse = attention_varlen(*leaves, **options)
    found = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    check_gradients(found, packed.exact_without_lse(case, inputs), allowed)
    check_gradients(torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse)), right[1], allowed)


def check_gradients(found, exact, allowed: dict[str, float], hidden=None) -> None:
    """`hidden`: rows that are not looked at."""
    for name, grad, reference in zip(("dq", "dk", "dv"), found, exact, strict=True):
        if hidden is not None:
            grad, reference = grad[~hidden], reference[~hidden]
        if reference.norm() <= 1e-3 * math.sqrt(reference.numel()):  # one key: P = 1, dP = delta but for rounding
            assert grad.numel() == 0 or grad.abs().max() <= 1e-2, name
        else:
            assert oracle.relative_error(grad, reference) <= allowed[name], name


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_repeat(backend, head_dim, causal):
    """To the last bit with deterministic=True, sequences with several key tiles among short ones."""
    case = same(700, 3, 1300, 129, 0, 2048, 64, causal=causal, dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim)
    inputs = make_inputs(case).to(DEVICE)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    options = {**inputs.lengths, "causal": causal, "deterministic": True, "backend": backend}
    out = attention_varlen(*leaves, **options)
    first = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    right = packed.exact(case, inputs)
    check_gradients(first, packed.exact_without_lse(case, inputs), limits(case, inputs, right))
    for _ in range(5):
        again = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


FAST = [name for name in BACKENDS if name != "reference"]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(
    "hints", [LONG, {}, {"max_seqlen_q": 16, "max_seqlen_k": 16}], ids=["long", "no hint", "hints"]
)
def test_many_short_sequences(backend, hints):
    """80,000 of 16: as many as the search has to find, against the dense call on the same numbers."""
    count, length, heads, dim = 80_000, 16, 2, 64
    torch.manual_seed(0)
    q, k, v = (torch.randn(count * length, heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    starts = torch.arange(0, count * length + 1, length, device=DEVICE, dtype=torch.int32)
    out = attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, backend=backend, **hints)
    batched = (x.view(count, length, heads, dim) for x in (q, k, v))
    dense = cute_flash.attention(*batched, causal=True).view(count * length, heads, dim)
    torch.testing.assert_close(out.float(), dense.float(), rtol=2e-2, atol=1e-2)  # two roundings of P and O apart


@pytest.mark.parametrize("backend", [name for name in FAST if name in GRADIENT_BACKENDS])
def test_gradients_of_many_short_sequences(backend):
    count, length, heads, dim = 80_000, 16, 2, 64
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(count * length, heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    starts = torch.arange(0, count * length + 1, length, device=DEVICE, dtype=torch.int32)
    out = attention_varlen(*leaves, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, backend=backend)
    found = torch.autograd.grad(out, leaves, dout)
    batched = [x.view(count, length, heads, dim) for x in leaves]
    dense = torch.autograd.grad(cute_flash.attention(*batched, causal=True), leaves, dout.view(batched[0].shape))
    for name, grad, reference in zip(("dq", "dk", "dv"), found, dense, strict=True):
        assert oracle.relative_error(grad, reference) <= 2 * ROUNDINGS * HALF_ULP[torch.bfloat16], name


@pytest.mark.parametrize("backend", FAST)
def test_nothing_waits_for_the_device(backend):
    inputs = make_inputs(same(100, 30, 7, dtype="bfloat16", causal=True)).to(DEVICE)
    gradients = backend in GRADIENT_BACKENDS
    qkv = [x.requires_grad_(gradients) for x in (inputs.q, inputs.k, inputs.v)]

    def step():
        out = attention_varlen(*qkv, **inputs.lengths, causal=True, backend=backend)
        if gradients:
            torch.autograd.grad(out, qkv, inputs.dout)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", FAST)
def test_a_graph_is_replayed_with_other_lengths(backend):
    """Of as many sequences and rows; the last ends before the rows do in some."""
    static = make_inputs(same(100, 30, 70, tail=(10, 10), dtype="bfloat16")).to(DEVICE)
    for tensor in (static.q, static.k, static.v):
        tensor.nan_to_num_(nan=1.0)
    options = {"causal": True, "backend": backend, "return_lse": True}
    attention_varlen(static.q, static.k, static.v, **static.lengths, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_varlen(static.q, static.k, static.v, **static.lengths, **options)
    for lengths in ((1, 2, 207), (70, 70, 70), (0, 0, 210), (0, 150, 0), (3, 3, 3)):
        cut = packed.starts(lengths).to(DEVICE)
        static.cu_seqlens_q.copy_(cut)
        static.cu_seqlens_k.copy_(cut)
        out.fill_(float("nan"))
        graph.replay()
        case = same(*lengths, causal=True, dtype="bfloat16")
        right, _ = packed.exact(case, static)
        assert oracle.relative_error(out, right.out) <= 4 * HALF_ULP[torch.bfloat16]
        assert oracle.lse_excess(lse, right.lse) <= 1


@pytest.mark.parametrize("backend", [name for name in FAST if name in GRADIENT_BACKENDS])
def test_a_graph_with_a_backward_is_replayed_with_other_lengths(backend):
    static = make_inputs(same(100, 30, 70, dtype="bfloat16")).to(DEVICE)
    leaves = [x.clone().requires_grad_() for x in (static.q, static.k, static.v)]

    def step():
        out = attention_varlen(*leaves, **static.lengths, causal=True, backend=backend)
        return torch.autograd.grad(out, leaves, static.dout)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for lengths in ((1, 2, 197), (70, 70, 60), (0, 0, 200), (0, 200, 0), (3, 3, 194)):
        cut = packed.starts(lengths).to(DEVICE)
        static.cu_seqlens_q.copy_(cut)
        static.cu_seqlens_k.copy_(cut)
        for grad in found:
            grad.fill_(float("nan"))
        graph.replay()
        case = same(*lengths, causal=True, dtype="bfloat16")
        allowed = dict.fromkeys(("dq", "dk", "dv"), 2 * ROUNDINGS * HALF_ULP[torch.bfloat16])
        check_gradients(found, packed.exact_without_lse(case, static), allowed)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("causal", [False, True])
def test_nan_stays_in_its_sequence(backend, causal):
    """Every second sequence is NaN; the others, which lie in the same tiles of memory, are right."""
    lengths = (3, 65, 5, 1, 64, 190, 2, 300, 129)
    case = same(*lengths, head_dim=128, head_dim_v=128, dtype="bfloat16", causal=causal)
    clean = make_inputs(case).to(DEVICE)
    right, _ = packed.exact(case, clean)
    hit = torch.zeros(sum(lengths), dtype=torch.bool, device=DEVICE)
    for first, last in itertools.islice(itertools.pairwise(clean.cu_seqlens_q.tolist()), 0, None, 2):
        hit[first:last] = True
    qkv = [x.masked_fill(hit[:, None, None], float("nan")) for x in (clean.q, clean.k, clean.v)]
    for hints in (LONG, SHORT):
        out, lse = attention_varlen(*qkv, **clean.lengths, **hints, causal=causal, return_lse=True, backend=backend)
        assert oracle.relative_error(out[~hit], right.out[~hit]) <= 4 * HALF_ULP[torch.bfloat16]
        assert oracle.lse_excess(lse[:, ~hit], right.lse[:, ~hit]) <= 1
        assert out[hit].isnan().all()
    if backend in GRADIENT_BACKENDS:
        leaves, dout = [x.requires_grad_() for x in qkv], clean.dout.masked_fill(hit[:, None, None], float("nan"))
        out = attention_varlen(*leaves, **clean.lengths, causal=causal, backend=backend)
        allowed = dict.fromkeys(("dq", "dk", "dv"), 2 * ROUNDINGS * HALF_ULP[torch.bfloat16])
        check_gradients(
            torch.autograd.grad(out, leaves, dout), packed.exact_without_lse(case, clean), allowed, hidden=hit
        )


@pytest.mark.parametrize("backend", FAST)
def test_one_long_sequence_among_many(backend):
    """More than are put in order by length; wrong hints change no result."""
    lengths = [(i * 7) % 41 for i in range(2500)]
    lengths[2100] = 5000
    case = same(*lengths, head_dim=128, head_dim_v=128, dtype="bfloat16", causal=True)
    inputs = make_inputs(case).to(DEVICE)
    right, _ = packed.exact(case, inputs)
    for hints in (LONG, SHORT):
        out = attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths, **hints, causal=True, backend=backend)
        assert oracle.relative_error(out, right.out) <= 4 * HALF_ULP[torch.bfloat16]
    if backend in GRADIENT_BACKENDS:
        leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = attention_varlen(*leaves, **inputs.lengths, causal=True, backend=backend)
        allowed = dict.fromkeys(("dq", "dk", "dv"), 2 * ROUNDINGS * HALF_ULP[torch.bfloat16])
        check_gradients(torch.autograd.grad(out, leaves, inputs.dout), packed.exact_without_lse(case, inputs), allowed)


@pytest.mark.parametrize("backend", FAST)
def test_lengths_out_of_order_do_not_fault(backend):
    """Wrong numbers, and every address inside the tensors; what a call leaves behind does not spoil the next."""
    inputs = make_inputs(same(100, 30, 70, 56, dtype="bfloat16", causal=True)).to(DEVICE)
    for seed in range(8):
        torch.manual_seed(seed)
        wild = torch.randint(-1000, 2000, (5,), device=DEVICE, dtype=torch.int32)
        lengths = {"cu_seqlens_q": wild, "cu_seqlens_k": wild.flip(0).contiguous()}
        gradients = backend in GRADIENT_BACKENDS
        leaves = [x.clone().requires_grad_(gradients) for x in (inputs.q, inputs.k, inputs.v)]
        wrong = attention_varlen(*leaves, **lengths, causal=True, backend=backend)
        if gradients:
            wrong.sum().backward()
        torch.cuda.synchronize()
    right, _ = packed.exact(same(100, 30, 70, 56, dtype="bfloat16", causal=True), inputs)
    out = attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths, causal=True, backend=backend)
    assert oracle.relative_error(out, right.out) <= 4 * HALF_ULP[torch.bfloat16]
