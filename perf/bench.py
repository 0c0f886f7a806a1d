"""Measure attention against its rivals: `python -m perf.bench --points foundation --out perf/results/foundation.csv`.

Correctness comes first: a contestant whose result is wrong gets a note and no number. perf/README.md has the method;
`--dry` is a try-out on a CPU; perf/report.py makes tables and plots of the CSV.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import points, records, supervise

if TYPE_CHECKING:  # the supervising process starts without torch
    from .check import Reference
    from .series import Inputs, Runner


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--points", default="foundation", help=f"sets ({', '.join(points.SETS)}) or d=128,mask=causal,S=4096; + joins")
    add("--where", default="", help="only points that have these values, such as d=64,mask=causal")
    add("--contestants", default="", help="comma-separated; default all")
    add("--out", type=Path, default=Path("perf/results/bench.csv"), help="CSV that rows are appended to")
    add("--seen", type=Path, action="append", default=[], help="more CSVs whose points count as taken")
    add("--skip", choices=("machine", "commit", "any"), default="machine", help="which earlier rows count as taken")
    add("--again", action="store_true", help="run points that were taken already")
    add("--seconds", type=float, default=1.2, help="time of the interleaved series of one point")
    add("--time-limit", type=float, default=0.0, help="seconds after which no new point starts")
    add("--stall", type=float, default=120.0, help="seconds without progress after which a contestant is given up")
    add("--commit", default="", help="commit of the code where there is no git")
    add("--seed", type=int, default=0, help="of the random inputs")
    add("--dry", action="store_true", help="tiny shapes on the CPU: tries the scripts, measures nothing")
    add("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen_points(args: argparse.Namespace) -> list[points.Point]:
    """The points asked for, without repeats, in order."""
    found: dict[tuple[str, ...], points.Point] = {}
    for text in args.points.split("+"):
        for point in points.parse(text.strip()):
            if points.matches(point, args.where):
                small = point.shrunk() if args.dry else point
                found.setdefault(records.key_of(small), small)
    return list(found.values())


class Worker:
    """Runs points one after the other in this process and appends their rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from . import baselines, machine

        self.args = args
        self.device = torch.device("cpu") if args.dry else torch.device("cuda", torch.cuda.current_device())
        self.facts = machine.facts(self.device, args.commit or machine.commit_here())
        self.meter = machine.Meter(self.device)
        self.contestants = baselines.select(args.contestants)
        self.status = supervise.Status(args.worker) if args.worker else None
        if self.device.type == "cuda":
            rate = machine.matmul_rate(self.device)
            print(f"{self.facts['gpu']} {self.facts['uuid']}: cuBLAS bf16 8192^3 {rate:.0f} TFLOP/s", flush=True)

    def run(self) -> None:
        start, longest, todo = time.monotonic(), 0.0, chosen_points(self.args)
        earlier = records.read([self.args.out, *self.args.seen])
        taken = set() if self.args.again else records.done(earlier, self.facts, self.args.skip)
        for index, point in enumerate(todo):
            if records.key_of(point) in taken:
                continue
            if self.args.time_limit and time.monotonic() - start + longest > self.args.time_limit:
                print(f"time is up before {point} ({index + 1} of {len(todo)})", flush=True)
                return
            began = time.monotonic()
            rows = self.measure(point, records.broken(earlier, self.facts, point))
            records.append(self.args.out, rows)
            self.survive()
            longest = max(longest, time.monotonic() - began)
            self.tell(point, "")
            print(f"[{index + 1}/{len(todo)}] {one_line(point, rows)} ({time.monotonic() - began:.1f} s)", flush=True)
        if self.status is not None:
            self.status.finished()

    def tell(self, point: points.Point, doing: str) -> None:
        """Leave word for the supervisor: who would be to blame if nothing more is heard."""
        if self.status is not None:
            self.status.write({**self.facts, **point.columns(), "contestant": doing})

    def measure(self, point: points.Point, broken: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        """One row for every contestant: its number, or the reason why there is none."""
        from .machine import now
        from .series import Inputs, interleave

        self.facts["date"] = now()
        self.tell(point, "")
        breaks = [note for name, note in broken if name == records.SERIES]
        notes = (
            dict(broken)
            if len(breaks) < 2
            else {c.name: f"the series broke twice: {breaks[-1]}" for c in self.contestants}
        )
        errors: dict[str, float] = {}
        times: dict[str, list[float]] = {}
        climate: dict[str, str] = {}
        inputs = Inputs.draw(point, self.device, self.args.seed)
        exact = inputs.reference(point)
        runners = self.prepare(point, inputs, exact, (notes, errors))
        if breaks:
            self.find_culprit(point, runners)
        if runners:
            self.tell(point, records.SERIES)
            with self.meter.series() as climate:
                times = interleave({n: r.run for n, r in runners.items()}, self.device, self.args.seconds)
        for name, runner in runners.items():
            _, wrong = runner.checked(exact)
            if wrong:
                notes[name] = f"after the series: {wrong}"
        rows = []
        for contestant in self.contestants:
            row = {**self.facts, **point.columns(), "contestant": contestant.name, "version": contestant.version()}
            row["note"] = notes.get(contestant.name, "")
            row["rel_err"] = f"{errors[contestant.name]:.3e}" if contestant.name in errors else ""
            row["plan"] = runners[contestant.name].plan if contestant.name in runners else ""
            if contestant.name in times and not row["note"]:
                row |= numbers(point, times[contestant.name]) | climate
            rows.append(row)
        return rows

    def prepare(
        self, point: points.Point, inputs: Inputs, exact: Reference, found: tuple[dict[str, str], dict[str, float]]
    ) -> dict[str, Runner]:
        """Those that may be timed; found = (notes of the others, errors of all that ran) is added to."""
        from .series import Runner

        runners: dict[str, Runner] = {}
        notes, errors = found
        for contestant in self.contestants:
            name = contestant.name
            if name in point.without:
                notes.setdefault(name, "not asked in this table")
            if name in notes:
                continue
            self.tell(point, name)
            try:
                runner = Runner(contestant, contestant.build(point, self.device), inputs)
                errors[name], wrong = runner.checked(exact)
            except Exception as error:
                notes[name] = reason(error)
                self.survive()
                continue
            if wrong:
                notes[name] = wrong
            else:
                runners[name] = runner
        return runners

    def find_culprit(self, point: points.Point, runners: Mapping[str, Runner], rounds: int = 20) -> None:
        """After a series that broke: one run at a time, so that the supervisor hears who is to blame."""
        for _ in range(rounds):
            for name, runner in runners.items():
                self.tell(point, name)
                runner.run()
                self.survive()

    def survive(self) -> None:
        """Free memory, and go on only if the device still answers: a lost one ends the process."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    """One line that says why a contestant has no number."""
    text = " ".join(str(error).split())
    kind = "" if type(error).__name__ == "Unavailable" else f"{type(error).__name__}: "
    return (kind + text)[:300]


def numbers(point: points.Point, times: Sequence[float]) -> dict[str, str]:
    from .series import quantile

    median = quantile(times, 0.5)
    return {
        "median_us": f"{median:.2f}",
        "p20": f"{quantile(times, 0.2):.2f}",
        "p80": f"{quantile(times, 0.8):.2f}",
        "tflops": f"{point.flops / median * 1e-6:.5g}",
        "runs": str(len(times)),
    }


def one_line(point: points.Point, rows: Sequence[Mapping[str, str]]) -> str:
    """`fwd bf16 d=128 ...: ours 701 fa3 689 ...; no number: cudnn`."""
    timed = [f"{row['contestant']} {float(row['tflops']):.0f}" for row in rows if row.get("tflops")]
    silent = [row["contestant"] for row in rows if not row.get("tflops")]
    clock = next((f" at {row['clock_mhz']} MHz" for row in rows if row.get("clock_mhz")), "")
    return f"{point}: {' '.join(timed) or '-'}{clock}" + (f"; no number: {' '.join(silent)}" if silent else "")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.worker is not None:
        Worker(args).run()
        return 0
    asked = chosen_points(args)
    if not asked:
        print(f"no point of {args.points} has {args.where}", file=sys.stderr)
        return 2
    given = list(sys.argv[1:] if argv is None else argv)
    outcome = supervise.run([sys.executable, "-m", "perf.bench", *given], args.out, args.stall, args.time_limit)
    from . import report

    print()
    print(report.summary(records.read([args.out, *args.seen]), {records.key_of(p) for p in asked}))
    print(json.dumps({"outcome": outcome, "csv": str(args.out)}))
    return 0 if outcome == "finished" else 3


if __name__ == "__main__":
    sys.exit(main())
