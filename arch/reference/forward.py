"""Forward by tiles with online softmax: running max, running sum, rescale, one division at the end. Memory is O(N).

For one tile of query rows and each tile of keys in turn:

    S = scale * Q K^T, capped to softcap * tanh(S / softcap) where asked, then -inf where masked
    m' = max(m, rowmax S)        alpha = exp(m - m')        P = exp(S - m')
    l  = alpha * l + rowsum P    O = alpha * O + P V

and at the end O /= l, LSE = m + ln l. A row that sees no key keeps m = -inf and l = 0: its O is 0, its LSE -inf.
"""

import torch

from .tiles import Geometry, Span, batch_pieces, compute_dtype, heads_first, query_rows, store_query_rows

MINUS_INF = float("-inf")


def capped_scores(q_rows: torch.Tensor, k_tile: torch.Tensor, softcap: float) -> torch.Tensor:
    """S (batch, heads_kv, group * rows, keys) of a tile pair before the mask; q_rows carries the scale already."""
    scores = q_rows @ k_tile.transpose(-1, -2)
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def hide(scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """In place."""
    if hidden is not None:
        scores.unflatten(2, (-1, hidden.shape[0])).masked_fill_(hidden, MINUS_INF)
    return scores


def finite_or_zero(x: torch.Tensor) -> torch.Tensor:
    """-inf -> 0, so that exp(-inf - x) is 0 and not NaN. Never stored: a guard kept as a row's max would hide keys."""
    return x.masked_fill(x == MINUS_INF, 0.0)


def online_softmax(
    q_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Span, geometry: Geometry, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (batch, heads_kv, group * rows, head_dim_v) and LSE (..., 1) of one tile of query rows."""
    row_max = q_rows.new_full((*q_rows.shape[:-1], 1), MINUS_INF)
    row_sum = torch.zeros_like(row_max)
    acc = q_rows.new_zeros((*q_rows.shape[:-1], v.shape[-1]))
    for keys in geometry.key_tiles(rows):
        scores = capped_scores(q_rows, k[:, :, keys.start : keys.end], softcap)
        scores = hide(scores, geometry.hidden(rows, keys, q_rows.device))
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        anchor = finite_or_zero(new_max)
        alpha = torch.exp(row_max - anchor)
        p = scores.sub_(anchor).exp_()
        row_sum = row_sum.mul_(alpha).add_(p.sum(-1, keepdim=True))
        acc = acc.mul_(alpha).add_(p @ v[:, :, keys.start : keys.end])
        row_max = new_max
    lse = finite_or_zero(row_max) + torch.log(row_sum)
    return acc.div_(row_sum.masked_fill(row_sum == 0, 1.0)), lse


def forward(
    geometry: Geometry,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> None:
    """Writes `out`, and `lse` where there is one, from operands (q, k, v). softcap 0 = none."""
    q, k, v = operands
    heads_kv, dtype = k.shape[2], compute_dtype(q.dtype)
    for piece in batch_pieces(q.shape[0], q.shape[2], geometry.tile):
        k_piece, v_piece = heads_first(k[piece], dtype), heads_first(v[piece], dtype)
        for rows in geometry.query_tiles():
            q_rows = query_rows(q[piece], rows, heads_kv, dtype) * scale
            o_rows, lse_rows = online_softmax(q_rows, k_piece, v_piece, rows, geometry, softcap)
            store_query_rows(out[piece], rows, o_rows)
            if lse is not None:
                target = lse[piece, :, rows.start : rows.end].unflatten(1, (heads_kv, -1))
                target.copy_(lse_rows.squeeze(-1).unflatten(2, (-1, rows.end - rows.start)))
