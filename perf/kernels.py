"""Where a point's time goes: python -m perf.kernels --points pass=bwd,d=128,mask=causal,S=512. Microseconds a kernel."""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch

from . import baselines, points
from .series import FLUSH_BYTES, Inputs, Runner


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", default="pass=bwd,d=128,mask=causal,S=512")
    parser.add_argument("--contestants", default="ours,fa4")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    for point in (p for text in args.points.split("+") for p in points.parse(text)):
        inputs = Inputs.draw(point, device, 0)
        for contestant in baselines.select(args.contestants):
            runner = Runner(contestant, contestant.build(point, device), inputs)
            for _ in range(20):
                runner.run()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(args.rounds):
                    flush.zero_()
                    runner.run()
                torch.cuda.synchronize()
            spans = defaultdict(list)
            events = sorted(
                (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA),
                key=lambda e: e.time_range.start,
            )
            gaps, last = defaultdict(list), None
            for event in events:
                spans[event.name[:90]].append(event.time_range.elapsed_us())
                if last is not None:
                    gaps[event.name[:90]].append(event.time_range.start - last)
                last = event.time_range.end
            print(point, contestant.name, flush=True)
            for name, times in spans.items():
                middle = sorted(times)[len(times) // 2]
                gap = sorted(gaps[name])[len(gaps[name]) // 2] if gaps[name] else 0.0
                print(f"  {middle:9.1f} us x{len(times) // args.rounds} after a gap of {gap:6.1f}  {name}", flush=True)


if __name__ == "__main__":
    main()
