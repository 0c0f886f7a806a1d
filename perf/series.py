"""One point, all its contestants in this process: prepare each, check the very thing that is timed, then interleave.

On a GPU a contestant is captured once in a CUDA graph; a timed run is one replay between two events, after a memset
that flushes the L2 cache outside of the timed region. Every contestant runs once a round, in an order shuffled each
round, so that clock, power and temperature are shared alike. Without a GPU (`--dry`) a run is an eager call on a wall
clock: that tries the scripts and measures nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import check
from .baselines import Attend, Contestant
from .points import DTYPES, Point

FLUSH_BYTES = 256 * 1024 * 1024  # several times the L2 of any GPU here (H200: 60 MB)
WARM_CALLS = 3
WARM_SECONDS = 0.25  # of interleaved replays before the first timed round, so that the clock has settled
MIN_ROUNDS, MAX_ROUNDS = 15, 400


@dataclass(frozen=True)
class Inputs:
    """Random normal operands in (batch, seqlen, heads, dim); dout only for a backward point."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None

    @staticmethod
    def draw(point: Point, device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device=device).manual_seed(seed)
        dtype = getattr(torch, DTYPES[point.dtype])

        def normal(seqlen: int, heads: int, dim: int) -> Tensor:
            shape = (point.batch, seqlen, heads, dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        q = normal(point.seqlen_q, point.heads_q, point.head_dim)
        k = normal(point.seqlen_k, point.heads_kv, point.head_dim)
        v = normal(point.seqlen_k, point.heads_kv, point.head_dim_v)
        backward = point.direction == "bwd"
        return Inputs(q, k, v, normal(point.seqlen_q, point.heads_q, point.head_dim_v) if backward else None)

    def reference(self, point: Point) -> check.Reference:
        return check.reference(self.q, self.k, self.v, check.Band(point.causal, point.left), point.scale, self.dout)


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Of a call that keeps what it returns. Warm up and capture are on one side stream: autograd runs a backward on its
    forward's stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_CALLS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    torch.cuda.synchronize()
    return graph


class Runner:
    """A prepared contestant: `run()` repeats the timed work, `results()` reads what it wrote."""

    def __init__(self, contestant: Contestant, attend: Attend, inputs: Inputs) -> None:
        self.contestant = contestant
        self._backward = inputs.dout is not None
        leaves = [contestant.arrange(x.detach()) for x in (inputs.q, inputs.k, inputs.v)]
        self._leaves = [x.requires_grad_() for x in leaves] if self._backward else leaves
        self._dout = contestant.arrange(inputs.dout) if inputs.dout is not None else None
        self._attend = attend
        self._out: Tensor | None = None  # of the backward's forward
        self._written: Sequence[Tensor] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self.plan = contestant.plan(attend, (self._leaves[0], self._leaves[1], self._leaves[2]))
        if inputs.q.device.type == "cuda":
            with contestant.context():
                self._graph = capture(self._call)
        else:
            self._call()

    def _call(self) -> None:
        if not self._backward:
            with torch.no_grad():
                self._written = (self._attend(*self._leaves),)
            return
        if self._out is None:
            self._out = self._attend(*self._leaves)
        self._written = torch.autograd.grad(self._out, self._leaves, self._dout, retain_graph=True)

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        with self.contestant.context():
            self._call()

    def checked(self, exact: check.Reference) -> tuple[float, str]:
        """Poison the outputs, run once more, judge every element."""
        if self._graph is not None:
            for tensor in self._written:
                tensor.fill_(float("nan"))
        self.run()
        with torch.no_grad():
            results = tuple(self.contestant.arrange(x.detach()) for x in self._written)
            if not self._backward:
                return check.verdict(results[0], (), exact)
            assert self._out is not None  # set by the first call
            return check.verdict(self._out.detach(), results, exact)


class Stopwatch:
    """Times one run at a time; events are read only after a round has ended."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self._cuda else None

    def round(self, runs: Sequence[Callable[[], None]]) -> list[float]:
        """Microseconds of each run, in the order given."""
        if self._flush is None:
            return [self._wall(run) for run in runs]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs]
        for run, (start, end) in zip(runs, events, strict=True):
            self._flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1000.0 for start, end in events]

    @staticmethod
    def _wall(run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6


def interleave(runs: dict[str, Callable[[], None]], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every run of every contestant: rounds in shuffled order for about `seconds`."""
    watch, order = Stopwatch(device), random.Random(0)
    names = list(runs)
    spent, warm = time.perf_counter(), 0
    while warm < 2 or (device.type == "cuda" and time.perf_counter() - spent < WARM_SECONDS):
        watch.round([runs[name] for name in names])
        warm += 1
    each = (time.perf_counter() - spent) / warm
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / max(each, 1e-6)))) if device.type == "cuda" else 3
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name, microseconds in zip(names, watch.round([runs[name] for name in names]), strict=True):
            times[name].append(microseconds)
    return times


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by linear interpolation."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
