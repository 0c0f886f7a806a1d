"""The known cases that are about packed sequences: attention_varlen beside the same sequences one by one."""

from itertools import accumulate, pairwise

import pytest
import torch

import cute_flash
from tests import oracle
from tests.runner import HALF_ULP, ONE_KEY_ATOL, Runner

FLOAT_LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}  # of sums in another order, as in Runner's
GRADIENT_ROUNDINGS = 4  # of half an ulp: O or P, dS and the gradient itself, and these cases are small


def offsets(run: Runner, lengths) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=run.device)


def served(run: Runner) -> bool:
    """Whether the backend takes packed sequences; where not, that it says so."""
    if run.backend != "sm100":
        return True
    q, cu = run.randn(4, 1, 16), offsets(run, (4,))
    with pytest.raises(cute_flash.UnsupportedError, match="packed"):
        cute_flash.attention_varlen(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, backend=run.backend)
    return False


def packed(run: Runner, q, k, v, lengths_q, lengths_k, dout=None, **options):
    """((out, lse), (dq, dk, dv)) of one packed call. q: (total_q, heads_q, head_dim)."""
    options |= {"cu_seqlens_q": offsets(run, lengths_q), "cu_seqlens_k": offsets(run, lengths_k), "return_lse": True}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = cute_flash.attention_varlen(*leaves, backend=run.backend, **options)
    return (out, lse), torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)


def check_packed(run: Runner, lengths_q, lengths_k, heads=(1, 1), head_dim: int = 64, **options) -> None:
    """Output, LSE and gradients of every sequence against float64."""
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    q = run.randn(total_q, heads[0], head_dim)
    k, v = (run.randn(total_k, heads[1], head_dim, seed=s) for s in (1, 2))
    dout = run.randn(total_q, heads[0], head_dim, seed=3)
    (out, lse), grads = packed(run, q, k, v, lengths_q, lengths_k, dout, **options)
    limit = FLOAT_LIMIT.get(run.dtype) or GRADIENT_ROUNDINGS * HALF_ULP[run.dtype]
    rows, keys = pairwise([0, *accumulate(lengths_q)]), pairwise([0, *accumulate(lengths_k)])
    for (q0, q1), (k0, k1) in zip(rows, keys, strict=True):
        parts = q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]
        exact = oracle.forward(*parts, **options)
        references = (exact.out, *oracle.backward(*parts, dout[None, q0:q1], **options))
        values = (out[None, q0:q1], grads[0][None, q0:q1], grads[1][None, k0:k1], grads[2][None, k0:k1])
        assert oracle.lse_excess(lse[None, :, q0:q1], exact.lse) <= 1
        for value, reference in zip(values, references, strict=True):
            if not reference.any():
                assert value.numel() == 0 or value.abs().max() <= ONE_KEY_ATOL
            else:
                assert oracle.relative_error(value, reference) <= limit
