"""Tables of the mutation score: `python -m scripts.mutation_tables perf/results/NAME.csv --into docs/mutation.md`.

Two tables a CSV of scripts/mutate.py: noticed / total by what was dropped, and by line of the kernel.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from perf.report import put_between_marks

Row = dict[str, str]
TOGETHER = "**all**"


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _share(rows: Sequence[Row]) -> str:
    return f"{sum(row['noticed'] == '1' for row in rows)}/{len(rows)}" if rows else ""


def _table(rows: Sequence[Row], heads: Sequence[str], key: Callable[[Row], tuple[str, ...]]) -> list[list[str]]:
    """A line for each key in order of first appearance, a column for each kernel."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lines = [[*heads, *(f"`{kernel}`" for kernel in kernels)], ["---"] * (len(heads) + len(kernels))]
    for chosen in dict.fromkeys(map(key, rows)):
        mine = [row for row in rows if key(row) == chosen]
        lines.append([*chosen, *(_share([row for row in mine if row["kernel"] == kernel]) for kernel in kernels)])
    return lines


def score(rows: Sequence[Row]) -> str:
    """What was dropped, against kernels."""
    lines = _table(rows, ["dropped"], lambda row: (row["kind"],))
    for row in _table(rows, [""], lambda _: (TOGETHER,))[2:]:
        lines.append([row[0], *(f"**{share}**" for share in row[1:])])
    return "\n".join(map(_line, lines))


def sites(rows: Sequence[Row]) -> str:
    """Lines of the kernel, against kernels; and what was raised."""
    rows = sorted(rows, key=lambda row: (row["python"].split(":")[0], int(row["python"].split(":")[1])))
    lines = _table(rows, ["line", "dropped"], lambda row: (f"`{row['python']}`", row["kind"]))
    lines[0].append("noticed as")
    lines[1].append("---")
    for line in lines[2:]:
        mine = [row for row in rows if (f"`{row['python']}`", row["kind"]) == tuple(line[:2])]
        line.append(", ".join(sorted({row["how"] for row in mine if row["noticed"] == "1"})))
    return "\n".join(map(_line, lines))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutation_tables", description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument(
        "--into", type=Path, default=None, help="file with the marks results:NAME and results:NAME_sites"
    )
    args = parser.parse_args(argv)
    rows = read(args.csv)
    for name, text in ((args.csv.stem, score(rows)), (f"{args.csv.stem}_sites", sites(rows))):
        if args.into is None:
            print(text, end="\n\n")
        else:
            put_between_marks(args.into, name, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
