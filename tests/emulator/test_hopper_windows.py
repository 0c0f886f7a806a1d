"""Our Hopper forward under windows and softcaps, emulated, against float64.

Every run: half of the cases, each under one seed, rotating by day. scripts/test --all: each case under all of them;
with --emulator-csv perf/results/emulator_hopper_windows.csv, one row a run.
"""

import csv
from pathlib import Path

import pytest
import torch

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import Runner
from .hopper import SMS, Schedule, attend, way_of_today

TABLE = Path(__file__).resolve().parents[2] / "perf" / "results" / "emulator_hopper_windows.csv"
SEEDS = (Schedule("random", "random", 1), Schedule("late", "random", 2), Schedule("eager", "priority", 3))


def case(dims, lengths, window=None, heads=(1, 1), **fields) -> Case:
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    return Case(fields.pop("batch", 1), *lengths, *heads, *dims, window=window, **fields)


# Neighbours share a kernel: a process compiles each once. Tiles: 192 x 128 at 64, 128 x 128 at 128, 128 x 80 at 256.
CASES = (
    case(64, (129, 257), (40, 9)),  # narrower than a tile, crossing a tile's edge
    case(64, (65, 400), (5000, 5000)),  # wider than everything
    case(64, (193, 130), (3, 5), heads=(4, 2)),  # 63 rows see no key
    case(64, (129, 64), (32, 64), heads=(2, 1)),  # rows see none on the left
    case(64, (64, 513), (127, 128)),  # at a tile's edges
    case(64, (1, 300), (20, 5), heads=(7, 1), batch=2),
    case(64, (200, 200), (63, 1), values="falling"),
    case(64, (129, 513), (300, 0)),  # sliding: a whole tile between two masked ones
    case(64, (193, 193), (0, 0)),
    case(64, (65, 1), (0, None), causal=True),
    case(64, (1, 257), (128, 0), heads=(8, 2)),  # one row a head, not packed
    case(64, (193, 385), (191, 3), causal=True, values="very_negative"),
    case(128, (130, 300), (60, 0), heads=(2, 1)),
    case(128, (129, 641), (255, 0), values="rising"),  # two whole tiles between masked ones
    case(128, (257, 193), (1, 0), heads=(2, 1)),  # rows that see no key, a query tile of them
    case(128, (65, 260), (0, None)),
    case(128, (193, 65), (128, None), heads=(2, 2)),
    case(128, (64, 321), (129, None), values="huge_score"),
    case(128, (129, 193), (None, 7)),
    case(128, (193, 129), (None, 0)),  # causal by another name
    case(128, (200, 64), (None, 64), heads=(2, 1)),
    case(256, (129, 193), (79, 80)),
    case((192, 128), (65, 300), (100, 0), heads=(4, 2)),
    case(40, (65, 129), (30, 12), heads=(2, 1), dtype="float16"),
    case(64, (129, 130), softcap=5.0, heads=(2, 1), values="large"),
    case(64, (65, 129), softcap=50.0, causal=True, values="large"),
    case(128, (130, 300), (60, 0), softcap=30.0, heads=(2, 1), values="large"),
    case(128, (1, 193), softcap=15.0, causal=True, heads=(4, 1)),
    case(256, (65, 161), softcap=15.0, values="very_negative"),  # every score is -400: tanh is -1
)


def runs():
    """Every case under every seed; those whose turn it is not are slow."""
    for index, each in enumerate(CASES):
        for number, seed in enumerate(SEEDS):
            due = way_of_today(index, 2, len(SEEDS)) == number
            yield pytest.param(each, seed, id=f"{each}-{seed}", marks=[] if due else [pytest.mark.slow])


def test_at_least_twenty_shapes():
    assert len(set(CASES)) == len(CASES) >= 20


@pytest.mark.parametrize("case, seed", runs())
def test_right_under_every_seed(case: Case, seed: Schedule, poisoned_empty, record_property):
    inputs = make_inputs(case)
    bounded = {"window": case.window, "softcap": case.softcap}
    answer = attend(inputs, case.causal, None, strict_exit=True, **bounded, **seed.knobs)
    exact = oracle.forward(*inputs.qkv, **case.options)
    error, lse_error = oracle.relative_error(answer.out, exact.out), oracle.lse_excess(answer.lse, exact.lse)
    row = (str(case), seed.mode, seed.scheduler, seed.seed, error, lse_error, answer.steps, answer.seconds)
    record_property("emulated", row)
    Runner(inputs.q.device, case.torch_dtype).check(*inputs.qkv, result=(answer.out, answer.lse), **case.options)


def test_tiles_outside_a_window_are_not_visited():
    """V is NaN there, and a hidden key's 0 times NaN would show: on both sides, for the tiles nobody sees."""
    inputs = make_inputs(case(64, (64, 640), heads=(2, 1)))
    inputs.v[:, :384] = float("nan")  # diagonals are 576 to 639, keys from 446 on are seen: tiles of 128
    out = attend(inputs, False, 1, window=(130, 0), mode="late", scheduler="random", seed=1).out
    exact = oracle.forward(inputs.q, inputs.k, inputs.v.nan_to_num(0.0), window=(130, 0)).out
    assert oracle.relative_error(out, exact) < 4e-3
    inputs = make_inputs(case(64, (320, 640), heads=(1, 1)))
    inputs.v[:, 512:] = float("nan")
    part = attend(inputs, False, 1, window=(64, 0), mode="late", scheduler="random", seed=1).out[:, :64]
    exact = oracle.forward(inputs.q, inputs.k, inputs.v.nan_to_num(0.0), window=(64, 0)).out[:, :64]
    assert oracle.relative_error(part, exact) < 4e-3


def test_another_window_is_the_same_kernel():
    from cute_flash.runtime import compiler

    inputs = make_inputs(case(64, (65, 130)))
    knobs = {"mode": "late", "scheduler": "random", "seed": 1, "sms": SMS}
    attend(inputs, False, 1, window=(3, 9), **knobs)
    before = compiler.stats.compiles
    for window in ((0, 1), (77, 500)):
        out = attend(inputs, False, 1, window=window, **knobs).out
        assert oracle.relative_error(out, oracle.forward(*inputs.qkv, window=window).out) < 4e-3
    assert compiler.stats.compiles == before
    assert torch.isfinite(out).all()


def test_the_table_in_the_tree_holds_every_run():
    """Recorded by scripts/test --all tests/emulator/test_hopper_windows.py --emulator-csv (see above)."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {(row["shape"], row["mode"], row["scheduler"], int(row["seed"])) for row in rows}
    assert names == {(str(each), s.mode, s.scheduler, s.seed) for each in CASES for s in SEEDS}
    assert all(float(row["lse_error"]) <= 1 and float(row["error"]) < 4e-3 for row in rows)
