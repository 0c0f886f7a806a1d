"""Our Blackwell forward, emulated, against float64: tile edges, masks, windows, softcaps, groups, lengths, head dims,
splits, hard values.

Every run: a third of the cells on one architecture and one cell on the other, each under one schedule, all rotating by
day. scripts/test --all: each cell under all its schedules on both; with --emulator-csv
perf/results/emulator_blackwell_forward.csv, one row a run.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import Runner
from .hopper import SCHEDULES, Schedule, attend, turn, way_of_today

TABLE = Path(__file__).resolve().parents[2] / "perf" / "results" / "emulator_blackwell_forward.csv"
ARCHES = ("sm_100a", "sm_103a")
EAGER_AND_LATE = tuple(each for each in SCHEDULES if each.mode != "random" and each.seed <= 3)
EVERY_SEED = (Schedule("late", "random", 1), Schedule("eager", "random", 2), Schedule("late", "priority", 3))


@dataclass(frozen=True)
class Cell:
    case: Case
    splits: int | None = 1  # CTAs that share a query tile; None = as the front door decides

    def __str__(self) -> str:
        return str(self.case) if self.splits == 1 else f"{self.case}-splits{self.splits or 'ruled'}"


def case(dims, lengths, heads=(1, 1), batch=1, causal=False, **fields) -> Case:
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    return Case(batch, *lengths, *heads, *dims, causal, **fields)


def causal(dims, lengths, **fields) -> Case:
    return case(dims, lengths, causal=True, **fields)


# Neighbours share a kernel: a process compiles each once. Two query tiles of 128 rows in a CTA up to width_v 128, one
# beyond; 128 keys a step.
CASES = (
    case(64, (1, 1), batch=2),
    case(64, (127, 129)),
    case(64, (129, 127)),
    case(64, (257, 255), heads=(2, 1)),
    case(64, (64, 1025)),  # nine steps through a ring of eight
    case(40, (129, 64), heads=(4, 1)),
    case(64, (65, 191), heads=(2, 1), layout="heads_first", values="outliers"),
    case(96, (64, 127), heads=(2, 2)),
    case(80, (193, 129)),
    case(128, (1, 1), heads=(7, 1)),
    case(128, (128, 128)),
    case(128, (129, 257)),
    case(128, (256, 512)),
    case(128, (65, 160), values="very_negative"),
    case(128, (64, 300), values="huge_score"),
    case(128, (63, 193), values="constant"),
    case(128, (130, 513), values="falling"),  # tiles are visited from the last: maxima rise at each
    case(128, (130, 385), values="rising"),
    case(192, (129, 113)),
    case((192, 128), (257, 129)),
    case(256, (129, 81)),
    case(256, (64, 385), values="falling"),
    case((256, 64), (130, 200)),
    case((64, 256), (130, 200)),
    case(64, (65, 129), dtype="float16"),
    case(128, (129, 200), dtype="float16"),
    causal(64, (129, 129)),
    causal(64, (257, 257)),
    causal(64, (65, 1)),  # 64 rows see no key
    causal(64, (64, 192)),
    causal(40, (127, 65), heads=(7, 1)),
    causal(96, (127, 193)),
    causal(72, (63, 129), heads=(2, 1)),
    causal(128, (127, 127)),
    causal(128, (128, 192)),
    causal(128, (256, 256)),  # the first query tile sits out a step
    causal(128, (256, 320)),  # and here no row of the second sees all of its last one
    causal(128, (513, 130), heads=(2, 1), batch=2),  # query tiles that see no key at all
    causal(128, (300, 513), values="falling"),
    causal(128, (191, 191), values="rising"),
    causal(128, (65, 65), heads=(4, 1)),
    causal(128, (129, 129), values="very_negative"),
    causal(192, (129, 129)),
    causal((192, 128), (257, 300)),
    causal(256, (129, 65)),
    causal(256, (65, 321)),
    causal(128, (257, 129), dtype="float16"),
)


# Under a left bound both query tiles of a CTA visit the first one's tiles; a right one spares the first its last tile.
BOUNDED = (
    case(64, (129, 257), window=(40, 9)),  # narrower than a tile, crossing a tile's edge
    case(64, (65, 400), window=(5000, 5000)),  # wider than everything
    case(64, (193, 130), window=(3, 5), heads=(4, 2)),  # 63 rows see no key
    case(64, (300, 641), window=(127, 128)),  # at a tile's edges
    case(64, (1, 300), window=(20, 5), heads=(7, 1), batch=2),
    case(64, (257, 257), window=(63, 1), values="falling"),
    case(64, (129, 770), window=(300, 0)),  # sliding: a whole tile between two masked ones
    case(64, (257, 257), window=(0, 0)),
    causal(64, (65, 1), window=(0, None)),
    causal(64, (193, 385), window=(191, 3), values="very_negative"),
    case(128, (130, 700), window=(384, 0), values="rising"),  # two whole tiles between masked ones
    case(128, (513, 193), window=(1, 0), heads=(2, 1)),  # rows that see no key, query tiles of them
    case(128, (300, 260), window=(0, None)),
    case(128, (64, 321), window=(129, None), values="huge_score"),
    case(128, (385, 513), window=(None, 7)),
    case(128, (193, 129), window=(None, 0)),  # causal by another name
    case(256, (129, 193), window=(79, 80)),
    case((192, 128), (65, 300), window=(100, 0), heads=(4, 2)),
    case(64, (129, 130), softcap=5.0, heads=(2, 1), values="large"),
    causal(64, (65, 129), softcap=50.0, values="large"),
    case(128, (130, 300), window=(60, 0), softcap=30.0, heads=(2, 1), values="large"),
    case(256, (65, 161), softcap=15.0, values="very_negative"),  # every score is -400: tanh is -1
    case(128, (130, 300), window=(60, 40), softcap=20.0, values="large", dtype="float16"),
)
# Two CTAs that multiply together, 512 query rows (256 where one query tile is all that fits).
PAIRED = (
    case(128, (257, 1)),  # a single row for the second CTA
    case(128, (512, 128), heads=(2, 1)),
    case(128, (300, 257), heads=(4, 2), batch=2),
    case(128, (1030, 65)),  # five query tiles: the sixth CTA has no rows at all
    case(128, (600, 129)),  # three: CTAs work alone
    case(128, (257, 1025)),  # nine steps through a ring of six
    case(128, (511, 385), values="falling"),
    case(128, (385, 385), values="rising"),
    case(128, (400, 160), values="very_negative"),
    case(128, (300, 300), values="huge_score", layout="heads_first"),
    case(100, (258, 129), dtype="float16"),
    case((192, 128), (513, 255)),
    case(192, (200, 385), heads=(2, 1)),
    case(256, (200, 385), values="falling"),
    case(256, (640, 65)),  # five query tiles
    case(256, (129, 127), dtype="float16"),
    case((128, 256), (130, 200)),
    case((256, 128), (129, 300), values="outliers"),
)
# One query tile of 128 rows a CTA, whose keys several CTAs share.
SPLIT = (
    Cell(case(64, (65, 257)), splits=2),
    Cell(causal(64, (129, 700)), splits=4),  # the first query tile has two runs, one of a tile; two CTAs see nothing
    Cell(causal(64, (1, 300), heads=(7, 1)), splits=None),  # one row a head: the group becomes rows of a tile
    Cell(case(128, (64, 385)), splits=None),
    Cell(case(128, (1, 193), heads=(8, 2)), splits=None),
    Cell(case(128, (65, 129), values="very_negative"), splits=3),  # more CTAs than key tiles
    Cell(causal(128, (129, 385), values="falling"), splits=2),
    Cell(causal((192, 128), (65, 200)), splits=2),
    Cell(case(256, (64, 300)), splits=2),
    Cell(case(256, (1, 257), heads=(4, 1), dtype="float16"), splits=3),
)
# A few query rows of grouped heads: those of a group fill one tile, row r being row r // group of head r % group.
PACKED = (
    Cell(causal(64, (3, 300), heads=(8, 2), batch=2)),
    Cell(causal(64, (40, 130), heads=(3, 1)), splits=2),  # 120 rows; the second CTA sees two keys
    Cell(causal(128, (16, 385), heads=(8, 1), values="falling"), splits=3),  # 128 rows
    Cell(case(128, (5, 257), heads=(7, 1)), splits=None),
    Cell(causal(96, (9, 200), heads=(28, 2), layout="heads_first"), splits=None),
    Cell(causal((192, 128), (2, 193), heads=(16, 4)), splits=4),
    Cell(causal(250, (4, 300), heads=(6, 1), dtype="float16"), splits=2),
)
PLAIN = tuple(Cell(each) for each in (*CASES, *PAIRED))
CELLS = (*PLAIN, *(Cell(each) for each in BOUNDED), *SPLIT, *PACKED)


def schedules_of(arch: str, cell: Cell) -> tuple[Schedule, ...]:
    """Kernels for sm_103a differ by one number, the exponentials that go through the FMA pipe; those with bounds or
    splits share every wait with the plain ones. Pairs: three seeds late."""
    if arch == "sm_100a" and cell.case in PAIRED:
        return tuple(each for each in EAGER_AND_LATE if each.mode == "late")
    return EAGER_AND_LATE if arch == "sm_100a" and cell in PLAIN else EVERY_SEED


def runs():
    """Every cell on both architectures under its schedules; those whose turn it is not are slow.

    A day has one architecture, since compiling takes most of the time; one cell shows that the other still runs.
    """
    for arch in ARCHES:
        others_day = ARCHES[turn() % len(ARCHES)] != arch
        for index, cell in enumerate(CELLS):
            ways = schedules_of(arch, cell)
            way = way_of_today(index, 3, len(ways), every=len(ARCHES))
            if others_day:
                way = 0 if index == turn() % len(CELLS) else None
            for number, schedule in enumerate(ways):
                marks = [] if number == way else [pytest.mark.slow]
                yield pytest.param(arch, cell, schedule, id=f"{arch}-{cell}-{schedule}", marks=marks)


def combines(cell: Cell) -> bool:
    """Are there partial results? Merging them is a launch of its own."""
    each = cell.case
    group = each.heads_q // each.heads_kv
    plain = each.window is None and each.softcap is None
    packed = plain and group > 1 and 1 < each.seqlen_q <= 128 // group and each.seqlen_k > 128
    return cell.splits != 1 or packed


def check(cell: Cell | Case, schedule: Schedule, arch: str = "sm_100a", **knobs):
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    each, inputs = cell.case, make_inputs(cell.case)
    bounded = {"window": each.window, "softcap": each.softcap}
    knobs = {**schedule.knobs, **bounded, **knobs}
    answer = attend(inputs, each.causal, cell.splits, arch=arch, strict_exit=True, **knobs)
    result = (answer.out, answer.lse)
    Runner(inputs.q.device, each.torch_dtype).check(*inputs.qkv, result=result, **each.options)
    return answer


def test_at_least_forty_shapes():
    assert len(set(CASES)) == len(CASES) >= 40
    assert len(set(CELLS)) == len(CELLS) >= 95


@pytest.mark.parametrize("arch, cell, schedule", runs())
def test_right_under_every_schedule(arch: str, cell: Cell, schedule: Schedule, poisoned_empty, record_property):
    answer = check(cell, schedule, arch)
    exact = oracle.forward(*make_inputs(cell.case).qkv, **cell.case.options)
    error, lse_error = oracle.relative_error(answer.out, exact.out), oracle.lse_excess(answer.lse, exact.lse)
    named = (f"{arch} {cell}", schedule.mode, schedule.scheduler, schedule.seed)
    record_property("emulated", (*named, error, lse_error, answer.steps, answer.seconds))
    assert len(answer.kernels) == (2 if combines(cell) else 1), answer.kernels


@pytest.mark.parametrize("dims", [64, 128, 192], ids=str)
def test_persistent_ctas_take_several_tiles(dims, poisoned_empty):
    """Two multiprocessors, three work tiles or more: barriers, ring and tensor memory carry over."""
    check(case(dims, (200, 260), heads=(3, 1)), Schedule("late", "random", 5), sms=2)


def seeds():
    """One of them a day; the others are slow."""
    for number, schedule in enumerate(EVERY_SEED):
        due = way_of_today(0, 1, len(EVERY_SEED)) == number
        yield pytest.param(schedule, id=str(schedule), marks=[] if due else [pytest.mark.slow])


@pytest.mark.parametrize("schedule", seeds())
@pytest.mark.parametrize("dims, rows", [(128, 300), ((192, 128), 300), (256, 200)], ids=str)
def test_persistent_pairs_take_several_tiles(dims, rows, schedule, poisoned_empty):
    """Three multiprocessors hold one pair, which takes three units: there and back, as single CTAs do."""
    answer = check(case(dims, (rows, 260), heads=(3, 1)), schedule, sms=3)
    assert multiplies_in_pairs(answer)


def multiplies_in_pairs(answer) -> bool:
    kinds = {"2-CTA" in shape for shape in answer.counters[0].mma_by_shape}
    assert len(kinds) == 1, answer.counters[0].mma_by_shape
    return kinds.pop()


@pytest.mark.parametrize(
    "rows, keys, causal, paired",
    [
        (256, 1, False, False),
        (257, 1, False, True),
        (600, 1, False, False),
        (1025, 1, False, True),
        (257, 1, True, False),
    ],
)
def test_pairs_only_where_both_ctas_mostly_have_rows(rows, keys, causal, paired):
    """An odd number of query tiles leaves a CTA idle: taken from five on, see tiles.PAIR_CYCLES."""
    each = case(128, (rows, keys), causal=causal)
    assert multiplies_in_pairs(check(each, Schedule("eager", "round_robin", 0))) == paired


def test_a_pair_halves_what_shared_memory_gives_for_keys_and_values():
    """Bytes that the products read: Q (A of Q K^T) by each CTA, K and V (B) half by each."""
    answer = check(case(128, (512, 256)), Schedule("eager", "round_robin", 0))
    tiles, operand = 4 * 2, 128 * 128 * 2  # query tiles x key tiles; bytes of 128 rows of Q, K or V
    assert answer.counters[0].mma_shared_read == tiles * (operand + operand // 2 + operand // 2)


def test_tiles_outside_a_window_are_not_visited():
    """V is NaN there, and a hidden key's 0 times NaN would show: on both sides, for the tiles that nobody sees."""
    each = case(64, (64, 900), window=(130, 0))
    inputs = make_inputs(each)
    inputs.v[:, :640] = float("nan")  # diagonals are 836 to 899: keys from 706 on are seen, the tile from 640 on
    answer = attend(inputs, False, 1, arch="sm_100a", window=each.window, **Schedule("late", "random", 1).knobs)
    exact = oracle.forward(inputs.q, inputs.k, inputs.v.nan_to_num(0.0), window=each.window)
    assert oracle.relative_error(answer.out, exact.out) < 4e-3
    inputs = make_inputs(case(64, (512, 900)))
    inputs.v[:, 640:] = float("nan")  # the first query tile's diagonals end at 515, both query tiles' at 643
    answer = attend(inputs, False, 1, arch="sm_100a", window=(64, 0), **Schedule("late", "random", 1).knobs)
    exact = oracle.forward(inputs.q, inputs.k, inputs.v.nan_to_num(0.0), window=(64, 0))
    assert oracle.relative_error(answer.out[:, :128], exact.out[:, :128]) < 4e-3


