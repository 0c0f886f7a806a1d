"""Whoever follows what torch computes, while it computes: modes, torch.jit.trace, batched gradients, counted FLOPs."""

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import cute_flash
from cute_flash import attention, attention_kvcache, attention_varlen
from cute_flash.integrations import spans
from cute_flash.runtime import ops

from ..fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("office")


class Seeing(TorchDispatchMode):
    """What it was shown of ours, and whether anything else wrote an output."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function).removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def normal(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def dense_inputs(seed=0, batch=2, seqlen_q=9, seqlen_k=13):
    return normal((batch, seqlen_q, 4, 16), (batch, seqlen_k, 2, 16), (batch, seqlen_k, 2, 24), seed=seed)


def dense(q, k, v):
    return attention(q, k, v, causal=True, scale=-0.3)


def packed_inputs(seed=0):
    lengths = [4, 0, 8] if seed else [2, 9, 1]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return [*normal((12, 4, 16), (12, 2, 16), (12, 2, 24), seed=seed), starts]


def packed(q, k, v, starts):
    return attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, max_seqlen_q=9)


def cache_inputs(seed=0):
    lengths = torch.tensor([1 + seed, 5 - seed], dtype=torch.int32)
    return [*normal((2, 1, 4, 16), (2, 8, 2, 16), (2, 8, 2, 24), seed=seed), lengths]


def cached(q, k, v, lengths):
    return attention_kvcache(q, k, v, cache_seqlens=lengths, causal=True)


def appended(q, k, v, lengths):
    return attention_kvcache(q, k, v, cache_seqlens=lengths, k_new=k[:, :1] * 2, v_new=v[:, :1] * 2, causal=True)


CALLS = {
    "attention": (dense, dense_inputs),
    "attention_varlen": (packed, packed_inputs),
    "attention_kvcache": (cached, cache_inputs),
    "attention_kvcache_append": (appended, cache_inputs),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("tracer", ["make_fx", "jit"])
def test_what_was_traced_computes_anew(poisoned_empty, name, warm, tracer):
    """Not what a kernel left in an output while it was traced, and nobody writes to when it runs."""
    call, inputs = CALLS[name]
    if warm:
        call(*inputs())
    traced = make_fx(call)(*inputs()) if tracer == "make_fx" else torch.jit.trace(call, tuple(inputs()))
    for seed in (0, 1, 2):
        mine, theirs = inputs(seed), inputs(seed)
        assert torch.equal(traced(*mine), call(*theirs))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))  # caches, where keys were written
    names = [str(node.target) for node in traced.graph.nodes] if tracer == "make_fx" else [str(traced.graph)]
    assert any(f"cute_flash.{name}.default" == each or f"cute_flash::{name}(" in each for each in names)


def test_a_trace_has_gradients_and_other_sizes():
    """torch.jit.trace asks once more with gradients off, and compares the graphs."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 16, dtype=torch.float64)

        def forward(self, q, k, v):
            return dense(self.linear(q), k, v)

    model = Model()
    traced = torch.jit.trace(model, tuple(dense_inputs()))
    other = dense_inputs(seed=1, batch=3, seqlen_q=40, seqlen_k=1100)
    grads = [torch.autograd.grad(f(*other).sum(), model.linear.weight)[0] for f in (traced, model)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("warm", [False, True])
def test_a_mode_sees_the_operator_and_no_launch(backends, warm):
    backends(FakeBackend())
    q, k, v = (x.bfloat16() for x in dense_inputs())
    if warm:
        attention(q, k, v)
        attention(*(x.requires_grad_() for x in (q.clone(), k, v)))
    with Seeing() as mode:
        attention(q, k, v)
        out = attention(q.requires_grad_(), k, v)
        out.sum().backward()
    assert mode.seen.count("cute_flash.attention") == 2 and mode.seen.count("cute_flash.attention_backward") == 1
    assert q.grad is not None and not any("empty" in name for name in mode.seen)


def test_a_mode_changes_nothing_about_what_is_refused_or_cast():
    q, k, v = dense_inputs()
    with Seeing() as mode:
        with pytest.raises(TypeError, match="q is a TwoTensor"):
            attention(TwoTensor(q, q), k, v)
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got list"):
            attention_kvcache([1], k, v, cache_seqlens=torch.zeros(2, dtype=torch.int32))
        with pytest.raises(TypeError, match="got a nested tensor"):
            attention(*[torch.nested.nested_tensor([q[0], q[1]])] * 3)
        with pytest.raises(cute_flash.UnsupportedError, match=r"torch\.func"):
            torch.func.grad(lambda x: attention(x, k, v).sum())(q)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(cute_flash.UnsupportedError, match="a tangent"):
            attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
        assert mode.seen.count("cute_flash.attention") == 0
        lazy = dense(torch._neg_view(q), k, v)
        with torch.autocast("cpu", torch.bfloat16):
            assert dense(q.float(), k.float(), v.float()).dtype == torch.bfloat16
        assert dense(q[:0], k[:0], v[:0]).shape == (0, 9, 4, 24)
    assert torch.equal(lazy, dense(-q, k, v)) and mode.seen.count("cute_flash.attention") == 3


def test_selective_checkpointing_of_eager_calls_names_the_operator(monkeypatch):
    """Kept, attention runs once; recomputed, twice."""
    runs = []
    table_of = ops.Words.split
    monkeypatch.setattr(ops.Words, "split", lambda words, dim: runs.append(dim) or table_of(words, dim))
    inputs = [x.requires_grad_() for x in dense_inputs()]
    expected = torch.autograd.grad(dense(*inputs).cos().sum(), inputs)
    counts = []
    for kept in ([torch.ops.cute_flash.attention.default], []):
        policy = functools.partial(create_selective_checkpoint_contexts, kept)
        runs.clear()
        out = checkpoint(lambda *x: dense(*x).cos(), *inputs, use_reentrant=False, context_fn=policy)
        grads = torch.autograd.grad(out.sum(), inputs)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        counts.append(len(runs))
    assert counts == [2, 3]  # forward, backward, and the recomputation


# ---------------------------------------------------------------------------------------------------- counted FLOPs


def counted(call, *inputs, gradients=()):
    with FlopCounterMode(display=False) as counter:
        out = call(*inputs)
        if gradients:
            torch.autograd.grad(out.sum(), gradients)
    return counter.get_total_flops()


def test_flops_are_those_of_sdpa():
    q, k, v = (x.requires_grad_() for x in dense_inputs())
    for gradients in ((), (q, k, v)):
        theirs = counted(
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
            ),
            q, k, v,
        )  # fmt: skip
        mine = counted(attention, q, k, v, gradients=gradients)
        assert theirs == 2 * 2 * 4 * 9 * 13 * (16 + 24)  # of the forward: batch, heads, rows, keys, dims
        assert mine == theirs + (2 * 2 * 4 * 9 * 13 * (3 * 16 + 2 * 24) if gradients else 0)


