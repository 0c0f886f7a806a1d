"""Calls a backend through the contract alone, without the front door: for tests of one backend's kernels."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from cute_flash.runtime import request
from cute_flash.spec.device import describe
from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem


class Outputs(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


def problem(direction: str, q, k, v, *, causal=False, window=None, softcap=None, device=None, **fields) -> Problem:
    options = request.spell(causal, window, softcap)
    return Problem(
        direction=direction,
        device=device or describe(q.device),
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        heads_q=q.shape[2],
        heads_kv=k.shape[2],
        mask=options.mask,
        features=options.features,
        lse=True,
        **fields,
    )


def plan(backend, wanted: Problem, tile: Tile | None = None) -> Plan:
    refusals = backend.refuse(wanted)
    assert not refusals, refusals
    chosen = backend.plan(wanted)
    return chosen if tile is None else replace(chosen, tile=tile)


def numbers(q, scale=None, causal=False, window=None, softcap=None) -> tuple[float, ...]:
    """What a kernel takes after its tensors."""
    return (q.shape[-1] ** -0.5 if scale is None else scale, *request.bounds(causal, window, softcap)[1])


def forward(backend, q, k, v, *, scale=None, tile=None, **options) -> Outputs:
    """Output and LSE, written into memory that was NaN before. `options`: causal, window, softcap."""
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_full((*q.shape[:3], v.shape[-1]), math.nan)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), math.nan, dtype=stats)
    wanted = plan(backend, problem(FORWARD, q, k, v, **options), tile)
    counter = (q.new_zeros(1, dtype=torch.int32),) if wanted.draws else ()
    backend.build(wanted)(q, k, v, out, lse, *numbers(q, scale, **options), *counter)
    assert not any(counter)  # as it was found
    return Outputs(out, lse)


def backward(backend, dout, q, k, v, outputs: Outputs, dlse=None, *, scale=None, tile=None, device=None, **options):
    """dQ, dK, dV, written into memory that was NaN before. `device`: the one to plan for, where it is not q's; `kept`,
    among the options: a list that gets the scratch memory, in which dQ was summed."""
    grads = [torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    kept = options.pop("kept", [])
    asked = {name: options.pop(name, False) for name in ("deterministic", "short", "small")}
    wanted = problem(BACKWARD, q, k, v, lse_grad=dlse is not None, device=device, **asked, **options)
    chosen = plan(backend, wanted, tile)
    kernel, scratch = backend.build(chosen), backend.scratch(chosen)
    batch, seqlen_q, heads_q, _ = q.shape
    sizes = batch, heads_q, seqlen_q, 0, k.shape[2], k.shape[1]
    memory = [] if scratch is None else [q.new_full((scratch.elements(*sizes),), math.nan).float()]
    kernel(dout, q, k, v, outputs.out, outputs.lse, dlse, *grads, *numbers(q, scale, **options), *memory)
    kept += memory
    return grads
