"""flash-attn-4's main backward kernel, unmodified: dK and dV, and dQ as far as its permuted accumulator shows it."""

import math

import pytest
import torch

from cute_flash.emulator import emulate

from .foreign import fa4_backward

DIM = 128
CONFIGS = [("sm_90a", True, False, 200), ("sm_100a", True, False, 256), ("sm_100a", False, True, 256)]


def reference(q, k, v, dout, scale: float, causal: bool):
    """Gradients, LSE and row sums of dout * out, in float64."""
    q, k, v = (x.double()[0, :, 0].requires_grad_() for x in (q, k, v))
    scores = q @ k.T * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    out = scores.softmax(-1) @ v
    product = out * dout.double()[0, :, 0]
    product.sum().backward()
    return q.grad, k.grad, v.grad, scores.detach().logsumexp(-1), product.detach().sum(-1)


def close(value, right) -> bool:
    return bool(((value.double() - right).abs() <= right.abs().max() * 2.0**-7).all())


@pytest.mark.parametrize("arch, causal, two_cta, seqlen", CONFIGS)
def test_backward(arch, causal, two_cta, seqlen):
    scale = DIM**-0.5
    q, k, v, dout = (torch.randn(1, seqlen, 1, DIM).bfloat16() for _ in range(4))
    dq, dk, dv, lse, dpsum = reference(q, k, v, dout, scale, causal)
    with emulate(arch, seed=1):
        tile_m, kernel = fa4_backward(arch, DIM, causal, two_cta)
        rows = -(-seqlen // tile_m) * tile_m
        padded = [torch.zeros(1, 1, rows) for _ in range(2)]
        padded[0][0, 0, :seqlen] = lse * math.log2(math.e)
        padded[1][0, 0, :seqlen] = dpsum
        accumulator = torch.zeros(1, 1, rows * DIM)
        found = [torch.full_like(k, float("nan")) for _ in range(2)]
        kernel(q, k, v, dout, *padded, accumulator, *found, scale)
    assert close(found[0][0, :, 0], dk) and close(found[1][0, :, 0], dv)
    tiles = torch.zeros(rows, DIM, dtype=torch.float64)
    tiles[:seqlen] = dq / scale
    norms = accumulator.double().view(-1, tile_m * DIM).norm(dim=1)
    assert torch.allclose(norms, tiles.view(-1, tile_m * DIM).norm(dim=1), rtol=1e-3)