def test_flops_of_lengths_are_of_what_is_there():
    q, k, v, starts = packed_inputs()  # sequences of 2, 9 and 1
    pairs, of_pair = 2 * 2 + 9 * 9 + 1, 2 * 4 * (16 + 24)
    assert counted(packed, q, k, v, starts) == pairs * of_pair
    needy = [x.requires_grad_() for x in (q, k, v)]
    backward = pairs * 2 * 4 * (3 * 16 + 2 * 24)
    assert counted(packed, *needy, starts, gradients=needy) == pairs * of_pair + backward
    assert counted(cached, *cache_inputs()) == (1 + 5) * of_pair
    assert counted(appended, *cache_inputs()) == (2 + 6) * of_pair
    assert counted(appended, *cache_inputs()[:3], torch.tensor([8, 3], dtype=torch.int32)) == (8 + 4) * of_pair
    mode = torch._subclasses.FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in cache_inputs()], [mode.from_tensor(x) for x in packed_inputs()]
    assert counted(cached, *fakes[0]) == 2 * 8 * of_pair  # full
    assert counted(packed, *fakes[1]) == 12 * 12 * of_pair


def test_flops_of_padding_count_as_sdpas_do():
    q, k, v = dense_inputs()
    places = spans.Places(2, 9, 13, 0, 0)
    told = spans.of_mask(torch.ones(2, 13, dtype=torch.bool), places, (None, None))
    assert counted(lambda *x: spans.attend_in_graph(*x, told, None, None), q, k, v) == counted(attention, q, k, v)


# ------------------------------------------------------------------------------------------------ batched gradients


@pytest.mark.parametrize("how", ["is_grads_batched", "vectorize", "vmap"])
@pytest.mark.parametrize("which", ["out", "lse"])
def test_batched_gradients_are_refused_with_a_sentence(how, which):
    q, k, v = (x.requires_grad_() for x in dense_inputs())

    def call(q):
        out, lse = attention(q, k, v, return_lse=True)
        return out if which == "out" else lse

    result = call(q)
    many = torch.stack([torch.ones_like(result)] * 2)
    with pytest.raises(cute_flash.UnsupportedError, match=f"d{which} is a batch of gradients"):
        if how == "is_grads_batched":
            torch.autograd.grad(result, q, many, is_grads_batched=True)
        elif how == "vectorize":
            torch.autograd.functional.jacobian(call, q, vectorize=True)
        else:
            torch.func.vmap(lambda grad: torch.autograd.grad(result, q, grad)[0])(many)
    jacobian = torch.autograd.functional.jacobian(lambda k: attention(q[:1, :2], k[:1, :3], v[:1, :3]), k)
    assert jacobian.shape == (1, 2, 4, 24, *k.shape)


def test_a_transform_in_a_graph_is_refused_in_these_words():
    torch._dynamo.reset()
    q, k, v = dense_inputs()
    compiled = torch.compile(torch.func.grad(lambda q: dense(q, k, v).sum()), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"torch\.func transforms .* are not built yet"):
        compiled(q)
