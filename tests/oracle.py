"""Dense softmax attention in float64: what is right. Imports nothing of the package it judges.

Layouts: q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, dim),
LSE (batch, heads_q, seqlen_q).
Causal is aligned bottom-right; a window (left, right) is inclusive around that diagonal, None unbounded, and causal
caps right at 0. A softcap c makes c tanh(score / c) of the scaled score, before the mask. A row that sees no key has
output 0, LSE -inf and zero gradients.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

# Scores alive at once: 1 GB in float64, a few times that with autograd. Larger batches are walked in pieces.
SCORES_AT_ONCE = 1 << 27

LSE_ATOL, LSE_RTOL = 1e-3, 1e-6  # float32 sums of up to 1e5 exponentials stay inside; the rtol is float32's own ulp


class Attention(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


class Gradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class Options(NamedTuple):
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None


def visible_keys(
    seqlen_q: int, seqlen_k: int, causal: bool, device: torch.device, window: tuple | None = None
) -> torch.Tensor:
    """Bool (seqlen_q, seqlen_k): row i sees keys j <= i + seqlen_k - seqlen_q, or all; and those in the window."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    diagonal = seqlen_k - seqlen_q
    left, right = window or (None, None)
    if causal:
        mask = mask.tril(diagonal)
    if right is not None:
        mask = mask.tril(diagonal + right)
    return mask if left is None else mask.triu(diagonal - left)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Attention:
    """Plain attention in the dtype of the inputs; the softmax of 16-bit inputs is in float32, as everywhere."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    mask = visible_keys(q.shape[2], k.shape[2], options.causal, q.device, options.window)
    alive = mask.any(-1)[:, None]
    scores = scores.masked_fill(~mask, -math.inf).masked_fill(~alive, 0.0)  # a dead row must not give autograd NaN
    p = torch.softmax(scores, dim=-1) * alive
    lse = torch.logsumexp(scores, dim=-1).masked_fill(~alive[:, 0], -math.inf)
    return Attention((p.to(v.dtype) @ v).transpose(1, 2), lse)


def _empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attention:
    """The answer where a dimension is 0: no scores at all."""
    stats = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=stats, device=q.device)
    return Attention(out, lse)


def _pieces(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    step = max(1, SCORES_AT_ONCE // max(1, q.shape[1] * q.shape[2] * k.shape[1]))
    for start in range(0, q.shape[0], step):
        yield slice(start, start + step)


def _forward(q, k, v, options: Options, cast: Callable) -> Attention:
    if 0 in (*q.shape, *k.shape, *v.shape):
        return _empty(cast(q), cast(k), cast(v))
    with torch.no_grad():
        parts = [_dense(cast(q[b]), cast(k[b]), cast(v[b]), options) for b in _pieces(q, k)]
    return Attention(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))


def _backward(q, k, v, grads, options: Options, cast: Callable) -> Gradients:
    """Gradients by autograd through the dense computation; grads = (dout, dlse or None)."""
    if 0 in (*q.shape, *k.shape, *v.shape):
        return Gradients(*(torch.zeros_like(cast(x)) for x in (q, k, v)))
    dout, dlse = grads
    parts = []
    for b in _pieces(q, k):
        leaves = [cast(x[b]).detach().clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, lse = _dense(*leaves, options)
            targets, weights = [out], [cast(dout[b])]
            if dlse is not None:
                alive = lse.detach() > -math.inf
                targets.append(torch.where(alive, lse, torch.zeros_like(lse)))
                weights.append(torch.where(alive, dlse[b].to(lse.dtype), torch.zeros_like(lse)))
            parts.append(torch.autograd.grad(targets, leaves, weights))
    return Gradients(*(torch.cat(column) for column in zip(*parts, strict=True)))


def forward(q, k, v, **options: Any) -> Attention:
    """Output and LSE in float64. `options`: see Options."""
    return _forward(q, k, v, Options(**options), lambda x: x.detach().double())


def backward(q, k, v, dout, dlse=None, **options: Any) -> Gradients:
    """dQ, dK, dV in float64."""
    return _backward(q, k, v, (dout, dlse), Options(**options), lambda x: x.detach().double())


def plain_16bit(q, k, v, **options: Any) -> Attention:
    """Plain attention in the dtype of the inputs with a float32 softmax: the yardstick where no flash kernel serves."""
    return _forward(q, k, v, Options(**options), lambda x: x.detach())


def plain_16bit_backward(q, k, v, dout, **options: Any) -> Gradients:
    return _backward(q, k, v, (dout, None), Options(**options), lambda x: x.detach())


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference|| in Frobenius norm. NaN or a wrong shape is infinitely wrong."""
    if value.shape != reference.shape:
        return math.inf
    if value.numel() == 0:
        return 0.0
    distance = torch.linalg.vector_norm(value.detach().double() - reference.double()).item()
    size = torch.linalg.vector_norm(reference.double()).item()
    if math.isnan(distance):
        return math.inf
    if size == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / size


def lse_excess(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest |LSE - reference| as a share of what is allowed (<= 1 passes). -inf must match -inf; NaN never passes."""
    if value.shape != reference.shape:
        return math.inf
    if value.numel() == 0:
        return 0.0
    value, reference = value.detach().double(), reference.double()
    dead = reference == -math.inf
    if not torch.equal(value == -math.inf, dead) or bool(value.isnan().any()):
        return math.inf
    off = (value - reference).masked_fill(dead, 0.0).abs()
    allowed = LSE_ATOL + LSE_RTOL * reference.masked_fill(dead, 0.0).abs()
    return (off / allowed).max().item()
