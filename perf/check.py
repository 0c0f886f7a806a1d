"""Is the answer right? A dense reference in chunks of rows, over the whole tensor, and the limits that gate a number.

The reference is computed in float32 on a GPU for 16-bit inputs (TF32 off: relative rounding near 1e-6, a thousandth of
the error it judges), in float64 otherwise. It shares no code with the package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 512 * 1024 * 1024  # of one (heads, rows, seqlen_k) score block
# ||out - ref|| / ||ref||: about twice what right kernels show (bf16 2.3e-3, fp16 2.9e-4 on normal inputs), so that one
# wrong tile of a long sequence is caught; gradients round P, dS and two more products. A row may be ten times as far.
FORWARD_LIMIT = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-5, torch.float64: 1e-12}
BACKWARD_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4, torch.float64: 1e-10}
ROW_FACTOR = 10.0


@dataclass(frozen=True)
class Reference:
    """What every contestant of a point is held against; gradients only for a backward point."""

    out: Tensor  # (batch, seqlen_q, heads_q, head_dim_v)
    lse: Tensor  # (batch, heads_q, seqlen_q)
    grads: tuple[Tensor, ...] = ()  # dq, dk, dv in the layout of q, k, v


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _precise(tensor: Tensor) -> torch.dtype:
    wide = tensor.dtype in (torch.float32, torch.float64) or tensor.device.type == "cpu"
    return torch.float64 if wide else torch.float32


def _heads_first(tensor: Tensor, batch: int, group: int) -> Tensor:
    """(heads_q, seqlen, dim) of one batch entry, in the precise dtype; key/value heads repeated over their group."""
    one = tensor[batch].transpose(0, 1).to(_precise(tensor))
    return one.repeat_interleave(group, dim=0) if group > 1 else one


def _row_chunks(heads: int, seqlen_q: int, seqlen_k: int, bytes_each: int) -> Iterator[slice]:
    rows = max(16, CHUNK_BYTES // (heads * max(seqlen_k, 1) * bytes_each))
    for start in range(0, seqlen_q, rows):
        yield slice(start, min(start + rows, seqlen_q))


class Band(NamedTuple):
    """Keys a row sees: from left before its diagonal (None: from the first) to the diagonal where causal."""

    causal: bool
    left: int | None = None


def _probabilities(q: Tensor, k: Tensor, rows: slice, band: Band, shift: int, scale: float) -> tuple[Tensor, Tensor]:
    """P and LSE of some query rows; a row with no key has P = 0 and LSE = -inf. shift = seqlen_k - seqlen_q."""
    scores = torch.matmul(q[:, rows], k.transpose(1, 2)) * scale
    diagonal = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + shift
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    if band.causal:
        scores.masked_fill_(key > diagonal, float("-inf"))
    if band.left is not None:
        scores.masked_fill_(key < diagonal - band.left, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp_(scores.sub_(lse.unsqueeze(-1)))
    return probabilities.masked_fill_(torch.isneginf(lse).unsqueeze(-1), 0.0), lse


def reference(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, dout: Tensor | None = None) -> Reference:
    """Attention of (batch, seqlen, heads, dim) tensors, and its gradients where dout is given."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    group, precise = heads_q // heads_kv, _precise(q)
    out = torch.empty(batch, seqlen_q, heads_q, v.shape[-1], dtype=precise, device=q.device)
    lse = torch.empty(batch, heads_q, seqlen_q, dtype=precise, device=q.device)
    grads = tuple(torch.empty_like(x, dtype=precise) for x in (q, k, v)) if dout is not None else ()
    with torch.no_grad(), _full_precision():
        for b in range(batch):
            q_b, k_b, v_b = (_heads_first(x, b, n) for x, n in ((q, 1), (k, group), (v, group)))
            dout_b = _heads_first(dout, b, 1) if dout is not None else None
            sums = tuple(torch.zeros_like(x) for x in (q_b, k_b, v_b)) if dout is not None else ()
            for rows in _row_chunks(heads_q, seqlen_q, seqlen_k, precise.itemsize):
                p, lse_rows = _probabilities(q_b, k_b, rows, band, seqlen_k - seqlen_q, scale)
                out_rows = torch.matmul(p, v_b)
                out[b, rows], lse[b, :, rows] = out_rows.transpose(0, 1), lse_rows
                if dout_b is not None:
                    _add_gradients(sums, (q_b, k_b, v_b), p, (out_rows, dout_b[:, rows]), (rows, scale))
            for grad, total in zip(grads, sums, strict=True):
                heads = grad.shape[2]
                grad[b] = total.view(heads, total.shape[0] // heads, *total.shape[1:]).sum(1).transpose(0, 1)
    return Reference(out, lse, grads)


def _add_gradients(
    sums: tuple[Tensor, ...],
    inputs: tuple[Tensor, Tensor, Tensor],
    p: Tensor,
    outs: tuple[Tensor, Tensor],
    where: tuple[slice, float],
) -> None:
    """dV += P^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = dS K * scale; dK += dS^T Q * scale."""
    (dq, dk, dv), (q, k, v), (out, dout), (rows, scale) = sums, inputs, outs, where
    dv += torch.matmul(p.transpose(1, 2), dout)
    delta = (dout * out).sum(-1, keepdim=True)
    ds = torch.matmul(dout, v.transpose(1, 2)).sub_(delta).mul_(p).mul_(scale)
    dq[:, rows] = torch.matmul(ds, k)
    dk += torch.matmul(ds.transpose(1, 2), q[:, rows])


def relative_error(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact|| in Frobenius norm; NaN counts as infinite, and 0 against 0 as 0."""
    difference = (value.to(exact.dtype) - exact).norm().item()
    size = exact.norm().item()
    error = difference / size if size else (0.0 if difference == 0.0 else float("inf"))
    return error if error == error else float("inf")


def worst_row(value: Tensor, exact: Tensor) -> float:
    """The largest relative error of one (batch, seqlen, head) row; rows that are 0 exactly are held against 1."""
    difference = (value.to(exact.dtype) - exact).norm(dim=-1)
    size = exact.norm(dim=-1)
    error = (difference / torch.where(size == 0, torch.ones_like(size), size)).max().item() if size.numel() else 0.0
    return error if error == error else float("inf")


def verdict(out: Tensor, grads: tuple[Tensor, ...], exact: Reference) -> tuple[float, str]:
    """(the relative error to report, why there may be no number: "" = right)."""
    if not grads:
        error, row = relative_error(out, exact.out), worst_row(out, exact.out)
        limit = FORWARD_LIMIT[out.dtype]
        if error > limit:
            return error, f"wrong: relative error {error:.2e} is above {limit:.0e}"
        if row > ROW_FACTOR * limit:
            return error, f"wrong: a row's relative error {row:.2e} is above {ROW_FACTOR * limit:.0e}"
        return error, ""
    errors = [relative_error(grad, want) for grad, want in zip(grads, exact.grads, strict=True)]
    limit = BACKWARD_LIMIT[grads[0].dtype]
    named = ", ".join(f"{name} {error:.2e}" for name, error in zip(("dq", "dk", "dv"), errors, strict=True))
    return max(errors), "" if max(errors) <= limit else f"wrong: relative errors {named}; the limit is {limit:.0e}"
