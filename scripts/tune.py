"""Find tuning rows: `python -m scripts.tune --backend triton --points d=128,mask=causal,S=4096` on the GPU to tune for.

Every candidate is built, its result checked, then all that are right run interleaved (perf/series.py); the fastest few
run again for longer. Printed last: a table, and rows for the backend's tiles.py with the measurement they rest on.

A row of the Hopper forward is a tile and a schedule: `--backend sm90 --tile-m 128 --tile-n 112,128 --votes 0,1
--late 0,1 --ahead 0,2,16 --draws 0,1 --jobs 16`. What is not named stays as the present row has it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from cute_flash import arch
from cute_flash.runtime import compiler
from cute_flash.spec.device import Device, describe
from cute_flash.spec.mask import Mask
from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import BACKWARD, FORWARD, SHORT_KEYS, Problem
from perf import check, points
from perf.bench import reason
from perf.series import Inputs, interleave, quantile

AXES = ("tile_m", "tile_n", "stages", "warps")  # of a Tile, tried by default
SCHEDULE = ("votes", "late", "ahead")  # of a Tile too, where they are named
GRIDS = {  # backend -> values tried of (tile_m, tile_n, stages, warps)
    "triton": ((64, 128), (32, 64, 128), (1, 2, 3, 4), (4, 8)),
    "sm90": ((128, 192), (64, 80, 96, 112, 128, 144, 160, 176), (2, 3), (0,)),
    "sm100": ((128,), (64, 96, 128), (2, 3), (0,)),
}
FINALISTS = 5
SIMULATED = Device("cuda", 0, "simulated", (9, 0), 132)  # for --dry: plans as for Hopper, tensors on the CPU


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.tune", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", choices=sorted(GRIDS), required=True)
    add("--points", default="d=128,mask=causal,S=4096", help="as perf/bench.py; + joins")
    add("--where", default="", help="only points that have these values")
    for name in AXES:
        add(f"--{name.replace('_', '-')}", default="", help="comma-separated values instead of the grid's")
    for name in (*SCHEDULE, "draws"):
        add(f"--{name.replace('_', '-')}", default="", help="comma-separated values; default: the present row's")
    add("--lse", action="store_true", help="tune the forward that also writes LSE, as training runs it")
    add("--seconds", type=float, default=1.0, help="of the final series of each point")
    add("--jobs", type=int, default=1, help="processes that compile ahead into the disk caches")
    add(
        "--dry", action="store_true", help="tiny shapes on the CPU (Triton: under TRITON_INTERPRET=1), nothing measured"
    )
    add("--share", default="", help=argparse.SUPPRESS)  # "i/n": compile only every n-th candidate from the i-th
    return parser.parse_args(argv)


def candidates(args: argparse.Namespace, plan: Plan) -> list[Plan]:
    """What the backend holds worth measuring; the grid where values were given or the backend says nothing."""
    present = plan.tile or Tile(0, 0)

    def asked(name: str, default: tuple) -> tuple:
        given = getattr(args, name)
        return tuple(type(default[0])(int(value)) for value in given.split(",")) if given else default

    tiles = importlib.import_module(f"cute_flash.arch.{args.backend}.tiles")
    if hasattr(tiles, "candidates") and not any(getattr(args, name) for name in AXES):
        grid = list(tiles.candidates(plan))
    else:
        axes = [asked(name, default) for name, default in zip(AXES, GRIDS[args.backend], strict=True)]
        grid = [replace(present, **dict(zip(AXES, axis, strict=True))) for axis in itertools.product(*axes)]
    schedules = [asked(name, (getattr(present, name),)) for name in SCHEDULE]
    return [
        replace(plan, tile=replace(tile, **dict(zip(SCHEDULE, schedule, strict=True))), draws=draws)
        for tile, schedule, draws in itertools.product(
            grid, itertools.product(*schedules), asked("draws", (plan.draws,))
        )
    ]


def named(plan: Plan) -> str:
    return f"{plan.tile} warps={plan.tile.warps if plan.tile else 0}" + (" drawn" if plan.draws else "")


@dataclass(frozen=True)
class Bench:
    """One point with its operands and the answer that a candidate must give."""

    point: points.Point
    inputs: Inputs
    exact: check.Reference
    plan: Plan  # the backend's present choice
    backend: Any

    @staticmethod
    def open(args: argparse.Namespace, point: points.Point) -> Bench:
        device = torch.device("cpu") if args.dry else torch.device("cuda", torch.cuda.current_device())
        backend = next(b for b in arch.BACKENDS if b.name == args.backend)
        problem = Problem(
            direction=BACKWARD if point.direction == "bwd" else FORWARD,
            device=SIMULATED if args.dry else describe(device),
            dtype=points.DTYPES[point.dtype],
            head_dim=point.head_dim,
            head_dim_v=point.head_dim_v,
            heads_q=point.heads_q,
            heads_kv=point.heads_kv,
            mask=Mask(left=point.left is not None, right=point.causal, causal=point.causal),
            lse=args.lse or point.direction == "bwd",
            short=point.seqlen_k <= SHORT_KEYS,
        )
        problem = replace(problem, small=point.direction == "fwd" and point.rows <= problem.small_rows)
        if refusals := backend.refuse(problem):
            raise SystemExit(f"{args.backend} refuses {problem}: {'; '.join(refusals)}")
        inputs = Inputs.draw(point, device, seed=0)
        return Bench(point, inputs, inputs.reference(point), backend.plan(problem), backend)

    def candidate(self, plan: Plan) -> tuple[Callable[[], None], tuple[torch.Tensor, ...]]:
        """(launch, what it writes) of one plan, compiled."""
        i, numbers = self.inputs, self.point.numbers
        kernel = compiler.kernel_for(self.backend, plan).kernel
        if plan.draws:
            numbers = (*numbers, torch.zeros(1, dtype=torch.int32, device=i.q.device))
        lse = self.exact.lse.to(torch.float32).contiguous()
        if i.dout is None:
            out = i.q.new_empty(*i.q.shape[:3], self.point.head_dim_v)
            written = torch.empty_like(lse) if plan.lse else None
            return (lambda: kernel(i.q, i.k, i.v, out, written, *numbers)), (out,)
        out, grads = self.exact.out.to(i.q.dtype), tuple(torch.empty_like(x) for x in (i.q, i.k, i.v))
        return (lambda: kernel(i.dout, i.q, i.k, i.v, out, lse, None, *grads, *numbers)), grads

    def checked(self, plan: Plan) -> Callable[[], None]:
        """The candidate's run, captured on a GPU; raises where its result is wrong."""
        launch, written = self.candidate(plan)
        launch()
        run = launch
        if self.inputs.q.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
            run = graph.replay
        for tensor in written:
            tensor.fill_(float("nan"))
        run()
        backward = self.inputs.dout is not None
        _, wrong = check.verdict(written[0], written if backward else (), self.exact)
        if wrong:
            raise ArithmeticError(wrong)
        return run