@pytest.mark.parametrize("hard", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_no_number_shows_in_the_rows_that_see_it(hard, poisoned_empty):
    """Whichever pipe computes its exponential: that of key 6 the FMA pipe does, whose clamp makes NaN a tiny number,
    for the rows from 128 on. A score of -inf weighs nothing."""
    inputs = make_inputs(causal(64, (257, 257)))
    inputs.q.abs_()
    inputs.k[0, 6] = hard
    answer = attend(inputs, True, 1, arch="sm_100a", **Schedule("late", "random", 6).knobs)
    exact = oracle.forward(*inputs.qkv, causal=True)
    right = slice(None) if hard == -float("inf") else slice(6)
    assert oracle.relative_error(answer.out[:, right], exact.out[:, right]) < 4e-3
    assert oracle.lse_excess(answer.lse[..., right], exact.lse[..., right]) <= 1
    if hard != -float("inf"):
        assert answer.out[:, 6:].isnan().all() and answer.lse[..., 6:].isnan().all()


def test_without_lse(poisoned_empty):
    """A kernel of its own: what inference calls."""
    each = causal(64, (65, 129), heads=(2, 1))
    inputs = make_inputs(each)
    knobs = Schedule("late", "random", 4).knobs
    answer = attend(inputs, True, None, return_lse=False, arch="sm_100a", **knobs)
    assert answer.lse is None
    assert oracle.relative_error(answer.out, oracle.forward(*inputs.qkv, causal=True).out) < 4e-3


def test_packed_rows_read_keys_once_a_group():
    """Products of 128 rows: one a KV head and key tile, where heads apart would take one a query head."""
    answer = check(Cell(causal(64, (4, 256), heads=(8, 2))), Schedule("late", "random", 2))
    assert answer.counters[0].mma_by_shape == {"m128n128k16 bf16 SS": 2 * 2 * 4, "m128n64k16 bf16 TS": 2 * 2 * 8}
    apart = check(Cell(causal(64, (65, 256), heads=(8, 2))), Schedule("late", "random", 2))  # 260 rows of a group
    assert len(apart.kernels) == 1


def rescaled_share(each: Case) -> float:
    """Of the warps' chances to rescale O, how many were taken: told by what was stored to tensor memory."""
    answer = check(each, Schedule("eager", "round_robin", 0))
    steps = -(-each.seqlen_k // 128)
    warps = 4 * 2 * -(-each.seqlen_q // 256) * each.batch * each.heads_q
    row = 32 * 4  # bytes of one column of a warp's rows
    products = (each.head_dim // 16) * 128 + 8 * each.head_dim_v  # accumulator columns that matrix products write
    always = warps * steps * row * (64 + products)  # 64: P
    return (answer.counters[0].tmem_written - always) / (warps * (steps - 1) * row * each.head_dim_v)


@pytest.mark.parametrize("dims", [64, 128], ids=str)
def test_most_rescales_are_skipped_on_normal_inputs(dims):
    """A warp rescales in the first steps and then hardly ever: see SETTLED in softmax.py."""
    assert rescaled_share(case(dims, (256, 1024))) <= 0.3
    assert rescaled_share(case(dims, (256, 4096))) <= 0.1


def test_rising_maxima_are_rescaled():
    assert rescaled_share(case(64, (256, 512), values="falling")) >= 0.5


def test_the_table_in_the_tree_holds_every_run():
    """Recorded by scripts/test --all tests/emulator/test_blackwell_forward.py --emulator-csv FILE."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {(row["shape"], row["mode"], row["scheduler"], int(row["seed"])) for row in rows}
    every = ((arch, cell, s) for arch in ARCHES for cell in CELLS for s in schedules_of(arch, cell))
    assert names == {(f"{arch} {cell}", s.mode, s.scheduler, s.seed) for arch, cell, s in every}
    assert all(float(row["lse_error"]) <= 1 and float(row["error"]) < 4e-3 for row in rows)
