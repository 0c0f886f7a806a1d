"""Contests over caches and packed sequences: captured once each, checked, replayed interleaved, rows appended to a CSV.

perf/decode.py and perf/varlen.py ask the questions. A contestant that cannot run, or whose answer is wrong, has a note
in place of a number, as in perf/bench.py; the columns are the same, with decode, varlen-fwd or varlen-bwd as pass.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import check, records
from .bench import reason
from .machine import Meter, commit_here, facts, now
from .series import capture, interleave, quantile

Run = Callable[[], tuple[torch.Tensor, ...]]  # an output, or three gradients
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Entrant:
    make: Callable[[], Run]
    version: str = ""
    ours: bool = False  # of ours only the one called "ours" is held against the rivals
    exact: Callable[[], tuple[torch.Tensor, ...]] | None = None  # where it answers something else


@dataclass(frozen=True)
class Question:
    """A point: what its row says, who answers, what is right, and what a microsecond is worth."""

    columns: Mapping[str, str]  # of records.POINT_COLUMNS
    entrants: Callable[[], Mapping[str, Entrant]]  # operands are drawn when the point's turn comes
    exact: Callable[[], tuple[torch.Tensor, ...]]
    flops: float
    rate: Callable[[float], str] = field(default=lambda us: "")  # for the terminal: "4400 GB/s"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.columns.items())


def parser(module: str, about: str, points: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m perf.{module}", description=about)
    add = made.add_argument
    add("--points", default=points, help="comma-separated")
    add("--contestants", default="", help="comma-separated; default all")
    add("--out", type=Path, default=None, help="CSV that rows are appended to; points that it has are passed over")
    add("--seconds", type=float, default=0.5, help="of each point's series")
    add("--time-limit", type=float, default=0.0, help="seconds after which no new point starts")
    add("--commit", default="", help="commit of the code where there is no git")
    return made


def race(args: argparse.Namespace, questions: Iterable[Question]) -> None:
    """Every question in turn, a line each, then ours over the best rival. Questions hold operands: give an iterator."""
    start, ratios = time.monotonic(), []
    known = facts(DEVICE, args.commit or commit_here())
    taken = records.done(records.read([args.out]), known, "machine") if args.out else set()
    meter = Meter(DEVICE)
    for question in questions:
        if records.point_key(question.columns) in taken:
            continue
        if args.time_limit and time.monotonic() - start > args.time_limit:
            print(f"time is up before {question}", flush=True)
            break
        rows, ratio = _asked(question, {**known, "date": now()}, meter, args)
        if args.out:
            records.append(args.out, rows)
        ratios += [ratio] if ratio else []
        gc.collect()
        torch.cuda.empty_cache()
    if ratios:
        print(
            f"{records.geometric_mean(ratios):.3f} of the best rival over {len(ratios)} points, least {min(ratios):.3f}"
        )


def _asked(
    question: Question, known: Mapping[str, str], meter: Meter, args: argparse.Namespace
) -> tuple[list[dict[str, str]], float]:
    """(a row a contestant, best rival's time over ours or 0)."""
    wanted = [name for name in args.contestants.split(",") if name]
    entrants = {name: e for name, e in question.entrants().items() if not wanted or name in wanted}
    exact = question.exact()
    runners: dict[str, _Captured] = {}
    notes: dict[str, str] = {}
    errors: dict[str, float] = {}
    right = {name: entrant.exact() if entrant.exact else exact for name, entrant in entrants.items()}
    for name, entrant in entrants.items():
        try:
            runners[name] = _Captured(entrant.make())
            errors[name], notes[name] = runners[name].checked(right[name])
        except Exception as error:
            notes[name] = reason(error)
            torch.cuda.synchronize()
        if notes[name]:
            runners.pop(name, None)
    with meter.series() as climate:
        times = (
            interleave({name: r.graph.replay for name, r in runners.items()}, DEVICE, args.seconds) if runners else {}
        )
    for name, runner in runners.items():
        notes[name] = runner.checked(right[name])[1]
    medians = {name: quantile(found, 0.5) for name, found in times.items() if not notes[name]}
    rows = []
    for name, entrant in entrants.items():
        row = {**known, **question.columns, "contestant": name, "version": entrant.version, "note": notes[name]}
        row["rel_err"] = f"{errors[name]:.3e}" if name in errors else ""
        if name in medians:
            row |= {"median_us": f"{medians[name]:.2f}", "runs": str(len(times[name])), **climate}
            row |= {f"p{share}": f"{quantile(times[name], share / 100):.2f}" for share in (20, 80)}
            row["tflops"] = f"{question.flops / medians[name] * 1e-6:.5g}"
        rows.append(row)
    rivals = [t for name, t in medians.items() if not entrants[name].ours]
    ratio = min(rivals) / medians["ours"] if rivals and "ours" in medians else 0.0
    said = "; ".join(f"{name} {t:.1f} us {question.rate(t)}" for name, t in medians.items())
    print(f"{question}: {said}; {ratio:.3f} of the best", flush=True)
    for name, note in notes.items():
        if note:
            print(f"  {name}: {note}", flush=True)
    return rows, ratio


class _Captured:
    """A contestant as a CUDA graph."""

    def __init__(self, run: Run) -> None:
        self.run = run  # what a graph reads must outlive it: the capture of another returns freed memory to the GPU
        self.results: tuple[torch.Tensor, ...] = ()
        self.graph = capture(self._call)

    def _call(self) -> None:
        self.results = self.run()

    def checked(self, exact: tuple[torch.Tensor, ...]) -> tuple[float, str]:
        """Poison the outputs, replay, judge every element."""
        with torch.no_grad():
            for tensor in self.results:
                tensor.fill_(float("nan"))
            self.graph.replay()
            found = tuple(tensor.detach() for tensor in self.results)
            if len(exact) == 1:
                return check.verdict(found[0], (), check.Reference(exact[0], exact[0]))
            return check.verdict(found[0], found, check.Reference(exact[0], exact[0], exact))
