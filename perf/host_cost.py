"""What a call costs the host, and what a kernel costs before its first launch: `python -m perf.host_cost`.

Calls: many in a row with no synchronisation inside, then one; median over batches that alternate between contestants.
Kernels: seconds of each variant's first call in a new process with an empty cache, then milliseconds of the same in
another new process that finds them on disk, where importing the compiler extension is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import points

SMALL = points.point(64, "full", 128, batch=1, heads_q=8, heads_kv=8)  # where the launch costs more than the work
CALLS, BATCHES = 100, 61  # few calls a batch: the launch queue (1024 deep, bounded in bytes too) never fills
VARIANTS = ((64, False), (128, False), (128, True), (256, True))  # (head_dim, causal) of the first-launch table
PREPARING = 0.7  # of --time-limit: cases that are not ready by then are left out
# SDPA's graph has guards on divisibility of lengths: new shapes pass the compiler's limit of 8 graphs.
ONE_SHAPE = ("fa2-compiled",)
COLUMNS = ("gpu", "uuid", "date", "commit", "torch", "dsl", "what", "case", "median_us", "p20_us", "p80_us", "of_fa2")
COMPILER = "cutlass"  # the package whose MLIR extension a cached kernel must not need


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.host_cost", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--contestants", default="ours,ours-triton,fa2,fa4,fa3", help="comma-separated names of perf/baselines.py")
    add("--skip-calls", action="store_true", help="only the first-launch table")
    add("--skip-kernels", action="store_true", help="only the cost of a call")
    add("--batches", type=int, default=BATCHES, help="batches of calls of each case")
    add(
        "--patience", type=int, default=30, help="seconds to get a case ready, and for a batch of it (both may compile)"
    )
    add("--time-limit", type=float, default=0.0, help="seconds until the last round of batches starts; 0 = no limit")
    add("--backend", default="", help="backend of the first-launch table; default the dispatcher's choice")
    add("--out", type=Path, default=None, help="JSON file for everything that was measured")
    add("--csv", type=Path, default=None, help="CSV that the calls' rows are appended to")
    add("--commit", default="", help="commit of the code where there is no git")
    add("--dry", action="store_true", help="on the CPU, few calls: tries the script, measures nothing")
    add("--child", choices=("compile", "load"), default="", help=argparse.SUPPRESS)
    add("--cache", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Case:
    """A contestant, with or without gradients, on one shape or on a new (batch, seqlen) each call."""

    contestant: str
    grad: bool
    fresh_shapes: bool

    def __str__(self) -> str:
        words = (
            "requires_grad" if self.grad else "no grad",
            "new shape each call" if self.fresh_shapes else "one shape",
        )
        return f"{self.contestant:12} {words[0]:13} {words[1]:20}"


def operands(case: Case, device: Any, arrange: Callable[[Any], Any], calls: int) -> list[tuple[Any, Any, Any]]:
    """(q, k, v) of each call: bf16, 8 heads, d=64; batch 1 and seqlen 128, or all of them different."""
    import torch

    def draw(batch: int, seqlen: int) -> tuple[Any, Any, Any]:
        shape = (batch, seqlen, SMALL.heads_q, SMALL.head_dim)
        tensors = [torch.randn(shape, device=device, dtype=torch.float32).to(torch.bfloat16) for _ in range(3)]
        q, k, v = (arrange(t).detach().requires_grad_(case.grad) for t in tensors)
        return q, k, v

    if not case.fresh_shapes:
        return [draw(1, SMALL.seqlen_q)] * calls
    return [draw(1 + i % 4, 32 + i // 4) for i in range(calls)]


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spelled_out(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A call with its options written down, as programs have it: a functools.partial merges dictionaries at each call,
    which costs a Python function 0.4 us and a built-in one nothing."""
    if not isinstance(attend, functools.partial) or attend.args:
        return attend
    options = ", ".join(f"{name}=_{name}" for name in attend.keywords)
    names = {f"_{name}": value for name, value in attend.keywords.items()}
    written: Callable[..., Any] = eval(f"lambda q, k, v: call(q, k, v, {options})", {"call": attend.func, **names})
    return written


