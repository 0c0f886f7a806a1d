"""Bytes that a forward moves: a model recomputed for our tiles, and what a profiler counted beside it.

    python -m perf.traffic                                       # the model alone; no GPU
    python -m perf.traffic --profile perf/results/traffic.csv    # where there are a GPU and Nsight Compute (ncu)

SMs read what the tiles take: Q once, K and V once a query tile. From HBM come Q, K and V once; the rest is L2's. The L2
serves less than the SMs read where several ask for the same line at about the same time, so both are counted: what
arrives at the SMs' side of the crossbar, all of it and what TMA asked for, and what leaves the L2. The standard forward
writes S and P to memory and reads both. Nsight Compute empties the caches before each kernel, so the counts are of a
cold L2; what a kernel wrote last may still lie there when it ends, and is not counted as written to memory.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import points
from .points import Point

SECTOR = 32  # bytes, the unit that the L2 counts in
ELEMENT = 2  # bytes of a bfloat16
ARCH = "9.0"
POINTS = (
    points.point(64, "full", 4096, batch=1),  # 32 heads: the walkthrough of the papers
    points.point(64, "causal", 4096, batch=1),
    points.point(128, "full", 4096, batch=1),
    points.point(128, "causal", 4096, batch=1),
    points.point(128, "full", 16384, batch=1),
)
CONTESTANTS = ("ours", "fa4", "cudnn", "standard")
# Columns of the CSV -> (the profiler's metric, bytes a unit of it).
METRICS = {
    "sm_read_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1),
    "sm_tma_bytes": ("l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum", 1),
    "l2_read_bytes": ("lts__t_sectors_srcunit_tex_op_read.sum", SECTOR),
    "l2_written_bytes": ("lts__t_sectors_srcunit_tex_op_write.sum", SECTOR),
    "hbm_read_bytes": ("dram__bytes_read.sum", 1),
    "hbm_written_bytes": ("dram__bytes_write.sum", 1),
    "time_ns": ("gpu__time_duration.sum", 1),
}
COLUMNS = (
    *("gpu", "uuid", "date", "commit", "torch", "cuda", "driver", "dsl", "contestant", "plan"),
    *("d", "mask", "B", "H", "S", "kernels", *METRICS),
)
MARK = "spin_kernel"  # of torch.cuda._sleep: stands between contestants in the profiler's list of kernels


@dataclass(frozen=True)
class Traffic:
    """Bytes of one forward."""

    sm_read: int
    sm_written: int
    hbm: int  # what must come in and go out once


def _once(point: Point) -> tuple[int, int, int]:
    """Bytes of (Q, K and V, O)."""
    rows_q, rows_k = point.batch * point.heads_q * point.seqlen_q, point.batch * point.heads_kv * point.seqlen_k
    widths = point.head_dim + point.head_dim_v
    return rows_q * point.head_dim * ELEMENT, rows_k * widths * ELEMENT, rows_q * point.head_dim_v * ELEMENT


def keys_read(point: Point, tile_m: int, tile_n: int) -> int:
    """Keys that the query tiles of one head read in all; what a mask hides whole is skipped."""
    if point.left is not None:
        raise ValueError(f"mask {point.mask!r}: the model is of full and causal masks")
    total, shift = 0, point.seqlen_k - point.seqlen_q
    for start in range(0, point.seqlen_q, tile_m):
        seen = point.seqlen_k
        if point.causal:
            seen = min(seen, max(0, start + tile_m + shift))
        total += min(-(-seen // tile_n) * tile_n, point.seqlen_k)
    return total


def tiled(point: Point, tile_m: int, tile_n: int) -> Traffic:
    """Of a forward in tiles of tile_m query rows and tile_n keys."""
    q, kv, o = _once(point)
    row = (point.head_dim + point.head_dim_v) * ELEMENT  # of K and of V
    read = point.batch * point.heads_q * keys_read(point, tile_m, tile_n) * row
    return Traffic(q + read, o, q + kv + o)


def standard(point: Point) -> Traffic:
    """S = QK^T to memory, P = softmax(S) to memory, O = PV: S and P are written once and read once."""
    q, kv, o = _once(point)
    scores = point.batch * point.heads_q * point.seqlen_q * point.seqlen_k * ELEMENT
    return Traffic(q + kv + 2 * scores, o + 2 * scores, q + kv + o + 4 * scores)


def own_tile(point: Point, arch: str = ARCH) -> tuple[int, int, str]:
    """(tile_m, tile_n, the plan) of what the dispatcher runs on that GPU, present or not."""
    import torch

    import cute_flash

    shapes = ((point.seqlen_q, point.heads_q, point.head_dim), (point.seqlen_k, point.heads_kv, point.head_dim),
              (point.seqlen_k, point.heads_kv, point.head_dim_v))  # fmt: skip
    q, k, v = (torch.empty(point.batch, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    plan = cute_flash.explain(q, k, v, arch=arch, causal=point.causal).plan
    if plan.tile is None:
        raise ValueError(f"{plan} has no tile")
    return plan.tile.tile_m, plan.tile.tile_n, str(plan)


def modelled(point: Point) -> tuple[Traffic, Traffic, str]:
    """(ours, standard, our plan) on a Hopper."""
    tile_m, tile_n, plan = own_tile(point)
    return tiled(point, tile_m, tile_n), standard(point), plan


# --------------------------------------------------------------------------------------------------------- profiler


def _calls(point: Point, device: Any) -> dict[str, Callable[[], Any]]:
    """Contestant -> one forward, ready to be run again; those that cannot run are left out, with a word on stderr."""
    import torch

    from . import baselines

    shape = (point.batch, point.seqlen_q, point.heads_q, point.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    heads = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def plain() -> Any:
        scores = heads[0] @ heads[1].transpose(-1, -2)
        return torch.softmax(scores, -1) @ heads[2]

    calls: dict[str, Callable[[], Any]] = {}
    for name in CONTESTANTS:
        try:
            if name == "standard":
                call = plain
            else:
                one = baselines.CONTESTANTS[name]
                attend, inputs = one.build(point, device), [one.arrange(x) for x in (q, k, v)]

                def call(attend: Any = attend, inputs: Any = inputs, context: Any = one.context) -> Any:
                    with context():
                        return attend(*inputs)

            if name == "standard" and point.causal:
                continue
            call()
            calls[name] = call
        except Exception as error:
            print(f"{name} at {point}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return calls


def child(first: int, time_limit: float) -> None:
    """Under the profiler: every contestant once at each point from `first` on, a mark before each; prints the order."""
    import torch

    start = time.perf_counter()
    device = torch.device("cuda")
    cudart = torch.cuda.cudart()
    with torch.no_grad():
        for index, point in list(enumerate(POINTS))[first:]:
            if time_limit and time.perf_counter() - start > time_limit:
                print(f"{point}: left out, {time_limit:.0f} s are over", file=sys.stderr)
                continue
            calls = _calls(point, device)
            torch.cuda.synchronize()
            for name, call in calls.items():
                print(f"RUN {index} {name}", flush=True)
                cudart.cudaProfilerStart()
                torch.cuda._sleep(1000)
                call()
                torch.cuda.synchronize()
                cudart.cudaProfilerStop()


def parse(listing: str, order: Sequence[tuple[int, str]]) -> dict[tuple[int, str], dict[str, int]]:
    """(point, contestant) -> bytes and number of kernels, from the profiler's CSV and the order of the runs."""
    lines = [line for line in listing.splitlines() if line.startswith('"')]
    found: list[dict[str, int]] = []
    for row in csv.DictReader(lines):
        if not row["ID"]:
            continue  # the row of units
        if MARK in row["Kernel Name"]:
            found.append(dict.fromkeys(("kernels", *METRICS), 0))
            continue
        found[-1]["kernels"] += 1
        for column, (metric, unit) in METRICS.items():
            if metric in row:
                found[-1][column] += round(float(row[metric].replace(",", "")) * unit)
    if len(found) != len(order):
        raise ValueError(f"the profiler lists {len(found)} runs, and there were {len(order)}")
    return dict(zip(order, found, strict=True))


