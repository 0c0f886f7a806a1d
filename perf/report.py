"""Tables, figures and the report page from the CSVs in perf/results.

    python -m perf.report perf/results/hopper_forward.csv --plot docs/figures/hopper_forward.png --into README.md
    python -m perf.report --page perf/report.html

Ratios are taken within one point only: all its contestants ran interleaved in one process on one GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import records

ORDER = ("ours", "ours-deterministic", "ours-triton", "fa3", "fa4", "cudnn", "flex", "fa2")
Table = dict[tuple[str, ...], dict[str, records.Row]]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.report", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("csv", type=Path, nargs="*", help="of perf.bench; a table of their points is printed")
    add("--commit", default="", help="only rows of this commit")
    add("--uuid", default="", help="only rows of this GPU")
    add("--plot", type=Path, default=None, help="write a figure of them (PNG)")
    add("--into", type=Path, default=None, help="replace the text between <!-- results:NAME --> marks of this file")
    add("--name", default="", help="NAME of the marks; default the first CSV's name")
    add("--dims", default="", help="only these head dims in the figure, comma-separated")
    add("--page", type=Path, default=None, help="write everything in perf/results as one HTML page")
    args = parser.parse_args(argv)
    if not args.csv and args.page is None:
        parser.error("nothing to do: name CSVs, or a --page to write")
    return args


def _words(key: Sequence[str]) -> dict[str, str]:
    return dict(zip(records.POINT_COLUMNS, key, strict=True))


def sort_key(key: Sequence[str]) -> tuple[object, ...]:
    point = _words(key)
    return (point["pass"] != "fwd", point["dtype"], int(point["d"]), -int(point["dv"]), point["mask"] != "full",
            point["Hq"] != point["Hkv"], int(point["Sq"]), int(point["B"]))  # fmt: skip


def label(key: Sequence[str]) -> str:
    point = _words(key)
    dims = point["d"] if point["d"] == point["dv"] else f"({point['d']},{point['dv']})"
    heads = point["Hq"] if point["Hq"] == point["Hkv"] else f"{point['Hq']}/{point['Hkv']}"
    length = point["Sq"] if point["Sq"] == point["Sk"] else f"{point['Sq']}/{point['Sk']}"
    return f"{point['pass']} {point['dtype']} d={dims} {point['mask']} S={length} B={point['B']} H={heads}"


def rate(row: records.Row) -> float:
    return float(row["tflops"])


def _time(row: records.Row) -> float:
    return float(row["median_us"])


def ratio_to(contestants: Mapping[str, records.Row], rival: str, who: str = "ours") -> float | None:
    """Time of one rival over ours, in the same process; None where one of them is missing."""
    return _time(contestants[rival]) / _time(contestants[who]) if {who, rival} <= set(contestants) else None


def ratio_to_best_rival(contestants: Mapping[str, records.Row], who: str = "ours") -> float | None:
    """Time of the best rival over ours, in the same process; None where one of them is missing."""
    rivals = [_time(row) for name, row in contestants.items() if not name.startswith("ours")]
    return min(rivals) / _time(contestants[who]) if who in contestants and rivals else None


def present(table: Table) -> list[str]:
    names = {name for contestants in table.values() for name in contestants}
    return [name for name in ORDER if name in names] + sorted(names - set(ORDER))


def _ratios(table: Table) -> list[tuple[tuple[str, ...], float]]:
    return [(key, r) for key, row in table.items() if (r := ratio_to_best_rival(row)) is not None]


def verdict_lines(table: Table) -> list[str]:
    """Ours against the best rival and against each, Triton against FlexAttention: geometric mean and worst point."""
    lines, ratios = [], _ratios(table)
    if ratios:
        worst = min(ratios, key=lambda item: item[1])
        mean = records.geometric_mean([r for _, r in ratios])
        lines.append(f"ours / best rival: geometric mean {mean:.3f} of {len(ratios)} points, "
                     f"worst {worst[1]:.3f} at {label(worst[0])}")  # fmt: skip
    for own in ("ours", "ours-triton"):
        for rival in (name for name in present(table) if not name.startswith("ours")):
            both = [_time(r[rival]) / _time(r[own]) for r in table.values() if own in r and rival in r]
            if both and (own == "ours" or rival == "flex"):
                mean = records.geometric_mean(both)
                lines.append(f"{own} / {rival}: geometric mean {mean:.3f} of {len(both)} points, least {min(both):.3f}")
    return lines


def summary(rows: Sequence[records.Row], keys: Iterable[tuple[str, ...]]) -> str:
    """A narrow text table of the given points: TFLOP/s, ratio of ours to the best rival, and reasons for gaps."""
    wanted = set(keys)
    table = {key: row for key, row in records.measured(rows).items() if key in wanted and row}
    names = present(table)
    lines = [f"{'TFLOP/s':44}" + "".join(f"{name[:9]:>10}" for name in names) + "  ours/best   MHz"]
    for key in sorted(table, key=sort_key):
        cells = [f"{rate(table[key][n]):10.1f}" if n in table[key] else f"{'-':>10}" for n in names]
        ratio = ratio_to_best_rival(table[key])
        clock = next(iter(table[key].values()))["clock_mhz"]
        lines.append(
            f"{label(key):44}" + "".join(cells) + (f"{ratio:11.3f}" if ratio else f"{'-':>11}") + f"{clock:>6}"
        )
    return "\n".join([*lines, *verdict_lines(table), *_reasons(rows, wanted)])


def _reasons(rows: Sequence[records.Row], wanted: set[tuple[str, ...]], most: int = 12) -> list[str]:
    """Each distinct note once, with how many points it concerns."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["note"] and not row["note"].startswith("not asked") and records.point_key(row) in wanted:
            key = (row["contestant"], row["note"][:150])
            counts[key] = counts.get(key, 0) + 1
    lines = [f"  {name} ({count}x): {note}" for (name, note), count in counts.items()]
    return lines[:most] + ([f"  ... and {len(lines) - most} more notes"] if len(lines) > most else [])