def compile_ahead(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Fill the disk caches from several processes; failures are met again, and told, by the process that measures."""
    command = [sys.executable, "-m", "scripts.tune", *argv]
    shares = [[*command, "--share", f"{i}/{args.jobs}"] for i in range(args.jobs)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for worker in [subprocess.Popen(share, **quiet) for share in shares]:  # type: ignore[call-overload]
        worker.wait()


def compile_share(bench: Bench, plans: Sequence[Plan], share: str) -> None:
    first, step = (int(number) for number in share.split("/"))
    for plan in plans[first::step]:
        try:
            bench.candidate(plan)[0]()
        except Exception as error:
            print(f"{plan}: {reason(error)}", flush=True)


def tune(bench: Bench, plans: Sequence[Plan], seconds: float) -> list[tuple[Plan, float]]:
    """(plan, median microseconds) of all that are right, fastest first."""
    runs: dict[str, Callable[[], None]] = {}
    by_name = {named(plan): plan for plan in plans}
    for name, plan in by_name.items():
        try:
            runs[name] = bench.checked(plan)
        except Exception as error:
            print(f"  {name}: {reason(error)[:150]}", flush=True)
    if not runs:
        return []
    device = bench.inputs.q.device
    first = {name: quantile(times, 0.5) for name, times in interleave(runs, device, seconds / 2).items()}
    best = sorted(first, key=first.__getitem__)[:FINALISTS]
    final = {n: quantile(t, 0.5) for n, t in interleave({n: runs[n] for n in best}, device, seconds).items()}
    ranked = sorted({**first, **final}.items(), key=lambda item: (item[0] not in final, item[1]))
    return [(by_name[name], median) for name, median in ranked]


def spelled(tile: Tile | None) -> str:
    """As a row has it: what differs from a Tile's defaults."""
    if tile is None:
        return "None"
    shown = (f for f in fields(tile) if f.name in AXES or getattr(tile, f.name) != f.default)
    return f"Tile({', '.join(f'{f.name}={getattr(tile, f.name)}' for f in shown)})"


def show(bench: Bench, ranked: Sequence[tuple[Plan, float]]) -> str:
    """The table of one point and the row it suggests."""
    point = bench.point
    lines = [f"{point}: {len(ranked)} candidates are right; at present {named(bench.plan)}"]
    for plan, median in ranked:
        mark = "  <- present" if plan == bench.plan else ""
        lines.append(f"  {named(plan):40} {median:10.1f} us {point.flops / median * 1e-6:7.1f} TFLOP/s{mark}")
    if ranked:
        (plan, median), runner_up = ranked[0], ranked[min(1, len(ranked) - 1)]
        name = torch.cuda.get_device_name() if bench.inputs.q.is_cuda else "CPU, not a measurement"
        lines.append(
            f"  row: ({plan.head_dim}, {plan.head_dim_v}, {point.mask!r}): {spelled(plan.tile)},  "
            f"# {name}, {datetime.date.today()}{', drawn' if plan.draws else ''}: "
            f"{point.flops / median * 1e-6:.0f} TFLOP/s at {point}; "
            f"next {named(runner_up[0])} {point.flops / runner_up[1] * 1e-6:.0f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments(given)
    if args.jobs > 1 and not args.share:
        compile_ahead(args, given)
    chosen = [p for text in args.points.split("+") for p in points.parse(text.strip()) if points.matches(p, args.where)]
    for point in chosen:
        bench = Bench.open(args, point.shrunk() if args.dry else point)
        plans = candidates(args, bench.plan)
        if args.share:
            compile_share(bench, plans, args.share)
            continue
        print(show(bench, tune(bench, plans, args.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
