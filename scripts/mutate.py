"""Mutation score of a kernel's synchronisation, emulated: drop each wait, arrive, barrier and fence in turn.

    python -m scripts.mutate --points d=128,mask=causal [--split] [--out perf/results/mutation_sm90.csv]
    python -m scripts.mutate --backend sm100 --points pass=bwd,d=256,mask=full --launch 2
    python -m scripts.mutate --backend sm100 --points pass=bwd,d=64,mask=causal --deterministic --key-tiles 4

A site counts as noticed when the emulator raises or the result is wrong under one of the schedules. No GPU is needed.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cute_flash import emulator
from cute_flash.emulator.mutate import Outcome, Report, find_sites, score
from cute_flash.spec import settings
from cute_flash.spec.plan import Plan
from perf import points
from scripts import dump

KNOBS = (  # late and eager completion, far-ahead and even warps; the first mostly decides
    {"mode": "late", "scheduler": "priority", "seed": 1},
    {"mode": "random", "scheduler": "random", "seed": 2},
    {"mode": "eager", "scheduler": "priority", "seed": 3},
    {"mode": "late", "scheduler": "round_robin", "seed": 4},
)
STEPS = 400_000  # a mutant that polls for ever gives up here; a whole run takes a tenth
ERROR = 6e-3  # three times a right result's; a tile read too early is off by 1e-1 or more


@dataclass
class Subject:
    """A compiled kernel, its inputs and its right answer; of a forward."""

    kernel: Callable[..., Any]
    operands: tuple[Any, ...]  # q, k, v, out, lse, scale and scratch
    exact: tuple[torch.Tensor, ...]
    arch: str
    main: int = 0  # which launch is scored, counting from 0
    texts: list[str] = field(default_factory=list)  # PTX that ran
    kernels: list[str] = field(default_factory=list)  # entries of it that ran

    def attempt(self, edit: Callable[[str], str], knobs: dict[str, Any]) -> tuple[bool, Any]:
        """Run once: (is the result right, counters of the first launch)."""
        for tensor in self._written():
            tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        with emulator.emulate(self.arch, edit=edit, max_steps=STEPS, strict_exit=True, **knobs) as emulation:
            self.kernel(*self.operands)
        self.kernels = [launch["kernel"] for launch in emulation.launches]
        return self._right(), emulation.launches[self.main]["counters"]

    def _written(self) -> tuple[torch.Tensor, ...]:
        return (*self.operands[3:5], *self.operands[6:])

    def _right(self) -> bool:
        (out, lse), (exact_out, exact_lse) = self.operands[3:5], self.exact
        distance = distance_of(out, exact_out)
        if any(tensor.any() for tensor in self.operands[6:] if not tensor.is_floating_point()):
            return False  # a counter is left as it was found
        return bool(distance < ERROR) and torch.allclose(lse.double(), exact_lse, rtol=1e-6, atol=1e-3)

    def note(self, ptx: str) -> str:
        if ptx not in self.texts:
            self.texts.append(ptx)
        return ptx


@dataclass
class BackwardSubject(Subject):
    """A backward: dO, Q, K, V, O, LSE and its gradient, dQ, dK, dV, scale and scratch; right are the gradients; of a
    deterministic one everything is the same to the bit as at first, float32 sums in scratch too, which rounding hides
    in dQ."""

    deterministic: bool = False
    first: tuple[torch.Tensor, ...] = ()

    def _written(self) -> tuple[torch.Tensor, ...]:
        return (*self.operands[7:10], *self.operands[11:])

    def _right(self) -> bool:
        found = self.operands[7:10]
        if self.deterministic:
            written = [tensor.contiguous().view(torch.uint8) for tensor in self._written()]
            self.first = self.first or tuple(tensor.clone() for tensor in written)
            if not all(torch.equal(*pair) for pair in zip(written, self.first, strict=True)):
                return False
        return all(bool(distance_of(*pair) < ERROR) for pair in zip(found, self.exact, strict=True))


def distance_of(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)


def dense(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float64, one head; 0 and -inf for rows that see no key."""
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape, dtype=torch.bool).triu(scores.shape[1] - scores.shape[0] + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ v[0, :, 0].double())[None, :, None], scores.logsumexp(-1)[None, None]


def prepare(args: argparse.Namespace) -> Subject:
    """Query tiles over several key tiles, the last one partial: every ring wraps, every branch is taken."""
    (point,) = points.parse(args.points)
    backend, plan = dump.plan_of(args, point)
    if not plan.plain:
        raise SystemExit(f"mask={point.mask}: full and causal kernels only")
    if point.direction == "bwd":
        return _prepare_backward(args, point, backend, plan)
    plan = replace(plan, ctas=args.ctas)
    with settings.override(emulate=plan.arch), emulator.emulate(plan.arch):
        kernel = functools.partial(emulator.call, backend.build(plan, "--generate-line-info"))
    rows, keys = args.query_tiles * plan.tile.tile_m, args.key_tiles * plan.tile.tile_n - 3
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, d) for n, d in ((rows, plan.head_dim), (keys, plan.head_dim), (keys, plan.head_dim_v))
    )
    k *= torch.linspace(4, 0.2, keys)[None, :, None, None]  # visited from the last: every tile raises the maximum
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out, lse = torch.empty(1, rows, 1, plan.head_dim_v).bfloat16(), torch.empty(1, 1, rows)
    scratch = ()
    if args.split:
        scratch = (torch.empty(2, 1, 1, rows, plan.head_dim_v), torch.empty(2, 1, 1, rows, 2))
    if plan.draws:
        scratch = (torch.zeros(1, dtype=torch.int32),)
    return Subject(kernel, (q, k, v, out, lse, point.scale, *scratch), dense(q, k, v, point.causal), plan.arch)


