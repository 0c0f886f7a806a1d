"""flash-attn-4's forward kernels, unmodified, on both architectures: right under every mode and scheduler."""

import pytest
import torch

from cute_flash.emulator import emulate

from .foreign import fa4_forward

SCHEDULES = [("eager", "round_robin", 0), ("late", "priority", 1), ("random", "random", 2)]


def attention64(q, k, v, scale, causal):
    """Dense float64 attention of (batch, seqlen, heads, dim) tensors: output and natural-log LSE."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns).triu(1 + columns - rows).bool()
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def check_forward(compiled, batch, seqlen, heads, head_dim, causal, group=1):
    q = torch.randn(batch, seqlen, heads, head_dim).bfloat16()
    k, v = (torch.randn(batch, seqlen, heads // group, head_dim).bfloat16() for _ in range(2))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((batch, heads, seqlen), float("nan"))
    compiled(q, k, v, out, lse, head_dim**-0.5)
    expected, expected_lse = attention64(q, k, v, head_dim**-0.5, causal)
    limit = expected.abs().amax(-1, keepdim=True) * 2.0**-7  # two bf16 steps of the row's largest
    assert ((out.double() - expected).abs() <= limit).all()
    assert (lse - expected_lse).abs().max() < 1e-4


@pytest.mark.parametrize("mode, scheduler, seed", SCHEDULES)
def test_hopper(mode, scheduler, seed):
    with emulate("sm_90a", mode=mode, scheduler=scheduler, seed=seed):
        check_forward(fa4_forward("sm_90a", 128, True), 1, 200, 2, 128, True)


@pytest.mark.parametrize("mode, scheduler, seed", SCHEDULES)
def test_blackwell(mode, scheduler, seed):
    with emulate("sm_100a", mode=mode, scheduler=scheduler, seed=seed):
        check_forward(fa4_forward("sm_100a", 128, True), 1, 200, 1, 128, True)


def test_blackwell_two_cta():
    with emulate("sm_100a", seed=1):
        check_forward(fa4_forward("sm_100a", 128, False, two_cta=True), 1, 512, 1, 128, False)
