"""Plans of the Hopper backward side by side: `python -m perf.variants --points pass=bwd,d=128,S=4096 --jobs 16`.

Every plan of tiles.backward_candidates runs as the front door would run it, beside the rivals named, interleaved in one
process as perf/bench.py does (graph replay, L2 flushed, results checked first). All plans are compiled before, by
--jobs forked processes, into the cache on disk. Printed, not recorded.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from cute_flash import api
from cute_flash.arch.sm90 import tiles
from cute_flash.arch.sm90.backend import BACKEND, Sm90Backend
from cute_flash.runtime import compiler
from cute_flash.spec.device import Device
from cute_flash.spec.mask import Mask
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, FORWARD, SHORT_KEYS, SMALL_ROWS, SMALL_ROWS_FULL, Problem

from . import baselines, points
from .bench import reason
from .series import Inputs, Runner, interleave, quantile


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.variants", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--points", default="pass=bwd,d=128,mask=causal,S=4096", help="as perf/bench.py; + joins")
    add("--against", default="fa4,cudnn", help="contestants of perf/baselines.py, comma-separated")
    add("--seconds", type=float, default=0.6, help="of the series of each point")
    add("--jobs", type=int, default=1, help="processes that compile")
    add("--sms", type=int, default=132, help="multiprocessors of the GPU")
    add("--only", default="", help="of the candidates, those whose name has one of these words; comma-separated")
    add("--deterministic", action="store_true", help="ask for it")
    return parser.parse_args(argv)


def named(plan: Plan) -> str:
    tile = plan.tile
    words = [str(tile) if tile else "", plan.variant or "plain"]
    return " ".join(words + (["deterministic"] if plan.deterministic else []))


def problem_of(point: points.Point, direction: str, sms: int, deterministic: bool) -> Problem:
    return Problem(
        direction=direction,
        device=Device("cuda", 0, "imagined", (9, 0), sms),
        dtype=points.DTYPES[point.dtype],
        head_dim=point.head_dim,
        head_dim_v=point.head_dim_v,
        heads_q=point.heads_q,
        heads_kv=point.heads_kv,
        mask=Mask(left=point.left is not None, right=point.causal, causal=point.causal),
        lse=True,
        short=point.seqlen_k <= SHORT_KEYS,
        small=point.batch * point.heads_q * point.seqlen_q <= (SMALL_ROWS if point.causal else SMALL_ROWS_FULL),
        deterministic=deterministic,
    )


def candidates(plan: Plan, only: str) -> list[Plan]:
    """The present plan, then the others asked for."""
    words = [word for word in only.split(",") if word]
    others = [c for c in tiles.backward_candidates(plan) if not words or any(word in named(c) for word in words)]
    return [plan, *(c for c in others if c != plan)]


def _compile(plan: Plan) -> str:
    try:
        return f"  {plan}: {compiler.kernel_for(BACKEND, plan).origin}"
    except Exception as error:
        return f"  {plan}: {reason(error)[:300]}"


def compile_all(args: argparse.Namespace, chosen: Sequence[points.Point]) -> None:
    plans: dict[Plan, None] = {}
    for point in chosen:
        plans[BACKEND.plan(problem_of(point, FORWARD, args.sms, args.deterministic))] = None
        backward = BACKEND.plan(problem_of(point, BACKWARD, args.sms, args.deterministic))
        plans |= dict.fromkeys(candidates(backward, args.only))
    start = time.monotonic()
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:  # CUDA is not initialised yet
        for line in pool.imap_unordered(_compile, list(plans)):
            print(line, flush=True)
    print(f"{len(plans)} plans in {time.monotonic() - start:.0f} s", flush=True)


def runners(point: points.Point, inputs: Inputs, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(name, prepared contestant or the error that it raised)."""
    device, chosen = inputs.q.device, Sm90Backend.plan
    ours = replace(baselines.CONTESTANTS["ours"], build=baselines.ours("sm90", args.deterministic))

    def build(contestant: baselines.Contestant) -> Any:
        try:
            return Runner(contestant, contestant.build(point, device), inputs)
        except Exception as error:  # another candidate may still run
            return error

    def substitute(backend: Sm90Backend, problem: Problem, candidate: Plan) -> Plan:
        return candidate if problem.direction == BACKWARD else chosen(backend, problem)

    present = BACKEND.plan(problem_of(point, BACKWARD, args.sms, args.deterministic))
    for candidate in candidates(present, args.only):
        api._warm.clear()
        with mock.patch.object(Sm90Backend, "plan", functools.partialmethod(substitute, candidate=candidate)):
            yield named(candidate) + (" (present)" if candidate == present else ""), build(ours)
    api._warm.clear()
    for contestant in baselines.select(args.against) if args.against else ():
        yield contestant.name, build(contestant)


def measure(point: points.Point, args: argparse.Namespace, device: torch.device) -> str:
    inputs = Inputs.draw(point, device, 0)
    exact, ready = inputs.reference(point), {}
    for name, runner in runners(point, inputs, args):
        if isinstance(runner, Exception):
            print(f"  {name}: {reason(runner)[:300]}", flush=True)
            continue
        error, wrong = runner.checked(exact)
        print(f"  {name}: relative error {error:.2e} {wrong}", flush=True)
        if not wrong:
            ready[name] = runner
    times = interleave({name: runner.run for name, runner in ready.items()}, device, args.seconds)
    medians = {name: quantile(each, 0.5) for name, each in times.items()}
    return ", ".join(f"{name} {point.flops / median * 1e-6:.0f}" for name, median in medians.items())


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    chosen = [p for text in args.points.split("+") for p in points.parse(text.strip())]
    compile_all(args, chosen)
    device = torch.device("cuda", torch.cuda.current_device())
    for point in chosen:
        start = time.monotonic()
        said = measure(point, args, device)
        print(f"{point}: {said} ({time.monotonic() - start:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
