"""The Blackwell forward is as exact as the Hopper one: both emulated on the same inputs, against float64.

Every run: a third of the shapes, rotating by day. scripts/test --all: all. And of the shapes that the recorded tables
of both have, inputs alike, every one.
"""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import ALLOWED_RATIO
from .hopper import Schedule, attend, turn

RESULTS = Path(__file__).resolve().parents[2] / "perf" / "results"
LATE = Schedule("late", "random", 1)
DIMS = ((40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def shape(dims: tuple[int, int], causal: bool, **fields) -> Case:
    """2**15 output elements and more: two equally good kernels differ by under 5%. Keys end inside a tile; full masks
    from 128 on run in pairs of CTAs, 257 rows being two query tiles of 256 or three of 128."""
    return Case(1, 512 if dims[1] < 64 else 257, 300, 2, 1, *dims, causal=causal, **fields)


CASES = (
    *(shape(dims, causal=index % 2 == 1) for index, dims in enumerate(DIMS)),
    shape((64, 64), False, dtype="float16"),
    shape((128, 128), True, dtype="float16"),
    shape((128, 128), False, values="outliers"),
    shape((64, 64), True, values="falling"),  # every tile raises the maxima
)


def cases():
    for index, each in enumerate(CASES):
        due = (index + turn()) % 3 == 0
        yield pytest.param(each, id=str(each), marks=[] if due else [pytest.mark.slow])


@pytest.mark.parametrize("case", cases())
def test_error_is_at_most_the_hopper_kernels(case: Case, poisoned_empty):
    inputs = make_inputs(case)
    exact = oracle.forward(*inputs.qkv, **case.options)
    errors = {}
    for arch in ("sm_90a", "sm_100a"):
        answer = attend(inputs, case.causal, 1, arch=arch, long=True, **LATE.knobs)
        errors[arch] = oracle.relative_error(answer.out, exact.out)
        assert oracle.lse_excess(answer.lse, exact.lse) <= 1, arch  # within 1e-3
    assert errors["sm_100a"] <= ALLOWED_RATIO * errors["sm_90a"], errors


def recorded(*names: str) -> dict[str, float]:
    """The largest error of every shape, over the schedules; Hopper's names say how keys were shared."""
    worst: dict[str, float] = defaultdict(float)
    for name in names:
        with (RESULTS / name).open(newline="") as file:
            for row in csv.DictReader(file):
                shape = row["shape"].removesuffix("-long").removesuffix("-splits1")
                worst[shape] = max(worst[shape], float(row["error"]))
    return worst


def test_the_recorded_errors_are_at_most_the_hopper_kernels():
    hopper = recorded("emulator_hopper_forward.csv", "emulator_hopper_windows.csv")
    blackwell = recorded("emulator_blackwell_forward.csv")
    for arch in ("sm_100a", "sm_103a"):
        both = [shape for shape in hopper if f"{arch} {shape}" in blackwell]
        assert len(both) >= 40
        ratios = {shape: blackwell[f"{arch} {shape}"] / hopper[shape] for shape in both if hopper[shape] > 0}
        assert max(ratios.values()) <= ALLOWED_RATIO, ratios
