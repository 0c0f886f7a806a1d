"""The CSV: one row per contestant and point, appended at once, so that a table can be taken in slices and resumed."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .points import Point

COLUMNS = (
    *("gpu", "uuid", "date", "commit", "torch", "cuda", "driver", "dsl", "contestant", "version", "plan"),
    *("pass", "dtype", "d", "dv", "mask", "B", "Hq", "Hkv", "Sq", "Sk"),
    *("median_us", "p20", "p80", "tflops", "rel_err", "clock_mhz", "power_w", "runs", "note"),
)
POINT_COLUMNS = ("pass", "dtype", "d", "dv", "mask", "B", "Hq", "Hkv", "Sq", "Sk")
SERIES = "series"  # stands for the contestant where the process broke while all of them ran interleaved
BROKEN = "broken: "  # how the note of a contestant starts that ended or stalled the process at a point
Row = Mapping[str, str]


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows in one write, with the header where the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Every row of the files that exist, in order; a file with other columns is an error."""
    rows: list[dict[str, str]] = []
    for path in paths:
        if not path.exists():
            continue
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is not None and tuple(reader.fieldnames) != COLUMNS:
                raise ValueError(f"{path} has the columns {reader.fieldnames}, expected {COLUMNS}")
            rows.extend(reader)
    return rows


def point_key(row: Row) -> tuple[str, ...]:
    return tuple(row[column] for column in POINT_COLUMNS)


def key_of(point: Point) -> tuple[str, ...]:
    return point_key(point.columns())


def same_run(row: Row, facts: Row, scope: str) -> bool:
    """Does a row count as already taken? scope: "machine" (same GPU and commit), "commit" (any GPU) or "any"."""
    columns = {"machine": ("uuid", "commit"), "commit": ("commit",), "any": ()}[scope]
    return all(row[column] == facts[column] for column in columns)


def done(rows: Sequence[Row], facts: Row, scope: str) -> set[tuple[str, ...]]:
    """Points that need no further run."""
    return {point_key(r) for r in rows if same_run(r, facts, scope) and not r["note"].startswith(BROKEN)}


def broken(rows: Sequence[Row], facts: Row, point: Point) -> list[tuple[str, str]]:
    """(contestant, note) for each time that one ended or stalled the process at this point."""
    mine = (r for r in rows if same_run(r, facts, "machine") and point_key(r) == key_of(point))
    return [(r["contestant"], r["note"]) for r in mine if r["note"].startswith(BROKEN)]


def measured(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[str, Row]]:
    """Point -> contestant -> row with a number, all of one interleaved run: the newest where there were several."""
    table: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if not row["median_us"]:
            continue
        contestants = table.setdefault(point_key(row), {})
        if any(other["uuid"] != row["uuid"] or other["date"] != row["date"] for other in contestants.values()):
            contestants.clear()
        contestants[row["contestant"]] = row
    return table


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else float("nan")
