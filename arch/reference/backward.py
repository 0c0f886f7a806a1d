"""Backward by recomputation: S and P are rebuilt tile by tile from Q, K and the saved LSE. Memory is O(N).

    delta = rowsum(dO * O) - dLSE, once per row
    P = exp(S - LSE)    dV += P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ += scale dS K    dK += scale dS^T Q

With a softcap c, S = c tanh(s / c) of the scores s: dS becomes (1 - (S / c)^2) dS before it meets Q and K.
A row that sees no key has LSE = -inf, P = 0 and zero gradients. dK and dV sum over the query heads of their group.
"""

from dataclasses import dataclass

import torch

from .forward import MINUS_INF, capped_scores, finite_or_zero, hide
from .tiles import Geometry, Span, batch_pieces, compute_dtype, heads_first, query_rows, row_values, store_query_rows


@dataclass(frozen=True)
class Saved:
    """What the forward left behind, and the gradients that arrive; views of one piece of the batch."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def piece(self, batch: slice) -> "Saved":
        q, k, v, out, lse, dout = (t[batch] for t in (self.q, self.k, self.v, self.out, self.lse, self.dout))
        return Saved(q, k, v, out, lse, dout, None if self.dlse is None else self.dlse[batch])

    def sequence(self, rows: slice, keys: slice) -> "Saved":
        """Of packed sequences, one."""
        q, out, dout = (t[:, rows] for t in (self.q, self.out, self.dout))
        dlse = None if self.dlse is None else self.dlse[:, :, rows]
        return Saved(q, self.k[:, keys], self.v[:, keys], out, self.lse[:, :, rows], dout, dlse)


def row_statistics(saved: Saved, rows: Span, dout_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LSE (0 where -inf) and delta, both (batch, heads_kv, group * rows, 1). Rows without keys get delta 0."""
    heads_kv, dtype = saved.k.shape[2], dout_rows.dtype
    lse = row_values(saved.lse, rows, heads_kv).to(dtype)
    delta = (dout_rows * query_rows(saved.out, rows, heads_kv, dtype)).sum(-1, keepdim=True)
    if saved.dlse is not None:
        delta = delta - row_values(saved.dlse, rows, heads_kv).to(dtype)
    return finite_or_zero(lse), delta.masked_fill(lse == MINUS_INF, 0.0)


def backward_piece(
    geometry: Geometry, saved: Saved, grads: tuple[torch.Tensor, ...], scale: float, softcap: float
) -> None:
    dq, dk, dv = grads
    dtype = compute_dtype(saved.q.dtype)
    heads_kv = saved.k.shape[2]
    k, v = heads_first(saved.k, dtype), heads_first(saved.v, dtype)
    dk_acc, dv_acc = torch.zeros_like(k), torch.zeros_like(v)
    for rows in geometry.query_tiles():
        q_rows = query_rows(saved.q, rows, heads_kv, dtype) * scale
        dout_rows = query_rows(saved.dout, rows, heads_kv, dtype)
        lse, delta = row_statistics(saved, rows, dout_rows)
        dq_rows = torch.zeros_like(q_rows)
        for keys in geometry.key_tiles(rows):
            tile = slice(keys.start, keys.end)
            scores = capped_scores(q_rows, k[:, :, tile], softcap)
            slope = 1.0 - (scores / softcap) ** 2 if softcap else None
            p = hide(scores, geometry.hidden(rows, keys, q_rows.device)).sub_(lse).exp_()
            dv_acc[:, :, tile] += p.transpose(-1, -2) @ dout_rows
            ds = (dout_rows @ v[:, :, tile].transpose(-1, -2)).sub_(delta).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            dk_acc[:, :, tile] += ds.transpose(-1, -2) @ q_rows
            dq_rows += ds @ k[:, :, tile]
        store_query_rows(dq, rows, dq_rows * scale)
    dk.copy_(dk_acc.transpose(1, 2))
    dv.copy_(dv_acc.transpose(1, 2))


def backward(geometry: Geometry, saved: Saved, grads: tuple[torch.Tensor, ...], scale: float, softcap: float) -> None:
    """Writes the grads (dq, dk, dv). softcap 0 = none."""
    batch, _, heads_q, _ = saved.q.shape
    for piece in batch_pieces(batch, heads_q, geometry.tile):
        backward_piece(geometry, saved.piece(piece), tuple(grad[piece] for grad in grads), scale, softcap)
