"""The oracle is itself held against closed forms, plain loops, PyTorch's own attention and finite differences."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests import oracle

FLOAT64 = 1e-13  # hundreds of float64 ulps (2.2e-16): room for a different order of summation, for nothing else


def inputs(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(batch, seqlen_q, heads_q, head_dim, generator=generator).to(dtype)
    k = torch.randn(batch, seqlen_k, heads_kv, head_dim, generator=generator).to(dtype)
    v = torch.randn(batch, seqlen_k, heads_kv, head_dim_v, generator=generator).to(dtype)
    return q, k, v


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_plain_loops(causal):
    q, k, v = inputs(2, 5, 7, 4, 2, 3, 2)
    out, lse = oracle.forward(q, k, v, causal=causal)
    for b, i, h in ((b, i, h) for b in range(2) for i in range(5) for h in range(4)):
        last = i + 7 - 5 if causal else 6
        scores = [sum((q[b, i, h] * k[b, j, h // 2]).tolist()) / math.sqrt(3) for j in range(last + 1)]
        weights = [math.exp(s - max(scores)) for s in scores]
        expected = sum(w / sum(weights) * v[b, j, h // 2] for j, w in enumerate(weights))
        torch.testing.assert_close(out[b, i, h], expected, rtol=FLOAT64, atol=FLOAT64)
        assert abs(lse[b, h, i].item() - max(scores) - math.log(sum(weights))) < FLOAT64


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_agrees_with_pytorch(causal):
    q, k, v = inputs(2, 33, 33, 6, 2, 16, 16)
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True)
    ours = oracle.forward(q, k, v, causal=causal).out
    assert oracle.relative_error(ours, theirs.transpose(1, 2)) < FLOAT64


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [(0, 0), (1, None), (None, 2), (2, 1)], ids=str)
def test_windows_and_softcaps_by_plain_loops(window, causal):
    q, k, v = inputs(1, 5, 7, 2, 1, 3, 2)
    out, lse = oracle.forward(q, k, v, causal=causal, window=window, softcap=0.7)
    left, right = (math.inf if bound is None else bound for bound in window)
    for i, h in ((i, h) for i in range(5) for h in range(2)):
        seen = [j for j in range(7) if i + 2 - left <= j <= i + 2 + (0 if causal else right)]
        scores = [sum((q[0, i, h] * k[0, j, 0]).tolist()) / math.sqrt(3) for j in seen]
        weights = [math.exp(0.7 * math.tanh(s / 0.7)) for s in scores]
        expected = sum(w / sum(weights) * v[0, j, 0] for j, w in zip(seen, weights, strict=True))
        torch.testing.assert_close(out[0, i, h], expected, rtol=FLOAT64, atol=FLOAT64)
        assert abs(lse[0, h, i].item() - math.log(sum(weights))) < FLOAT64


def test_equal_scores_give_means_and_the_log_of_a_count():
    q, k, v = inputs(1, 3, 8, 2, 1, 4, 5)
    out, lse = oracle.forward(torch.zeros_like(q), k, v)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=FLOAT64, atol=FLOAT64)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)), rtol=FLOAT64, atol=FLOAT64)


def test_causal_is_aligned_bottom_right():
    q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 5, 1, 4)
    v = torch.eye(5)[None, :, None]
    out = oracle.forward(q, k, v, causal=True).out[0, :, 0]
    expected = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=FLOAT64, atol=FLOAT64)


def test_rows_without_keys():
    q, k, v = inputs(1, 6, 2, 2, 1, 4, 4)
    out, lse = oracle.forward(q, k, v, causal=True)
    assert torch.all(out[:, :4] == 0)
    assert torch.all(lse[:, :, :4] == -math.inf)
    assert torch.all(lse[:, :, 4:].isfinite())
    grads = oracle.backward(q, k, v, torch.ones_like(out), torch.ones_like(lse), causal=True)
    assert all(g.isfinite().all() for g in grads)
    assert torch.all(grads.dq[:, :4] == 0)


def test_empty_dimensions():
    q, k, v = inputs(2, 4, 0, 2, 1, 8, 8)
    out, lse = oracle.forward(q, k, v)
    assert torch.all(out == 0)
    assert torch.all(lse == -math.inf)
    assert [tuple(g.shape) for g in oracle.backward(q, k, v, out)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (1, 1)}, {"softcap": 0.8}, {"window": (0, None), "softcap": 2.0}],
    ids=str,
)
def test_gradients_by_finite_differences(options):
    options = {"scale": 0.7, **options}
    q, k, v = inputs(1, 4, 5, 2, 1, 3, 2)
    out, lse = oracle.forward(q, k, v, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = oracle.backward(q, k, v, dout, dlse, **options)

    def loss(tensors):
        result = oracle.forward(*tensors, **options)
        return ((result.out * dout).sum() + (result.lse * dlse).sum()).item()

    step = 1e-5  # central differences: error about step^2 = 1e-10 plus 1e-16 / step = 1e-11
    for which, grad in enumerate(grads):
        for index in range(grad.numel()):
            up, down = ([x.clone() for x in (q, k, v)] for _ in range(2))
            up[which].view(-1)[index] += step
            down[which].view(-1)[index] -= step
            assert abs((loss(up) - loss(down)) / (2 * step) - grad.reshape(-1)[index].item()) < 1e-8


def test_pieces_of_the_batch_change_nothing(monkeypatch):
    q, k, v = inputs(5, 9, 11, 4, 2, 8, 8)
    whole, grads = oracle.forward(q, k, v), oracle.backward(q, k, v, torch.ones_like(q))
    monkeypatch.setattr(oracle, "SCORES_AT_ONCE", 9 * 4 * 11 * 2)
    torch.testing.assert_close(oracle.forward(q, k, v), whole, rtol=FLOAT64, atol=FLOAT64)
    torch.testing.assert_close(oracle.backward(q, k, v, torch.ones_like(q)), grads, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_plain_16bit_rounds_like_16_bits(dtype):
    q, k, v = inputs(2, 64, 96, 4, 2, 64, 64, dtype)
    ulp = torch.finfo(dtype).eps
    out = oracle.plain_16bit(q, k, v).out
    assert out.dtype == dtype
    # One rounding of the output costs 0.29 ulp on average; rounding S and P too costs a few of them, not ten.
    assert 0.1 * ulp < oracle.relative_error(out, oracle.forward(q, k, v).out) < 3 * ulp


def test_the_measures_cannot_be_fooled():
    ones = torch.ones(4)
    assert oracle.relative_error(ones, ones) == 0
    assert oracle.relative_error(torch.full((4,), math.nan), ones) == math.inf
    assert oracle.relative_error(ones[:3], ones) == math.inf
    assert oracle.relative_error(ones, torch.zeros(4)) == math.inf
    assert oracle.relative_error(torch.zeros(4), torch.zeros(4)) == 0
    assert oracle.relative_error(2 * ones, ones) == pytest.approx(1.0)
    dead = torch.tensor([-math.inf, 1.0])
    assert oracle.lse_excess(dead, dead) == 0
    assert oracle.lse_excess(torch.tensor([0.0, 1.0]), dead) == math.inf
    assert oracle.lse_excess(torch.tensor([-math.inf, -math.inf]), dead) == math.inf
    assert oracle.lse_excess(torch.tensor([-math.inf, math.nan]), dead) == math.inf
    assert oracle.lse_excess(torch.tensor([-math.inf, 1.002]), dead) > 1 > oracle.lse_excess(dead + 9e-4, dead)
