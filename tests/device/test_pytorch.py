"""PyTorch's own machinery around GPU kernels: the compiler's graphs, export, autocast, SDPA, tensors without memory."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import cute_flash
from cute_flash.integrations import sdpa, spans
from tests import cases, oracle
from tests.cases import Case
from tests.device.gpu import BACKENDS, DEVICE, GRADIENT_BACKENDS, runner

LENGTHS = ((2, 300, 300), (3, 129, 700), (5, 1100, 1500), (2, 1, 4096))


def inputs_of(lengths=(2, 300, 300), **fields):
    batch, seqlen_q, seqlen_k = lengths
    return cases.make_inputs(Case(batch, seqlen_q, seqlen_k, 8, 2, 64, 64, causal=True, **fields), DEVICE)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_call_is_the_eager_one(backend):
    """Same kernels, so the same bits, for lengths on both sides of a class."""
    run = functools.partial(runner(backend), causal=True, return_lse=True)
    compiled = torch.compile(
        functools.partial(cute_flash.attention, causal=True, return_lse=True, backend=backend),
        fullgraph=True, dynamic=True,
    )  # fmt: skip
    for lengths in LENGTHS:
        q, k, v = inputs_of(lengths).qkv
        for mine, expected in zip(compiled(q, k, v), run(q, k, v), strict=True):
            assert torch.equal(mine, expected), lengths


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
def test_compiled_gradients_are_the_eager_ones(backend):
    options = {"causal": True, "deterministic": True, "window": (100, None), "softcap": 20.0, "backend": backend}
    compiled = torch.compile(lambda q, k, v: cute_flash.attention(q, k, v, **options), fullgraph=True, dynamic=True)
    for lengths in LENGTHS[:3]:
        inputs = inputs_of(lengths)
        grads = []
        for call in (compiled, lambda *x: cute_flash.attention(*x, **options)):
            leaves = inputs.leaves()
            grads.append(torch.autograd.grad(call(*leaves), leaves, inputs.dout))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), lengths


PACKED = (37, 300, 0, 129, 1100)  # lengths


@pytest.mark.parametrize("backend", [None, "triton"])
def test_packed_sequences_in_a_graph(backend):
    """Through Inductor, forward and backward: the eager bits, for lengths of another sum and count too."""

    def call(q, k, v, starts):
        options = {"causal": True, "deterministic": True, "backend": backend}
        return cute_flash.attention_varlen(q * 1.5, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for lengths in (PACKED, PACKED[:3]):
        starts = torch.tensor((0, *lengths), device=DEVICE).cumsum(0).int()
        total = sum(lengths)
        generator = torch.Generator(DEVICE).manual_seed(total)
        q, k, v, dout = (
            torch.randn(total, heads, 64, device=DEVICE, dtype=torch.bfloat16, generator=generator)
            for heads in (8, 2, 2, 8)
        )
        results = []
        for attend in (compiled, call):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attend(*leaves, starts)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), lengths


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("backend", [None, "triton"])
def test_steps_of_a_cache_in_a_graph(backend, page_size):
    """Through Inductor: two steps that append to one cache, in their order, as eagerly."""

    def steps(q, new, k, v, lens, table):
        options = {"page_table": table, "causal": True, "backend": backend}
        first = cute_flash.attention_kvcache(q, k, v, cache_seqlens=lens, k_new=new, v_new=new * 2, **options)
        second = cute_flash.attention_kvcache(first, k, v, cache_seqlens=lens + 1, k_new=new, v_new=new, **options)
        return first + second

    shape = (8, page_size, 2, 64) if page_size else (2, 256, 2, 64)
    table = torch.randperm(8, device=DEVICE).int().view(2, 4) if page_size else None
    q, new = (torch.randn(2, 1, heads, 64, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 2))
    k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    lens = torch.tensor([37, 200], device=DEVICE, dtype=torch.int32)
    results = []
    for attend in (torch.compile(steps, fullgraph=True), steps):
        caches = k.clone(), v.clone()
        with torch.no_grad():
            results.append((attend(q, new, *caches, lens, table), *caches))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][1], k)


def test_cuda_graphs_of_the_compiler():
    """mode="reduce-overhead" records forward and backward; the recording sees new values."""
    compiled = torch.compile(
        lambda q, k, v: cute_flash.attention(q, k, v, causal=True, deterministic=True) * 2,
        fullgraph=True, mode="reduce-overhead",
    )  # fmt: skip
    for seed in range(5):
        inputs = inputs_of()
        leaves = [(x * (1 + seed)).detach().requires_grad_() for x in inputs.qkv]
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*leaves)
        expected = cute_flash.attention(*leaves, causal=True, deterministic=True) * 2
        assert torch.equal(out, expected)
        grads = torch.autograd.grad(out, leaves, inputs.dout)
        right = torch.autograd.grad(expected, leaves, inputs.dout)
        assert all(torch.equal(a, b) for a, b in zip(grads, right, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_memory_never_reach_a_warm_kernel(backend):
    """Their data pointer is null: a kernel that took them would end the context."""
    run = runner(backend)
    q, k, v = inputs_of().qkv
    out = run(q, k, v, causal=True)
    mode = FakeTensorMode()
    fake = run(*(mode.from_tensor(x) for x in (q, k, v)), causal=True)
    assert isinstance(fake, FakeTensor) and fake.shape == out.shape and fake.device == out.device
    with pytest.raises(TypeError, match="q is a TwoTensor"):
        run(*(TwoTensor(x, x) for x in (q, k, v)), causal=True)
    for name, inputs in (("k", (q, TwoTensor(k, k), v)), ("v", (q, k, TwoTensor(v, v)))):
        with pytest.raises(TypeError, match=f"{name} is a TwoTensor"):
            run(*inputs, causal=True)
    torch.cuda.synchronize()
    assert torch.equal(run(q, k, v, causal=True), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_launch_does_not_escape_who_follows_what_is_computed(backend):
    """After a warm call: what was traced runs the kernel anew, and does not return an output that nothing writes to."""

    def call(q, k, v):
        return cute_flash.attention(q, k, v, causal=True, backend=backend)

    q, k, v = inputs_of().qkv
    call(q, k, v)
    traced = make_fx(call)(q, k, v), torch.jit.trace(call, (q, k, v))
    for scale in (1, 2):
        expected = call(q * scale, k, v)
        assert all(torch.equal(each(q * scale, k, v), expected) for each in traced)
    with FlopCounterMode(display=False) as counter:
        call(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 8 * 300 * 300 * (64 + 64)


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
def test_batched_gradients_never_reach_a_kernel(backend):
    """They have no memory of their own."""
    leaves = inputs_of().leaves()
    out = cute_flash.attention(*leaves, causal=True, backend=backend)
    many = torch.ones(2, *out.shape, device=DEVICE, dtype=out.dtype)
    with pytest.raises(cute_flash.UnsupportedError, match="dout is a batch of gradients"):
        torch.autograd.grad(out, leaves, many, is_grads_batched=True)
    torch.cuda.synchronize()


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return cute_flash.attention(q, k, v, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export_after_a_warm_call(strict):
    q, k, v = inputs_of().qkv
    expected = Model()(q, k, v)
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=8192)
    sizes = ({0: batch, 1: length},) * 3
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=sizes, strict=strict)
    assert torch.equal(program.module()(q, k, v), expected)
    longer = inputs_of((3, 2000, 2000)).qkv
    assert torch.equal(program.module()(*longer), Model()(*longer))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    """Queries and keys in float32 as after a rotary embedding, values from a linear layer."""
    q, k, v = inputs_of().qkv
    call = cute_flash.attention
    if compiled:
        call = torch.compile(lambda q, k, v, causal: cute_flash.attention(q, k, v, causal=causal), fullgraph=True)
    expected = cute_flash.attention(q, k, v, causal=True)
    for mixture in ((q.float(), k.float(), v), (q, k.float(), v), (q.float(), k.float(), v.float())) * 2:
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(call(*mixture, causal=True), expected)
    with pytest.raises(Exception, match="one dtype"):
        call(q.float(), k, v, causal=True)


def test_spans_of_padding_in_a_compiled_graph():
    """The mask lies on the GPU and its spans on the CPU, read when the graph runs; same bits as eagerly."""
    q, k, v = inputs_of().qkv
    places, bounds = spans.Places(2, 300, 300, 0, 0), (None, 0)

    def call(q, k, v, mask):
        return spans.attend_in_graph(q, k, v, spans.of_mask_in_graph(mask, places, bounds), None, None) * 2

    compiled = torch.compile(call, fullgraph=True)
    for padding in ((0, 57), (299, 0)):
        mask = torch.ones(2, 300, dtype=torch.bool, device=DEVICE)
        for row, count in enumerate(padding):
            mask[row, :count] = False
        expected = spans.attend(q, k, v, spans.of_mask(mask, places, bounds), None, None) * 2
        out = compiled(q, k, v, mask)
        assert torch.equal(out, expected)
        assert all(not out[row, :count].any() and out[row, count:].any() for row, count in enumerate(padding))


def test_inference_mode():
    q, k, v = inputs_of().qkv
    expected = cute_flash.attention(q, k, v, causal=True)
    for _ in range(2):
        with torch.inference_mode():
            out = cute_flash.attention(q, k, v, causal=True)
            assert out.is_inference() and torch.equal(out, expected)
            assert torch.equal(cute_flash.attention(q * 1, k * 1, v * 1, causal=True), expected)


@pytest.mark.parametrize("lengths", [(300, 300), (129, 700), (700, 129)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_patched_is_sdpa(capsys, lengths, is_causal):
    q, k, v = (x.transpose(1, 2) for x in inputs_of((2, *lengths)).qkv)
    exact = sdpa.TORCH(q.double(), k.double(), v.double(), is_causal=is_causal, enable_gqa=True)
    theirs = sdpa.TORCH(q, k, v, is_causal=is_causal, enable_gqa=True)
    with sdpa.patch():
        mine = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    assert "torch's" not in capsys.readouterr().err
    # Half an ulp of bfloat16 for the output and one for the weights, beside torch's own error.
    limit = max(1.05 * oracle.relative_error(theirs, exact), 2 * 2.0**-9)
    assert oracle.relative_error(mine, exact) <= limit
