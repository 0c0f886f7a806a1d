"""What a run leaves out has its turn on another day: none of the rotating cases is only in scripts/test --all."""

import pytest

from . import (
    test_blackwell_backward,
    test_blackwell_forward,
    test_hopper_backward,
    test_hopper_cache,
    test_hopper_forward,
    test_hopper_windows,
)
from .gradients import EVERY_DAY

ROTATIONS = {  # (the runs, in how many days, are those that are not late left to --all?)
    "Blackwell forward": (test_blackwell_forward.runs, 36, False),
    "Hopper forward": (test_hopper_forward.schedules, 24, False),
    "Hopper windows": (test_hopper_windows.runs, 6, False),
    "Hopper caches": (lambda: test_hopper_cache.runs(test_hopper_cache.CASES), 6, False),
    "Blackwell backward": (test_blackwell_backward.schedules, 18, True),
    "Hopper backward": (test_hopper_backward.schedules, 9, True),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_every_run_has_its_day(name, monkeypatch):
    runs, days, late = ROTATIONS[name]
    seen = set()
    for day in range(739_000, 739_000 + days):
        monkeypatch.setenv("CUTE_FLASH_TEST_TURN", str(day))
        today = {run.id for run in runs() if not run.marks}
        assert today, day
        seen |= today
    every = {run.id for run in runs()}
    if late:
        every = {run for run in every if run.endswith(tuple(map(str, EVERY_DAY)))}
    assert seen == every