def _prepare_backward(args: argparse.Namespace, point: points.Point, backend: Any, plan: Plan) -> Subject:
    """The last tile of queries and that of keys are partial; the kernel after the one for delta is scored, or the one
    that args.launch names."""
    plan = replace(plan, deterministic=args.deterministic)
    with settings.override(emulate=plan.arch), emulator.emulate(plan.arch):
        kernel = functools.partial(emulator.call, backend.build(plan, "--generate-line-info"))
    rows, keys = args.query_tiles * plan.tile.tile_m - 3, args.key_tiles * plan.tile.tile_n - 3
    torch.manual_seed(0)
    widths = plan.head_dim, plan.head_dim, plan.head_dim_v, plan.head_dim_v
    shapes = ((1, n, 1, d) for n, d in zip((rows, keys, keys, rows), widths, strict=True))
    q, k, v, do = (torch.randn(shape).bfloat16() for shape in shapes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, point.causal)
    exact = torch.autograd.grad(out, leaves, do.double())
    grads, rule = [torch.empty_like(x) for x in (q, k, v)], backend.scratch(plan)
    scratch = () if rule is None else (torch.empty(rule.elements(1, 1, rows)),)
    operands = (do, q, k, v, out.detach().bfloat16(), lse.detach().float(), None, *grads, point.scale, *scratch)
    return BackwardSubject(kernel, operands, exact, plan.arch, main=args.launch or 1, deterministic=args.deterministic)


_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


def entry_lines(ptx: str, kernel: str) -> range:
    """The lines of one kernel, of several that a Plan may choose from."""
    starts = {match[1]: n for n, line in enumerate(ptx.split("\n"), 1) if (match := _ENTRY.search(line))}
    after = [n for n in starts.values() if n > starts[kernel]]
    return range(starts[kernel], min(after, default=ptx.count("\n") + 2))


_FILE = re.compile(r"\s*\.file\s+(\d+)\s+\"(?:.*/)?([^/]+/[^/]+)\"")
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")


def places(ptx: str) -> dict[int, str]:
    """PTX line -> `folder/file.py:line` of the Python source, for every line after the first .loc."""
    lines = ptx.split("\n")
    files = dict(match.groups() for match in map(_FILE.match, lines) if match)
    found, now = {}, ""
    for number, line in enumerate(lines, 1):
        if match := _LOC.match(line):
            now = f"{files.get(match[1], '?')}:{match[2]}"
        found[number] = now
    return found


def judge(subject: Subject, kinds: Sequence[str] | None = None, sites: slice = slice(None)) -> Iterator[Outcome]:
    """Every site in turn: an outcome as soon as a schedule notices, or after all of them."""
    unharmed = [subject.attempt(subject.note, knobs) for knobs in KNOBS]
    if not all(right for right, _ in unharmed):
        raise RuntimeError("the kernel is wrong before anything is dropped")
    counters = [c for _, c in unharmed]

    def right_everywhere(edit: Callable[[str], str]) -> bool:
        return all(subject.attempt(edit, knobs)[0] for knobs in KNOBS)

    ran = entry_lines(subject.texts[0], subject.kernels[subject.main])
    for site in [site for site in find_sites(subject.texts[0], kinds) if site.line in ran][sites]:
        yield from score([site], right_everywhere, counters).outcomes


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutate", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", default="sm90")
    add("--points", default="d=128,mask=causal", help="as perf/bench.py (only pass, d, dv and mask matter)")
    add("--split", action="store_true", help="the plan that shares a query tile among CTAs")
    add("--short", action="store_true", help="the plan for sequences of at most SHORT_KEYS keys")
    add("--query-tiles", type=int, default=3)
    add("--key-tiles", type=int, default=4)
    add("--ctas", type=int, default=1, help="that share the query tiles: 1 takes them all in turn")
    add("--launch", type=int, default=0, help="which of a backward's launches is scored; default 1, after delta's")
    add("--deterministic", action="store_true", help="the backward that adds in turn; right are its own bits")
    add("--kinds", default="", help="comma-separated, as in cute_flash/emulator/mutate.py; default all")
    add("--out", type=Path, default=None, help="CSV to append to")
    args = parser.parse_args(argv)
    args.lse, args.capability, args.tile = True, "", ""
    return args


def name_of(args: argparse.Namespace) -> str:
    """Of the kernel that is scored, in a CSV: a Plan may have several, among which the number of key tiles decides."""
    parts = [args.points] + ["split"] * args.split + ["deterministic"] * args.deterministic
    if "pass=bwd" in args.points:
        parts.append(f"key tiles={args.key_tiles}")
    return ",".join(parts + [f"launch={args.launch}"] * bool(args.launch))


COLUMNS = ("kernel", "kind", "python", "line", "site", "noticed", "how", "seconds")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    subject, report = prepare(args), Report()
    name, rows = name_of(args), []
    start = time.process_time()
    for outcome in judge(subject, args.kinds.split(",") if args.kinds else None):
        site, seconds = outcome.site, time.process_time() - start
        report.outcomes.append(outcome)
        where, text = places(subject.texts[0])[site.line], " ".join(site.text.split())
        rows.append((name, site.kind, where, site.line, text, int(outcome.noticed), outcome.how, f"{seconds:.1f}"))
        print(f"{'noticed' if outcome.noticed else 'SURVIVED'} ({outcome.how}): {where} {text}", flush=True)
        start = time.process_time()
    print(report)
    if args.out is not None:
        fresh = not args.out.exists()
        with args.out.open("a", newline="") as file:
            csv.writer(file).writerows([COLUMNS] * fresh + rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
