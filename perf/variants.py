"""Plans of the Hopper backward side by side: `python -m perf.variants --points pass=bwd,d=128,S=4096`.

Every plan of tiles.backward_candidates runs as the front door would run it, beside the rivals named, interleaved in one
process as perf/bench.py does (graph replay, L2 flushed, results checked first). Printed, not recorded.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from cute_flash import api
from cute_flash.arch.sm90 import tiles
from cute_flash.arch.sm90.backend import Sm90Backend

from . import baselines, points
from .bench import reason
from .series import Inputs, Runner, interleave, quantile


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.variants", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--points", default="pass=bwd,d=128,mask=causal,S=4096", help="as perf/bench.py; + joins")
    add("--against", default="fa4,cudnn", help="contestants of perf/baselines.py, comma-separated")
    add("--seconds", type=float, default=1.0, help="of the series of each point")
    return parser.parse_args(argv)


def runners(point: points.Point, inputs: Inputs, against: str) -> Iterator[tuple[str, Any]]:
    """(name, prepared contestant or the error that it raised)."""
    device = inputs.q.device
    chosen = Sm90Backend.plan

    def named(plan: Any) -> str:
        return f"{plan.tile} {plan.variant or 'plain'}"

    def build(contestant: baselines.Contestant) -> Any:
        try:
            return Runner(contestant, contestant.build(point, device), inputs)
        except Exception as error:  # another candidate may still run
            return error

    ours = replace(baselines.CONTESTANTS["ours"], build=baselines.ours("sm90"))
    found: dict[str, Any] = {}

    def record(backend: Sm90Backend, problem: Any) -> Any:
        plan = chosen(backend, problem)
        if problem.direction == "backward":
            found["plan"] = plan
        return plan

    def substitute(candidate: Any, backend: Sm90Backend, problem: Any) -> Any:
        return candidate if problem.direction == "backward" else chosen(backend, problem)

    api._warm.clear()
    with mock.patch.object(Sm90Backend, "plan", record):
        present = build(ours)
    yield f"present: {named(found['plan'])}", present
    for candidate in tiles.backward_candidates(found["plan"]):
        if candidate == found["plan"]:
            continue
        api._warm.clear()
        with mock.patch.object(Sm90Backend, "plan", functools.partialmethod(functools.partial(substitute, candidate))):
            yield named(candidate), build(ours)
    api._warm.clear()
    for contestant in baselines.select(against) if against else ():
        yield contestant.name, build(contestant)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    device = torch.device("cuda", torch.cuda.current_device())
    for point in (p for text in args.points.split("+") for p in points.parse(text.strip())):
        inputs = Inputs.draw(point, device, 0)
        exact, ready = inputs.reference(point), {}
        for name, runner in runners(point, inputs, args.against):
            try:
                if isinstance(runner, Exception):
                    raise runner
                error, wrong = runner.checked(exact)
                if wrong:
                    raise ArithmeticError(wrong)
                ready[name] = runner
                print(f"  {name}: relative error {error:.2e}", flush=True)
            except Exception as error:
                print(f"  {name}: {reason(error)[:200]}", flush=True)
        times = interleave({name: runner.run for name, runner in ready.items()}, device, args.seconds)
        rates = {name: point.flops / quantile(each, 0.5) * 1e-6 for name, each in times.items()}
        print(f"{point}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
