"""Calls a backend through the contract alone, without the front door: for tests of one backend's kernels."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from cute_flash.spec.device import describe
from cute_flash.spec.mask import CAUSAL, FULL
from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem


class Outputs(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


def problem(direction: str, q, k, v, *, causal: bool = False, **fields) -> Problem:
    return Problem(
        direction=direction,
        device=describe(q.device),
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        heads_q=q.shape[2],
        heads_kv=k.shape[2],
        mask=CAUSAL if causal else FULL,
        lse=True,
        **fields,
    )


def plan(backend, wanted: Problem, tile: Tile | None = None) -> Plan:
    refusals = backend.refuse(wanted)
    assert not refusals, refusals
    chosen = backend.plan(wanted)
    return chosen if tile is None else replace(chosen, tile=tile)


def forward(backend, q, k, v, *, causal=False, scale=None, tile=None) -> Outputs:
    """Output and LSE, written into memory that was NaN before."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_full((*q.shape[:3], v.shape[-1]), math.nan)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), math.nan, dtype=stats)
    kernel = backend.build(plan(backend, problem(FORWARD, q, k, v, causal=causal), tile))
    kernel(q, k, v, out, lse, scale)
    return Outputs(out, lse)


def backward(backend, dout, q, k, v, outputs: Outputs, dlse=None, *, causal=False, scale=None, tile=None):
    """dQ, dK, dV, written into memory that was NaN before."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    grads = [torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    wanted = problem(BACKWARD, q, k, v, causal=causal, lse_grad=dlse is not None)
    kernel = backend.build(plan(backend, wanted, tile))
    kernel(dout, q, k, v, outputs.out, outputs.lse, dlse, *grads, scale)
    return grads
