"""Where a decoding step spends its time: `python -m perf.decode_cold`. Variants of the kernel, and what was cold."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch.nn.attention import SDPBackend

from cute_flash import kvcache
from cute_flash.arch.sm90.backend import BACKEND

from .decode import Operands
from .serving import _Captured

VARIANTS = ("keep", "", "touch", "keep touch")
POINTS = (
    ("1x64", 1, 0), ("1x1024", 8, 0), ("1x8192", 16, 0), ("1x8192", 32, 0), ("4x8192", 4, 0), ("1x32768", 16, 0),
    ("16x1024", 1, 0), ("16x8192", 1, 0), ("64x8192", 1, 0), ("1x8192", 16, 64), ("1x8192", 16, 16),
    ("1x1024", 16, 0), ("1x1024", 4, 0), ("4x8192", 8, 0), ("64x1024", 1, 0), ("16x8192", 2, 0),
)  # fmt: skip


def _medians(runs: dict, befores: dict, repeats: int = 24) -> dict:
    found: dict = {}
    for _ in range(repeats):
        for name, run in runs.items():
            for word, before in befores.items():
                before(name)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run.graph.replay()
                end.record()
                end.synchronize()
                found.setdefault((name, word), []).append(1e3 * begin.elapsed_time(end))
    return {key: statistics.median(times[4:]) for key, times in found.items()}


def main() -> int:
    flush, clean = (torch.zeros(1 << 28, dtype=torch.int8, device="cuda") for _ in range(2))
    one = torch.zeros(1, device="cuda")
    planned = type(BACKEND).plan

    def under(variant, make):
        def plan(self, problem):
            return replace(planned(self, problem), variant=variant)

        with mock.patch.object(type(BACKEND), "plan", plan), mock.patch.object(kvcache, "_warm", {}):
            return _Captured(make())

    def dirty(_):
        flush.zero_()

    def cold(_):
        flush.zero_()
        clean.view(torch.int32).max()

    def warm(_):
        torch.cuda._sleep(20000)

    empty = {"empty": _Captured(lambda: (one.add_(1),))}
    befores = {"dirty": dirty, "clean": cold, "warm": warm}
    print("one tiny kernel", {w: round(t, 1) for (_, w), t in _medians(empty, befores).items()}, flush=True)
    for point, splits, page in POINTS:
        batch, seqlen = (int(part) for part in point.split("x"))
        here, there = Operands(batch, seqlen), Operands(1, seqlen)
        runs = {
            variant: under(variant, partial(here.ours, page, num_splits=splits, backend="sm90")) for variant in VARIANTS
        }
        others = {
            variant: under(variant, partial(there.ours, page, num_splits=splits, backend="sm90"))
            for variant in VARIANTS
        }
        if not page:
            runs["cudnn"], others["cudnn"] = (_Captured(x.sdpa(SDPBackend.CUDNN_ATTENTION)) for x in (here, there))

        def warm_code(name, others=others):
            flush.zero_()
            clean.view(torch.int32).max()
            others[name].graph.replay()

        times = _medians(runs, {**befores, "code": warm_code})
        for name in runs:
            said = ", ".join(f"{word} {times[name, word]:.1f}" for word in ("dirty", "clean", "code", "warm"))
            print(f"{point} splits={splits} page={page} [{name or 'streams'}]: {said}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
