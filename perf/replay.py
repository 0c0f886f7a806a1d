"""Contestants of one point, as closures: captured once each, checked against one another, replayed interleaved."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from .series import FLUSH_BYTES

Run = Callable[[], torch.Tensor]
CLOSE = 2e-2  # relative, of 16-bit outputs from one another: 2^-9 a rounding, some roundings each


class Contest:
    """Of one point. A contestant that cannot run, or whose result differs from the first's, is out, with the reason."""

    def __init__(self, contestants: Mapping[str, Callable[[], Run]]) -> None:
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.out: dict[str, str] = {}
        first = None
        for name, make in contestants.items():
            try:
                graph, result = _captured(make())
            except Exception as error:
                self.out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
                continue
            graph.replay()
            torch.cuda.synchronize()
            value = result.float().flatten()
            first = value if first is None else first
            off = ((value - first).norm() / first.norm()).item()
            if not off <= CLOSE:  # NaN is not
                self.out[name] = f"its result is {off:.2g} off"
                continue
            self.graphs[name] = graph

    def medians(self, seconds: float) -> dict[str, float]:
        """Microseconds of a replay, L2 flushed before each; at least 15 rounds, every contestant once a round."""
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        start, names = time.monotonic(), list(self.graphs)
        rounds = 0
        while rounds < 18 or time.monotonic() - start < seconds:
            random.shuffle(names)
            for name in names:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                self.graphs[name].replay()
                end.record()
                end.synchronize()
                if rounds >= 3:  # until then clocks settle
                    times[name].append(1e3 * begin.elapsed_time(end))
            rounds += 1
        return {name: statistics.median(found) for name, found in times.items()}


def _captured(run: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
