"""Our Hopper forward, emulated, against float64: tile edges, masks, groups, lengths, head dims, splits, hard values.

Every run: half of the cases, each under one schedule, rotating by day. scripts/test --all: each under all of them;
with --emulator-csv perf/results/emulator_hopper_forward.csv, one row a run.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from cute_flash.arch.sm90.tiles import forward_tile
from cute_flash.spec.splits import SPLIT_KEYS

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import Runner
from .hopper import SCHEDULES, SMS, Schedule, attend, way_of_today

TABLE = Path(__file__).resolve().parents[2] / "perf" / "results" / "emulator_hopper_forward.csv"


@dataclass(frozen=True)
class Cell:
    case: Case
    splits: int | None = 1  # CTAs that share a query tile; None = as the front door decides
    sms: int = SMS  # few: a CTA takes several query tiles in turn
    long: bool = False  # the plan for more than SHORT_KEYS keys

    def __str__(self) -> str:
        few = f"-sms{self.sms}" if self.sms != SMS else ""
        plan = "-long" if self.long else ""
        return f"{self.case}-{'ruled' if self.splits is None else f'splits{self.splits}'}{few}{plan}"


def cell(dims, lengths, heads=(1, 1), splits: int | None = 1, sms=SMS, **fields) -> Cell:
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    batch, long = fields.pop("batch", 1), fields.pop("long", False)
    return Cell(Case(batch, *lengths, *heads, *dims, **fields), splits, sms, long)


# Neighbours share a kernel: a process compiles each once. Tiles: 256 x 64 at 64 full, 128 x 128 at 64 and 96 causal, at
# 128 and (192, 128), 192 x 112 at 96 full, 128 x 112 at 192, 128 x 80 at 256; long ones 192 x 128 at 64, 192 x 96 at 96
# causal, and at 128 causal and 192 full part of the softmax is held before the wait for P V.
FULL = (
    cell(64, (1, 1), batch=2),
    cell(64, (63, 65)),
    cell(64, (191, 193)),
    cell(64, (193, 127)),
    cell(64, (64, 513)),  # nine key tiles through a ring of two
    cell(64, (257, 257)),
    cell(64, (255, 63)),
    cell(40, (129, 64), heads=(4, 1)),
    cell(33, (65, 129)),
    cell(64, (65, 191), heads=(2, 1), layout="heads_first", values="outliers"),
    cell(96, (64, 127), heads=(2, 2)),
    cell(80, (193, 129)),
    cell(128, (63, 64)),
    cell(128, (129, 257)),
    cell(128, (1, 1), heads=(7, 1)),
    cell(128, (65, 160), values="very_negative"),
    cell(128, (64, 300), values="huge_score"),
    cell(128, (63, 193), values="constant"),
    cell(192, (65, 113)),
    cell((192, 128), (64, 129)),
    cell(256, (63, 81)),
    cell(256, (64, 241), values="falling"),  # tiles are visited from the last: maxima rise at each
    cell(64, (65, 129), dtype="float16"),
    cell(64, (1, 300), heads=(2, 1)),  # one row a head: the group becomes rows of a tile
    cell(80, (129, 256)),
    cell(128, (200, 50)),
    cell(128, (256, 192)),
)
CAUSAL = (
    cell(64, (129, 129)),
    cell(64, (193, 193)),
    cell(64, (65, 1)),  # 64 rows see no key
    cell(64, (64, 192)),  # the first tile visited is masked whole, for most rows
    cell(40, (127, 65), heads=(7, 1)),
    cell(96, (127, 193)),
    cell(72, (63, 129), heads=(2, 1)),
    cell(128, (127, 127)),
    cell(128, (128, 192)),
    cell(128, (193, 64), heads=(2, 1), batch=2),  # a query tile that sees no key at all
    cell(128, (64, 385), values="falling"),
    cell(128, (191, 191), values="rising"),
    cell(128, (65, 65), heads=(4, 1)),
    cell(128, (129, 129), values="very_negative"),
    cell(192, (129, 129)),
    cell((192, 128), (127, 193)),
    cell(256, (129, 65)),
    cell(256, (65, 193)),
    cell(128, (127, 129), dtype="float16"),
    cell(64, (127, 129), heads=(3, 1)),
    cell(128, (1, 300), heads=(2, 1)),
    cell(128, (256, 192)),
    cell((192, 128), (200, 50)),  # 150 rows see no key
)
LONG_FULL = (
    cell(64, (191, 193), long=True),
    cell(64, (193, 127), long=True),
    cell(64, (64, 513), long=True, values="falling"),
    cell(64, (65, 129), dtype="float16", long=True),
    cell(192, (129, 337), long=True, values="falling"),
)
LONG_CAUSAL = (
    cell(64, (193, 193), long=True),
    cell(64, (64, 192), long=True),
    cell(64, (193, 65), heads=(2, 1), long=True, sms=1),
    cell(96, (191, 97), long=True),
    cell(96, (193, 289), long=True, values="rising"),
    cell(128, (129, 385), long=True, values="falling"),
    cell(128, (193, 193), heads=(2, 1), long=True, sms=1),
    cell(128, (65, 300), long=True, values="huge_score"),
)
SPLIT = (
    cell(64, (1, 300), heads=(7, 1), splits=None, causal=True),
    cell(64, (65, 257), splits=2),
    cell(128, (64, 385), splits=None),
    cell(128, (1, 193), heads=(8, 2), splits=None),
    cell(128, (65, 129), splits=3, values="very_negative"),  # more CTAs than key tiles
    cell(256, (63, 161), splits=2, values="falling"),
)
SPLIT_CAUSAL = (
    cell(128, (129, 300), splits=None),
    cell(128, (129, 257), splits=3),  # query tiles of 2 and 3 key tiles
    cell((192, 128), (65, 193), splits=2),
    cell(64, (193, 65), splits=2),
)


PERSISTENT = (
    cell(128, (257, 193), heads=(2, 1), sms=2),  # six query tiles on two CTAs, there and back
    cell(128, (257, 65), heads=(2, 2), sms=2),  # some of them see no key
    cell(64, (193, 257), heads=(2, 1), sms=1),
)
PERSISTENT_FULL = (cell(128, (129, 257), heads=(2, 1), sms=1), cell(256, (129, 81), batch=2, sms=3))


def causal(cells):
    return tuple(Cell(Case(**{**vars(each.case), "causal": True}), each.splits, each.sms, each.long) for each in cells)


CELLS = (
    FULL
    + LONG_FULL
    + causal(CAUSAL)
    + causal(LONG_CAUSAL)
    + SPLIT
    + causal(SPLIT_CAUSAL)
    + causal(PERSISTENT)
    + PERSISTENT_FULL
)


def schedules():
    """Every cell under every schedule; those whose turn it is not are slow."""
    for index, each in enumerate(CELLS):
        for number, schedule in enumerate(SCHEDULES):
            due = way_of_today(index, 2, len(SCHEDULES)) == number
            yield pytest.param(each, schedule, id=f"{each}-{schedule}", marks=[] if due else [pytest.mark.slow])


def test_at_least_thirty_shapes():
    assert len(set(CELLS)) == len(CELLS) >= 30


@pytest.mark.parametrize("each, schedule", schedules())
def test_right_under_every_schedule(each: Cell, schedule: Schedule, poisoned_empty, record_property):
    case, inputs = each.case, make_inputs(each.case)
    answer = attend(inputs, case.causal, each.splits, sms=each.sms, long=each.long, strict_exit=True, **schedule.knobs)
    exact = oracle.forward(*inputs.qkv, causal=case.causal)
    error, lse_error = oracle.relative_error(answer.out, exact.out), oracle.lse_excess(answer.lse, exact.lse)
    row = (str(each), schedule.mode, schedule.scheduler, schedule.seed, error, lse_error, answer.steps, answer.seconds)
    record_property("emulated", row)
    assert len(answer.kernels) == (2 if expects_split(each) else 1), answer.kernels
    Runner(inputs.q.device, case.torch_dtype).check(*inputs.qkv, result=(answer.out, answer.lse), causal=case.causal)


def expects_split(each: Cell) -> bool:
    """The combine is a launch of its own. The keys of a single tile are not shared out, whatever the rule says."""
    case = each.case
    tile = forward_tile(case.head_dim, case.head_dim_v, "causal" if case.causal else "full", short=not each.long)
    return each.splits != 1 and case.seqlen_k > max(tile.tile_n, SPLIT_KEYS)


@pytest.mark.parametrize("hard", [float("nan"), float("inf"), -float("inf")])
def test_ends_whatever_the_scores(hard):
    """An arrival that waits for probabilities comes for every value of theirs; rows without such scores stay right."""
    inputs = make_inputs(Case(1, 129, 257, 1, 1, 128, 128, True))
    inputs.q[0, 64:, 0, 3] = hard
    answer = attend(inputs, True, 1, long=True, mode="late", scheduler="random", seed=3)
    exact = oracle.forward(*inputs.qkv, causal=True)
    assert oracle.relative_error(answer.out[:, :64], exact.out[:, :64]) < 4e-3
    assert answer.out[:, 64:].isnan().all()


def test_without_lse(poisoned_empty):
    """A kernel of its own: what inference calls."""
    case = Case(1, 65, 129, 2, 1, 64, 64, True)
    inputs = make_inputs(case)
    answer = attend(inputs, True, 1, return_lse=False, mode="late", scheduler="random", seed=4)
    assert answer.lse is None
    assert oracle.relative_error(answer.out, oracle.forward(*inputs.qkv, causal=True).out) < 4e-3


def test_speed():
    """d = 128, causal, one head, 512 tokens: at most 4 s of a core once compiled, races watched (0.7 s when idle)."""
    inputs = make_inputs(Case(1, 512, 512, 1, 1, 128, 128, True))
    assert min(attend(inputs, True, 1, mode="random", scheduler="random", seed=n).seconds for n in range(2)) <= 4


def test_the_table_in_the_tree_holds_every_run():
    """Recorded by scripts/test --all --emulator-csv perf/results/emulator_hopper_forward.csv."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {(row["shape"], row["mode"], row["scheduler"], int(row["seed"])) for row in rows}
    assert names == {(str(each), s.mode, s.scheduler, s.seed) for each in CELLS for s in SCHEDULES}
    assert all(float(row["lse_error"]) <= 1 and float(row["error"]) < 4e-3 for row in rows)
    assert len({(row["date"], row["commit"]) for row in rows}) == 1 and not rows[0]["commit"].endswith("+")