def origin(rows: Sequence[records.Row]) -> str:
    """One sentence: GPU, versions, dates and commits of the rows with a number."""
    timed = [{**row, "date": row["date"][:10]} for row in rows if row["median_us"]]

    def values(column: str) -> str:
        return ", ".join(sorted({row[column] for row in timed if row[column]}))

    many = "s" if "," in values("commit") else ""

    versions = sorted({f"{row['contestant']} {row['version']}" for row in timed if row["version"]})
    gpus = len({row["uuid"] for row in timed})
    return (
        f"{values('gpu')} ({gpus} machine{'s' if gpus != 1 else ''}), {values('date')}, "
        f"commit{many} {values('commit')}, torch {values('torch')}, CUDA {values('cuda')}, "
        f"driver {values('driver')}, CuTe-DSL {values('dsl')}; {'; '.join(versions)}."
    )


def markdown(rows: Sequence[records.Row]) -> str:
    """The table of every point with a number; the best of each row is bold."""
    table = {key: row for key, row in records.measured(rows).items() if row}
    names = present(table)
    head = ["pass", "dtype", "d", "mask", "B", "H", "seqlen", *names, "ours / best rival", "MHz"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key in sorted(table, key=sort_key):
        p, contestants = _words(key), table[key]
        best = max(rate(row) for row in contestants.values())
        cells = []
        for name in names:
            value = rate(contestants[name]) if name in contestants else None
            cells.append("" if value is None else f"**{value:.0f}**" if value == best else f"{value:.0f}")
        ratio = ratio_to_best_rival(contestants)
        point = [p["pass"], p["dtype"], p["d"] if p["d"] == p["dv"] else f"({p['d']},{p['dv']})", p["mask"], p["B"]]
        point += [p["Hq"] if p["Hq"] == p["Hkv"] else f"{p['Hq']}/{p['Hkv']}", p["Sq"]]
        clock = next(iter(contestants.values()))["clock_mhz"]
        lines.append("| " + " | ".join([*point, *cells, f"{ratio:.3f}" if ratio else "", clock]) + " |")
    closing = ["The table's numbers are TFLOP/s; ratios are of times.", "", *(f"- {x}" for x in verdict_lines(table))]
    return "\n".join([*lines, "", *closing, "", origin(rows)])


def put_between_marks(path: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- results:name -->` and `<!-- /results -->` in a file."""
    opening, closing, whole = f"<!-- results:{name} -->", "<!-- /results -->", path.read_text()
    if opening not in whole or closing not in whole.split(opening, 1)[1]:
        raise ValueError(f"{path} has no '{opening}' ... '{closing}'")
    before, rest = whole.split(opening, 1)
    path.write_text(f"{before}{opening}\n{text}\n{closing}{rest.split(closing, 1)[1]}")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.page is not None:
        from . import page

        args.page.write_text(page.page(), encoding="utf-8")
    if not args.csv:
        return 0
    rows = [r for r in records.read(args.csv) if args.commit in ("", r["commit"]) and args.uuid in ("", r["uuid"])]
    text = markdown(rows)
    if args.into is not None:
        put_between_marks(args.into, args.name or args.csv[0].stem, text)
    else:
        print(text)
    if args.plot is not None:
        from . import figures

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_bytes(figures.throughput(rows, tuple(filter(None, args.dims.split(",")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