def known_metrics() -> str:
    """Those of METRICS that this GPU has, comma-separated; the others are said on stderr."""
    listed = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, check=False).stdout.split()
    missing = [metric for metric, _ in METRICS.values() if metric.rsplit(".", 1)[0] not in listed]
    if missing:
        print(f"not known to this profiler: {', '.join(missing)}", file=sys.stderr)
    return ",".join(metric for metric, _ in METRICS.values() if metric not in missing)


def profile(path: Path, commit: str, first: int, time_limit: float) -> None:
    """Run the child under ncu and append its rows to a CSV."""
    import torch

    from . import machine

    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "ncu.csv"
        command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
                   "--print-units", "base", "--metrics", known_metrics(), "--log-file", str(listing),
                   sys.executable, "-m", "perf.traffic", "--child", "--first", str(first),
                   "--time-limit", str(time_limit)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stderr[-2000:], file=sys.stderr)
        text = listing.read_text() if listing.exists() else ""
    runs = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RUN ")]
    if done.returncode or not runs:
        raise SystemExit(f"ncu ended with {done.returncode} after {len(runs)} runs:\n{text[-2000:]}")
    facts = machine.facts(torch.device("cuda", 0), commit)
    rows = []
    for (index, name), counts in parse(text, [(int(index), name) for index, name in runs]).items():
        point = POINTS[index]
        place = {"d": point.head_dim, "mask": point.mask, "B": point.batch, "H": point.heads_q, "S": point.seqlen_q}
        plan = own_tile(point)[2] if name == "ours" else ""
        rows.append({**facts, "contestant": name, "plan": plan, **place, **counts})
    write(path, rows)


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def measured(path: Path) -> dict[tuple[str, str, str, str], dict[str, str]]:
    """(contestant, d, mask, S) -> the newest row; empty where nothing was profiled."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(r["contestant"], r["d"], r["mask"], r["S"]): r for r in csv.DictReader(file)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.traffic", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, default=None, metavar="CSV", help="count with ncu and append rows")
    parser.add_argument("--commit", default="", help="commit of the code where there is no git")
    parser.add_argument(
        "--time-limit", type=float, default=0.0, help="seconds until the last point starts; 0 = no limit"
    )
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out N points: go on where a run ended")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args.first, args.time_limit)
        return 0
    if args.profile is not None:
        from . import machine

        profile(args.profile, args.commit or machine.commit_here(), args.first, args.time_limit)
    print(f"{'MB a forward':32}{'SMs read':>10}{'HBM':>12}{'standard, HBM':>15}")
    for point in POINTS:
        own, other, plan = modelled(point)
        print(f"{point!s:32}{own.sm_read / 1e6:10.0f}{own.hbm / 1e6:12.1f}{other.hbm / 1e6:15.0f}   {plan}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
