"""Where a short decoding step spends its time: cold data, cold code, or neither. `python -m perf.decode_cold`."""

from __future__ import annotations

import statistics

import torch

from .decode import Operands
from .serving import _Captured


def _median(run, before, repeats: int = 60) -> float:
    found = []
    for _ in range(repeats):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found[10:])


def main() -> int:
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    one = torch.zeros(1, device="cuda")
    empty = _Captured(lambda: (one.add_(1),))

    def settle():
        flush[:4096].zero_()
        torch.cuda._sleep(20000)

    def cold():
        flush.zero_()

    floor = [_median(empty.graph.replay, before) for before in (settle, cold)]
    print(f"one tiny kernel: {floor[0]:.1f} us, flushed {floor[1]:.1f}")
    points = (("1x64", (1, 2)), ("1x128", (1, 2)), ("1x1024", (1, 4, 8, 16)), ("1x8192", (16, 32)), ("4x8192", (8,)))
    for point, backend, splits in [(p, b, n) for p, counts in points for b in ("sm90", "triton") for n in counts]:
        batch, seqlen = (int(part) for part in point.split("x"))
        here, there = Operands(batch, seqlen), Operands(batch, seqlen)
        ours, other = (_Captured(x.ours(num_splits=splits, backend=backend)) for x in (here, there))

        def cold_data(other=other):
            flush.zero_()
            other.graph.replay()

        times = [_median(ours.graph.replay, before) for before in (cold, cold_data, settle)]
        rest = f"code warm {times[1]:.1f}, all warm {times[2]:.1f} us"
        print(f"{point} {backend} splits={splits}: cold {times[0]:.1f}, {rest}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