def prepare_case(case: Case, device: Any, calls: int) -> Callable[[], float]:
    """A function that runs one batch and returns microseconds a call; raises where the contestant cannot run."""
    import torch

    from . import baselines

    contestant = baselines.CONTESTANTS[case.contestant]
    direction = (
        "bwd" if case.grad and case.contestant in ("ours", "ours-compiled") else "fwd"
    )  # no backend of its own is forced on grads
    point = points.point(64, "full", 128, batch=1, heads_q=8, heads_kv=8, direction=direction)
    attend = spelled_out(contestant.build(point, device))
    sets = operands(case, device, contestant.arrange, calls)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def batch() -> float:
        with contestant.context(), torch.set_grad_enabled(case.grad), _quiet_collector():
            wait()
            start = time.perf_counter()
            for q, k, v in sets:
                attend(q, k, v)
            spent = time.perf_counter() - start
            wait()
        return spent / len(sets) * 1e6

    with contestant.context(), torch.set_grad_enabled(case.grad):
        for _ in range(3):  # compile, decide, load: one shape only, so that the first batch still meets new ones
            attend(*sets[0])
    wait()
    return batch


@contextlib.contextmanager
def _patience(seconds: int) -> Iterator[None]:
    """TimeoutError in the main thread once the time is over."""
    if seconds < 1:
        raise TimeoutError("no time left")

    def over(number: int, frame: object) -> None:
        raise TimeoutError(f"not ready in {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _prepare_all(
    cases: Sequence[Case], device: Any, calls: int, allowed: Callable[[], int]
) -> Iterator[tuple[Case, Any]]:
    """(case, its batch) or (case, why it has none), said as they come: a compiler that hangs is seen to."""
    from .bench import reason

    for case in cases:
        start, found = time.perf_counter(), None
        try:
            with _patience(allowed()):
                found = prepare_case(case, device, calls)
        except Exception as error:
            found = reason(error)
        said = found if isinstance(found, str) else "ready"
        print(f"{case} {said} after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        yield case, found


def measure_calls(names: Sequence[str], device: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of (case, first batch, median, 20th and 80th percentile) in microseconds a call."""
    from .bench import reason
    from .series import quantile

    start = time.perf_counter()

    def allowed(share: float = 1.0) -> int:
        """Seconds that the next case or batch may take, of its patience and this share of the limit."""
        left = share * args.time_limit - (time.perf_counter() - start) if args.time_limit else args.patience
        return min(args.patience, int(left))

    calls, batches = (4, 2) if args.dry else (CALLS, args.batches)
    kinds = [(grad, fresh) for grad in (False, True) for fresh in (False, True)]
    cases = [Case(name, *kind) for kind in kinds for name in names if not (kind[1] and name in ONE_SHAPE)]
    made = dict(_prepare_all(cases, device, calls, lambda: allowed(PREPARING)))
    rows: list[dict[str, Any]] = [{"case": str(c), "note": note} for c, note in made.items() if isinstance(note, str)]
    ready = {case: batch for case, batch in made.items() if not isinstance(batch, str)}
    times: dict[Case, list[float]] = {case: [] for case in ready}
    for done in range(batches):
        if done and allowed() < 1:
            break
        for case, batch in list(ready.items()):
            try:
                with _patience(args.patience):
                    times[case].append(batch())
            except Exception as error:  # a compiled one that meets new shapes compiles again, and may not come back
                del ready[case], times[case]
                rows.append({"case": str(case), "note": reason(error)})
    for case, taken in times.items():
        rival = Case("fa2", case.grad, case.fresh_shapes)  # eager, for compiled contestants too
        row: dict[str, Any] = {"case": str(case), "first_batch_us": taken[0], "median_us": quantile(taken, 0.5)}
        row |= {"p20": quantile(taken, 0.2), "p80": quantile(taken, 0.8)}
        if rival in times:
            row["of_fa2"] = row["median_us"] / quantile(times[rival], 0.5)
        rows.append(row)
    return rows


def child(args: argparse.Namespace) -> dict[str, Any]:
    """In a new process: time until each variant's first call has returned, with the cache folder given."""
    import torch
    import tvm_ffi  # noqa: F401  (its import is not part of what is timed)

    device = torch.device("cpu" if args.dry else "cuda")
    shape = (8, 512, 16)  # enough query tiles that no second kernel, the one that splits keys, is needed too
    inputs = {d: [torch.randn(*shape, d, device=device).to(torch.bfloat16) for _ in range(3)] for d, _ in VARIANTS}
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    import cute_flash
    from cute_flash.spec import settings

    taken: dict[str, Any] = {"import cute_flash": time.perf_counter() - start}
    chosen = {"backend": args.backend} if args.backend else {}
    with settings.override(cache_dir=args.cache), torch.no_grad():
        for head_dim, causal in VARIANTS:
            spans = []
            for _ in range(2):
                start = time.perf_counter()
                cute_flash.attention(*inputs[head_dim], causal=causal, **chosen)
                spans.append(time.perf_counter() - start)
                wait()
            taken[f"d={head_dim} {'causal' if causal else 'full'}"] = spans
    if args.child == "load" and COMPILER in sys.modules:
        raise SystemExit(f"{COMPILER} was imported to load kernels from the cache")
    return taken


def measure_kernels(args: argparse.Namespace) -> dict[str, Any]:
    """First-call times of both children; a child that fails is reported by its last line."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for what in ("compile", "load"):
            command = [sys.executable, "-m", "perf.host_cost", "--child", what, "--cache", cache]
            command += ["--backend", args.backend] if args.backend else []
            command += ["--dry"] if args.dry else []
            ran = subprocess.run(command, capture_output=True, text=True)
            lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
            found[what] = json.loads(lines[-1]) if ran.returncode == 0 else {"failed": " / ".join(lines[-3:])}
        found["cache files"] = len([path for path in Path(cache).rglob("*") if path.is_file()])
    return found


def show_calls(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"host cost, {SMALL} (microseconds a call)",
        f"{'':48}{'first':>8}{'median':>8}{'p20':>8}{'p80':>8}{'/fa2':>7}",
    ]
    for row in rows:
        if "note" in row:
            lines.append(f"{row['case']:48}  {row['note']}")
            continue
        cells = "".join(f"{row[name]:8.2f}" for name in ("first_batch_us", "median_us", "p20", "p80"))
        lines.append(f"{row['case']:48}{cells}" + (f"{row['of_fa2']:7.2f}" if "of_fa2" in row else ""))
    return "\n".join(lines)


def show_kernels(found: dict[str, Any]) -> str:
    lines = [
        f"first call of a variant in a new process, then its second call ({found['cache files']} files in the cache)"
    ]
    for what in ("compile", "load"):
        for name, spans in found[what].items():
            if name == "failed":
                lines.append(f"  {what:8} FAILED: {spans}")
            elif isinstance(spans, list):
                lines.append(f"  {what:8} {name:16} {spans[0] * 1e3:10.2f} ms, then {spans[1] * 1e6:8.1f} us")
            else:
                lines.append(f"  {what:8} {name:16} {spans * 1e3:10.2f} ms")
    return "\n".join(lines)


def append_calls(path: Path, facts: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """A line a case that has a number, at one date: the page shows the newest date's."""
    known = {name: facts[name] for name in COLUMNS if name in facts} | {"what": "call"}
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            if "note" in row:
                continue
            of = {"median_us": "median_us", "p20_us": "p20", "p80_us": "p80"}
            numbers = {column: f"{row[name]:.2f}" for column, name in of.items()}
            ratio = f"{row['of_fa2']:.3f}" if "of_fa2" in row else ""
            writer.writerow({**known, "case": " ".join(row["case"].split()), **numbers, "of_fa2": ratio})


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.child:
        print(json.dumps(child(args)))
        return 0
    import torch

    from . import baselines, machine

    names = [contestant.name for contestant in baselines.select(args.contestants)]
    device = torch.device("cpu") if args.dry else torch.device("cuda", torch.cuda.current_device())
    found: dict[str, Any] = {"facts": machine.facts(device, args.commit or machine.commit_here())}
    if not args.skip_calls:
        found["calls"] = measure_calls(names, device, args)
        print(show_calls(found["calls"]), flush=True)
    if not args.skip_kernels:
        found["kernels"] = measure_kernels(args)
        print(show_kernels(found["kernels"]), flush=True)
    if args.csv is not None and "calls" in found:
        append_calls(args.csv, found["facts"], found["calls"])
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
