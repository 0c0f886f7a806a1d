"""python -m cute_flash bench: one shape timed on this machine, ours beside torch's SDPA. Checked first, timed after.

A look, not a measurement to publish: perf/ of the repository controls for clocks, heat and order, this does not.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import words
from .api import attention, explain
from .spec.errors import UnsupportedError
from .spec.problem import FORWARD

# Two kernels of the same exact attention differ by their rounding: some half ulps of the output's dtype.
ALLOWED = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-3, "float64": 1e-10}
ROUNDS, SECONDS = 7, 0.05  # medians of 7 rounds, each about 50 ms of calls


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: seconds, for no other command

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    unequal = causal and q.shape[2] != k.shape[2]  # is_causal is aligned top-left, ours bottom-right
    bias = causal_lower_right(q.shape[2], k.shape[2]) if unequal else None
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal and not unequal, enable_gqa=grouped)
    return out.transpose(1, 2)


def _difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    distance = torch.linalg.vector_norm((mine - theirs).double()) / torch.linalg.vector_norm(theirs.double())
    return float(distance)


def _seconds(call: Callable[[], Any], cuda: bool) -> float:
    """Median seconds of one call, by GPU events where there is a GPU."""

    def timed(count: int) -> float:
        if not cuda:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / count

    timed(2)
    count = max(1, int(SECONDS / max(timed(1), 1e-7)))
    return statistics.median(timed(count) for _ in range(ROUNDS))


def flops_of(shapes: list[tuple[int, ...]], causal: bool) -> float:
    """Of the forward: two products, 2 operations a term; keys that no row sees are not counted."""
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, _, _), (_, _, _, head_dim_v) = shapes
    pairs = sum(max(0, min(seqlen_k, row + 1 + seqlen_k - seqlen_q)) for row in range(seqlen_q))
    return 2.0 * batch * heads * (head_dim + head_dim_v) * (pairs if causal else seqlen_q * seqlen_k)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _contestants(
    qkv: Tensors, arguments: argparse.Namespace
) -> dict[str, tuple[Callable[[], torch.Tensor], Callable[[], Any]]]:
    """Name -> (the call, the call as it is timed)."""
    ours = {"causal": arguments.causal, "window": arguments.window, "softcap": arguments.softcap}
    calls: dict[str, Callable[[], torch.Tensor]] = {"ours": lambda: attention(*qkv, backend=arguments.backend, **ours)}
    if arguments.window is None and not arguments.softcap:  # SDPA knows neither
        calls["sdpa"] = lambda: _sdpa(*qkv, arguments.causal)
    if arguments.direction == FORWARD:
        return {name: (call, call) for name, call in calls.items()}
    weight = torch.randn_like(calls["ours"]())

    def both_ways(call: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), qkv, weight)

    return {name: (call, both_ways(call)) for name, call in calls.items()}


def bench(arguments: argparse.Namespace) -> int:
    """Time one shape on this machine: ours beside torch's SDPA. Nothing is timed where the two disagree."""
    shapes = words.shapes_of(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    qkv = words.tensors(shapes, arguments.dtype, device, grad=arguments.direction != FORWARD)
    options = {name: getattr(arguments, name) for name in ("causal", "window", "softcap", "backend")}
    try:
        decision = explain(*qkv, **options)
    except (UnsupportedError, ValueError) as refusal:
        print(refusal, file=sys.stderr)
        return 1
    contestants = _contestants(qkv, arguments)
    outputs = {name: call().detach() for name, (call, _) in contestants.items()}
    difference = _difference(outputs["ours"], outputs["sdpa"]) if "sdpa" in outputs else None
    if difference is not None and not difference <= ALLOWED[arguments.dtype]:
        print(f"ours and torch's SDPA differ by {difference:.1e}: nothing is timed", file=sys.stderr)
        return 1
    passes = 1.0 if arguments.direction == FORWARD else 3.5  # the backward has five products to the forward's two
    flops = passes * flops_of(shapes, arguments.causal)
    seconds = {name: _seconds(timed, device == "cuda") for name, (_, timed) in contestants.items()}
    rows = {name: {"ms": s * 1e3, "tflops": flops / s / 1e12} for name, s in seconds.items()}
    if arguments.window is not None:  # how many keys a window hides is not counted here: a rate would be too high
        rows = {name: {"ms": row["ms"]} for name, row in rows.items()}
    if arguments.json:
        words.show_json({"times": rows, "difference": difference, "decision": decision.facts()})
        return 0
    print(decision)
    for name, row in rows.items():
        rate = f"  {row['tflops']:8.3g} TFLOP/s" if "tflops" in row else ""
        print(f"{name:6} {row['ms']:10.4f} ms{rate}")
    said = "SDPA has no such option: not checked" if difference is None else f"differ by {difference:.1e}"
    print(f"outputs: {said}; {arguments.direction}, clocks not controlled (perf/ of the repository does)")
    return 0


def add_options(command: argparse.ArgumentParser) -> None:
    words.add_shapes(command, required=True)
    command.add_argument("--dtype", type=words.dtype, choices=words.DTYPES, default="bfloat16")
    command.add_argument("--causal", action="store_true")
    words.add_bounds(command)
    command.add_argument("--direction", choices=("forward", "both"), default="forward", help="both: with the backward")
    command.add_argument("--backend")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=bench)
