"""The emulator's page: its programs run as pasted, its numbers are those of the tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import mutation_tables

from . import (
    test_blackwell_backward,
    test_blackwell_forward,
    test_hopper_backward,
    test_hopper_cache,
    test_hopper_forward,
    test_hopper_windows,
)
from .hopper import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "emulator.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run_as_pasted(number, tmp_path):
    """In a file of their own, as the page says; cute_flash.arch is found in a bare tree too."""
    (tmp_path / "program.py").write_text(PROGRAMS[number])
    command = [
        sys.executable,
        "-c",
        "import tests.conftest, runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')",
    ]
    done = subprocess.run([*command, tmp_path / "program.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Counter({" in done.stdout


def test_the_front_door_comes_first():
    assert "cute_flash.emulate(" in PROGRAMS[0] and "cute_flash.attention(" in PROGRAMS[0]


def test_counts_are_those_of_the_tests():
    assert f"Hopper: {len(test_hopper_forward.CELLS)} shapes" in PAGE
    assert f"Blackwell (`sm_100a`, `sm_103a`): {len(test_blackwell_forward.CELLS)} shapes" in PAGE
    assert f"Hopper windows and softcaps: {len(test_hopper_windows.CASES)} shapes" in PAGE
    assert f"Hopper backward: {len(test_hopper_backward.CELLS)} shapes" in PAGE
    assert f"Blackwell backward: {len(test_blackwell_backward.CELLS)} shapes" in PAGE
    assert f"key-value caches: {len(test_hopper_cache.CASES)} cases" in PAGE
    assert len(SCHEDULES) == 12 and "under twelve schedules" in (ROOT / "docs" / "mutation.md").read_text()


@pytest.mark.parametrize("name", ["mutation_sm90", "mutation_sm100", "mutation_sm100_backward"])
def test_the_mutation_tables_are_those_of_the_csv(name):
    page, rows = (
        (ROOT / "docs" / "mutation.md").read_text(),
        mutation_tables.read(ROOT / "perf" / "results" / f"{name}.csv"),
    )
    for marks, text in ((name, mutation_tables.score(rows)), (f"{name}_sites", mutation_tables.sites(rows))):
        assert f"<!-- results:{marks} -->\n{text}\n<!-- /results -->" in page
