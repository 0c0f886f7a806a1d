"""The table of docs/loops.md is that of its CSV, and the CSV has every plan of the Hopper forward's table."""

import csv
from pathlib import Path

import pytest

from perf import points
from scripts import dump, loop_table

ROOT = Path(__file__).resolve().parents[2]
CSV = ROOT / "perf" / "results" / "hopper_plans.csv"
SMALL = "sm90 forward sm_90a bfloat16 d=(64,32) causal tile 128x32 stages=2"  # 4 + 2 HGMMA, 16 scores a thread


def row(plan: str, loop: int, **more: int) -> dict[str, str]:
    counts = dict.fromkeys(dump.COLUMNS, 0) | {"matrix": 6, "MUFU.EX2": 18, "FFMA": 20, "others": 56, "loop": loop}
    given = {name: str(count) for name, count in (counts | more).items()}
    return {**given, "plan": plan, "registers": "168", "setmaxnreg": "24 240"}


def test_the_table_is_that_of_the_csv():
    text = loop_table.table(loop_table.read(CSV))
    assert f"<!-- results:{CSV.stem} -->\n{text}\n<!-- /results -->" in (ROOT / "docs" / "loops.md").read_text()


def test_the_csv_has_the_plans_of_the_forward_table():
    wanted = {
        str(dump.plan_of(dump.arguments(words), point)[1])
        for words in ([], ["--lse"])
        for point in points.SETS["hopper-forward"]
    }
    assert {each["plan"] for each in loop_table.read(CSV)} == wanted


def test_no_plan_of_the_table_spills():
    spilling = [r["plan"] for r in loop_table.read(CSV) if (r["spill_stores"], r["spill_loads"]) != ("0", "0")]
    assert not spilling


def test_a_row_says_what_a_step_costs():
    """The shorter loop is the one without a mask. HGMMA: 2 * 64 * 32 * 96 FLOP; EX2: 18 of 4 warps at 16 a cycle."""
    found = loop_table.figures([row(SMALL, 160), row(SMALL, 100, spill_stores=1, spill_loads=2)])
    named = dict(zip(loop_table.HEADS[1:], found, strict=True))
    assert named["registers"] == "168 (24, 240)" and named["spills"] == "3"
    assert (named["loop"], named["HGMMA"], named["EX2"], named["FFMA"], named["others"]) == (
        "100",
        "6",
        "18",
        "20",
        "56",
    )
    assert (named["a score"], named["masked"]) == ("6.25", "10.00")
    assert (named["tensor"], named["EX2 unit"], named["issue"]) == ("96", "144", "100")


def test_a_loop_of_two_steps_is_refused():
    with pytest.raises(ValueError, match="a loop with 12 HGMMA, not the 6 of one tile of keys"):
        loop_table.figures([row(SMALL, 100, matrix=12)])


def test_lse_shares_a_row_where_all_is_the_same():
    plain, same, other = row(SMALL, 100), row(f"{SMALL} lse", 100), row(f"{SMALL} lse", 101)
    assert len(loop_table.table([plain, same]).splitlines()) == 3
    assert "`, also lse |" in loop_table.table([plain, same])
    assert len(loop_table.table([plain, other]).splitlines()) == 4


def test_rows_of_other_plans_stay(tmp_path):
    path, at = tmp_path / "plans.csv", dump.COLUMNS.index("plan")

    def made(plan: str, day: str) -> tuple:
        return (day, *("" if name != "plan" else plan for name in dump.COLUMNS[1:]))

    dump.write(path, [made("a", "old"), made("b", "old"), made("b", "old")])
    dump.write(path, [made("b", "new"), made("c", "new")])
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == dump.COLUMNS
    assert [(r[0], r[at]) for r in rows] == [("old", "a"), ("new", "b"), ("new", "c")]
    path.write_text("date,plan\n")
    with pytest.raises(SystemExit, match="has columns"):
        dump.write(path, [made("a", "new")])
