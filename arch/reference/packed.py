"""Packed sequences, one after another: the meaning of cu_seqlens, in plain PyTorch.

The lengths are read on the host. On a GPU that waits for the device, which no other backend does.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from cute_flash.spec.lengths import check_starts
from cute_flash.spec.mask import Bounds
from cute_flash.spec.plan import Plan, Tile

from .backward import Saved, backward
from .forward import MINUS_INF, forward
from .tiles import Geometry


class Lengths(NamedTuple):
    """(sequences + 1,) int32 each."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


class Sequence(NamedTuple):
    rows: slice  # of q, out and their gradients
    keys: slice  # of k, v and theirs


def _sequences(lengths: Lengths, total_q: int, total_k: int) -> Iterator[Sequence]:
    starts_q, starts_k = (starts.tolist() for starts in lengths)
    check_starts("cu_seqlens_q", starts_q, total_q)
    check_starts("cu_seqlens_k", starts_k, total_k)
    for rows, keys in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True):
        yield Sequence(slice(*rows), slice(*keys))


def _geometry(plan: Plan, tile: Tile, sequence: Sequence, bounds: Bounds) -> Geometry:
    rows, keys = sequence
    return Geometry(plan.mask, tile, rows.stop - rows.start, keys.stop - keys.start, bounds)


def forward_packed(
    plan: Plan,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    lengths: Lengths,
    numbers: tuple[float, Bounds, float],
) -> None:
    """Writes the outputs (out, lse or None) of the operands (q, k, v), all (1, total, heads, dim); numbers are the
    scale, the bounds and the softcap. ValueError for lengths that are none."""
    q, k, v = operands
    out, lse = outputs
    scale, bounds, softcap = numbers
    assert plan.tile is not None  # plan() always sets one
    out.zero_()
    if lse is not None:
        lse.fill_(MINUS_INF)
    for sequence in _sequences(lengths, q.shape[1], k.shape[1]):
        rows, keys = sequence
        geometry = _geometry(plan, plan.tile, sequence, bounds)
        lse_rows = None if lse is None else lse[:, :, rows]
        forward(geometry, (q[:, rows], k[:, keys], v[:, keys]), out[:, rows], lse_rows, scale, softcap)


def backward_packed(
    plan: Plan,
    saved: Saved,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Lengths,
    numbers: tuple[float, Bounds, float],
) -> None:
    """Writes the grads (dq, dk, dv); shapes as in forward_packed."""
    scale, bounds, softcap = numbers
    assert plan.tile is not None  # plan() always sets one
    dq, dk, dv = (grad.zero_() for grad in grads)
    for sequence in _sequences(lengths, saved.q.shape[1], saved.k.shape[1]):
        rows, keys = sequence
        geometry = _geometry(plan, plan.tile, sequence, bounds)
        backward(geometry, saved.sequence(rows, keys), (dq[:, rows], dk[:, keys], dv[:, keys]), scale, softcap)
