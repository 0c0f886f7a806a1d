"""Registers, spills and main loops: `python -m scripts.loop_table perf/results/hopper_plans.csv --into docs/loops.md`.

A table of a CSV of scripts/dump.py, a row a forward Plan. A Plan that writes LSE shares a row with the one that does
not, where all figures are the same.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from perf.model import GPUS, ISSUE_PER_CLOCK, WARP
from perf.report import put_between_marks

Row = dict[str, str]
SHOWN = {"matrix": "HGMMA", "MUFU.EX2": "EX2", **{kind: kind for kind in ("FFMA", "FMUL", "FADD", "FMNMX", "F2FP")}}
HEADS = ("plan", "registers", "spills", "loop", *SHOWN.values(), "others", "a score", "masked",
         "tensor", "EX2 unit", "issue")  # fmt: skip
ROWS, WARPS = 64, 4  # of a warpgroup
K = 16  # of an HGMMA of 16-bit operands


@dataclass(frozen=True)
class Step:
    """What a warpgroup does in one run of a main loop: 64 query rows against a tile of keys."""

    head_dim: int
    head_dim_v: int
    keys: int

    @classmethod
    def of(cls, plan: str) -> Step:
        dims, tile = re.search(r" d=\(?(\d+)(?:,(\d+)\))? ", plan), re.search(r" tile \d+x(\d+) ", plan)
        if dims is None or tile is None:
            raise ValueError(f"{plan!r} names no d=... and no tile MxN")
        return cls(int(dims[1]), int(dims[2] or dims[1]), int(tile[1]))

    @property
    def scores(self) -> int:
        """A thread's."""
        return ROWS * self.keys // (WARPS * WARP)

    @property
    def products(self) -> int:
        """HGMMA instructions of S = Q K^T and of P V."""
        return self.head_dim // K + self.keys // K

    @property
    def tensor_cycles(self) -> int:
        return 2 * ROWS * self.keys * (self.head_dim + self.head_dim_v) // GPUS["H200"].mma_flops[2]


def figures(loops: Sequence[Row]) -> tuple[str, ...]:
    """HEADS from registers on, of a Plan's main loops: of the one without a mask, where there are two, the shorter."""
    step, (loop, *masked) = Step.of(loops[0]["plan"]), sorted(loops, key=lambda row: int(row["loop"]))
    for row in loops:
        if int(row["matrix"]) != step.products:
            raise ValueError(
                f"{row['plan']}: a loop with {row['matrix']} HGMMA, not the {step.products} of one tile of keys"
            )
    size, shown = int(loop["loop"]), [int(loop[name]) for name in SHOWN]
    spills = [int(loop[name]) for name in ("spill_stores", "spill_loads")]
    return (
        f"{loop['registers']} ({loop['setmaxnreg'].replace(' ', ', ')})",
        str(sum(spills)),
        str(size),
        *map(str, shown),
        str(size - sum(shown)),
        f"{size / step.scores:.2f}",
        ", ".join(f"{int(row['loop']) / step.scores:.2f}" for row in masked),
        str(step.tensor_cycles),
        str(int(loop["MUFU.EX2"]) * WARPS * WARP // GPUS["H200"].ex2),
        str(size * WARPS // ISSUE_PER_CLOCK),
    )


def table(rows: Sequence[Row]) -> str:
    """The Markdown table, in the CSV's order of Plans."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for plan, loops in groupby(rows, key=lambda row: row["plan"]):
        alike[plan.replace(" lse", ""), figures(list(loops))].append(plan)
    lines = [HEADS, ("---", *["---:"] * (len(HEADS) - 1))]
    for (_, found), (plan, *others) in alike.items():
        words = plan.split(" ", 3)[3]  # after backend, direction and architecture
        lines.append((f"`{words}`" + (", also lse" if others else ""), *found))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if " forward " in row["plan"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.loop_table", description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--into", type=Path, default=None, help="file with the marks results:NAME of the CSV's name")
    args = parser.parse_args(argv)
    text = table(read(args.csv))
    if args.into is None:
        print(text)
    else:
        put_between_marks(args.into, args.csv.stem, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
