"""Our Blackwell backward, emulated, against float64: tile edges, masks, windows, softcaps, groups, lengths, head dims.

Every run: a sixth of the cells, late, under one of three seeds, rotating by day. scripts/test --all: each under every
seed, and in the other modes too.
"""

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch

import cute_flash
from cute_flash.emulator import mutate
from cute_flash.spec import settings

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import ALLOWED_RATIO, TWICE_ROUNDED
from .gradients import (
    EVERY_DAY,
    NAMES,
    SCHEDULES,
    Cell,
    bits,
    cell,
    check,
    check_and_record,
    check_rows_past_the_end,
    gradients,
)
from .hopper import Schedule, turn, way_of_today

ARCH = "sm_100a"
RESULTS = Path(__file__).resolve().parents[2] / "perf" / "results"

# Tiles of 128 keys, and of 128 queries up to head dim 128: dQ has columns of its own up to (64, 128), else it lies over
# dP^T; dO has two slots but for (128, 128) and (128, 96). At 128 pairs of CTAs where key tiles are even or many: see
# tiles.backward_pairs_pay. Beyond, of 64 queries, dQ transposed: (., 129 and up) in one
# kernel, (129 and up, .) in two, the one for dK and dQ with one slot of Q at (256, 256).
CELLS = (
    cell(64, (1, 1), heads=(2, 1)),
    cell(64, (130, 257)),  # two query tiles, three key tiles, one key in the last
    cell(64, (193, 193), causal=True, heads=(2, 1)),
    cell(64, (200, 70), causal=True),  # 130 rows see no key, a query tile of them whole
    cell(64, (513, 127), heads=(2, 2), batch=2),  # five query tiles through rings of two
    cell(32, (129, 128)),
    cell(40, (65, 129), heads=(3, 1), dtype="float16"),
    cell(64, (129, 300), window=(40, 17)),
    cell(64, (300, 900), window=(130, 0)),  # key tiles that nobody sees
    cell(64, (100, 130), softcap=3.0, causal=True, lse_grad=True),
    cell(128, (128, 128)),
    cell(128, (65, 129), batch=2),
    cell(128, (257, 257), causal=True),
    cell(128, (70, 300), causal=True, heads=(4, 2)),
    cell(128, (150, 64), causal=True, lse_grad=True),
    cell(128, (300, 128), heads=(3, 1)),  # nine steps
    cell(128, (129, 200), window=(64, None), softcap=20.0),
    cell(128, (200, 129), dtype="float16", lse_grad=True),
    cell(128, (130, 300), values="falling"),
    cell(128, (130, 300), causal=True, values="outliers"),
    cell(128, (65, 600)),  # pairs: five key tiles, the sixth CTA has none
    cell(104, (260, 500), causal=True, heads=(2, 1)),
    cell(128, (300, 900), window=(130, 20)),
    cell(128, (257, 256), softcap=10.0, dtype="float16", lse_grad=True),
    cell(72, (129, 63), layout="heads_first"),
    cell((64, 128), (65, 191)),
    cell((128, 96), (129, 130)),
    cell(96, (260, 129)),
    cell((96, 64), (129, 100), causal=True, heads=(2, 1)),
    cell(256, (193, 193), causal=True),
    cell(256, (129, 63), heads=(2, 1), dtype="float16"),
    cell(192, (64, 129), window=(None, 20)),
    cell((192, 128), (127, 300), causal=True, heads=(2, 1)),
    cell((40, 136), (70, 200), softcap=5.0, lse_grad=True),
    cell((128, 256), (200, 129)),
    cell((256, 64), (65, 130), window=(40, 9)),
    cell((192, 128), (65, 200), deterministic=True),
    cell(64, (300, 400), window=(70, 30), deterministic=True),  # a query tile's first key tile is not 0
    cell(128, (65, 200), heads=(2, 1), deterministic=True),
)


def schedules():
    """Every cell under every schedule; those whose turn it is not are slow."""
    for index, each in enumerate(CELLS):
        for schedule in SCHEDULES:
            way = way_of_today(index, 6, len(EVERY_DAY))
            marks = [] if way is not None and schedule == EVERY_DAY[way] else [pytest.mark.slow]
            yield pytest.param(each, schedule, id=f"{each}-{schedule}", marks=marks)


def in_rotation(some: tuple):
    """One a day; the others are slow. The three tests that use it share its kernel: compiling is most of their time."""
    for index, each in enumerate(some):
        yield pytest.param(each, id=str(each), marks=[] if index == turn() % len(some) else [pytest.mark.slow])


def in_rotation_under(some: tuple):
    """Each under all schedules; every day, of one, under every second of them."""
    for index, each in enumerate(some):
        yield pytest.param(each, SCHEDULES, id=f"{each}-all", marks=pytest.mark.slow)
        marks = [] if index == turn() % len(some) else [pytest.mark.slow]
        yield pytest.param(each, SCHEDULES[::2], id=f"{each}-half", marks=marks)


def test_at_least_twenty_four_shapes():
    assert len(set(CELLS)) == len(CELLS) >= 24
    assert len(set(RATIOS)) == len(RATIOS) >= 24


@pytest.mark.parametrize("keys, paired", [(128, False), (129, True), (300, False), (513, True)])
def test_pairs_where_both_ctas_mostly_have_keys(keys, paired):
    launches = []
    gradients(cell(128, (1, keys)), Schedule("eager", "round_robin", 0), ARCH, launches=launches)
    products = Counter()
    for launch in launches:
        products += launch["counters"].mma_by_shape
    assert {"2-CTA" in shape for shape in products} == {paired}


@pytest.mark.parametrize("each, schedule", schedules())
def test_right_under_every_schedule(each: Cell, schedule: Schedule, record_property):
    check_and_record(each, schedule, record_property, ARCH)


def recorded(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_in_the_tree_holds_every_run():
    """Recorded by scripts/test --all tests/emulator/test_blackwell_backward.py --gradients-csv FILE, which keeps more
    modes; these are of every day's schedules."""
    rows = recorded("emulator_blackwell_backward.csv")
    runs = {(row["shape"], row["mode"], row["scheduler"], int(row["seed"])) for row in rows}
    every = ((each, schedule) for each in CELLS for schedule in EVERY_DAY)
    assert runs >= {(str(each), s.mode, s.scheduler, s.seed) for each, s in every}
    assert len({row["commit"] for row in rows}) == 1
    peaked = str(cell(128, (130, 300), values="falling"))  # its dQ nearly cancels: judged by its yardstick alone
    assert all(float(row[f"{name}_error"]) < TWICE_ROUNDED for row in rows if row["shape"] != peaked for name in NAMES)


IN_TURN = (  # three additions and more to each element of dQ: two have no order
    cell(64, (65, 385), deterministic=True),
    cell(128, (65, 641), deterministic=True),  # three pairs
    cell(256, (65, 385), deterministic=True),
    cell(64, (200, 385), causal=True, heads=(2, 1), deterministic=True),
)


@pytest.mark.parametrize("each, schedules", in_rotation_under(IN_TURN))
def test_deterministic_gradients_are_the_same_under_every_schedule(each, schedules):
    """dQ is summed in the order of the key tiles, whoever comes first."""
    first, *others = (bits(each, schedule, ARCH) for schedule in schedules)
    assert others and all(torch.equal(first, found) for found in others)


@pytest.mark.parametrize("each", in_rotation(IN_TURN))
def test_sums_of_those_who_do_not_wait_for_their_turn_differ(each):
    def impatient(ptx: str) -> str:
        for site in mutate.find_sites(ptx, ("poll",)):
            ptx = site.drop(ptx)
        return ptx

    sums = (bits(each, schedule, ARCH, edit=impatient) for schedule in SCHEDULES)
    first = next(sums)
    assert not all(torch.equal(first, found) for found in sums)  # the first that differs is enough


@pytest.mark.parametrize("each", in_rotation(IN_TURN))
def test_who_has_not_started_holds_no_turn_that_others_wait_for(each):
    """A GPU busy with something else starts a CTA only when another has ended: here one, or a pair, at a time."""
    check(each, EVERY_DAY[0], ARCH, resident=1)


def shape(dims, causal: bool = False, lengths=(257, 300), heads=(2, 1), **fields) -> Cell:
    """2**15 elements of dQ and more, half as many of dK and dV: two equally good kernels differ by under 5%."""
    return cell(dims, lengths, heads=heads, causal=causal, **fields)


RATIOS = (
    shape(64, True),
    shape(64, False, dtype="float16"),
    shape(96, True),
    shape(96, False),
    shape(128, False),
    shape(128, True, values="outliers"),
    shape((192, 128), True),
    shape((192, 128), False, dtype="float16"),
    shape(256, False),
    shape(256, True),
    shape(64, False, window=(70, 30)),
    shape(128, True, softcap=20.0),
    shape(64, True, (300, 257)),
    shape(64, True, (129, 513), (4, 1)),
    shape(64, True, (256, 255), (2, 2)),
    shape(64, False, (130, 400), (4, 2), dtype="float16"),
    shape(128, False, (256, 256)),  # a pair of CTAs, as where tiles of 128 keys are even or six and more
    shape(128, False, (129, 257), (2, 2)),
    shape(128, False, (130, 512)),
    shape(128, True, (300, 130)),
    shape(128, True, (257, 385)),
    shape((192, 128), True, (130, 300), (3, 1)),
    shape(256, True, (128, 200)),
    shape(256, False, (65, 320)),
)


def ratios():
    """Every run: one of the first two."""
    for index, each in enumerate(RATIOS):
        yield pytest.param(each, id=str(each), marks=[] if index == turn() % 2 else [pytest.mark.slow])


@pytest.mark.parametrize("each", ratios())
def test_error_is_at_most_the_hopper_kernels(each: Cell, record_property):
    ours, theirs = (check(each, EVERY_DAY[0], arch) for arch in (ARCH, "sm_90a"))
    shares = [error / other for error, other in zip(ours, theirs, strict=True)]
    errors = [f"{x:.3e}" for x in (*ours, *theirs)]
    record_property("gradient_ratios", (str(each), *errors, *(f"{x:.3f}" for x in shares)))
    assert all(share <= ALLOWED_RATIO for share in shares), (ours, theirs)


def test_the_recorded_errors_are_at_most_the_hopper_kernels():
    """Recorded by scripts/test --all tests/emulator/test_blackwell_backward.py --ratios-csv FILE."""
    rows = recorded("blackwell_backward_ratios.csv")
    assert {row["shape"] for row in rows} == {str(each) for each in RATIOS}
    for row in rows:
        for name in NAMES:
            assert float(row[f"{name}_blackwell"]) <= ALLOWED_RATIO * float(row[f"{name}_hopper"]), (row["shape"], name)


TRAINED = (
    Case(1, 130, 200, 2, 1, 64, 64, True),
    Case(1, 129, 256, 2, 1, 128, 128),  # pairs of CTAs in both directions
    Case(1, 65, 130, 4, 2, 192, 128, True, window=(70, None)),
    Case(1, 70, 129, 2, 2, 96, 96, softcap=10.0, dtype="float16"),
    Case(1, 65, 200, 2, 1, 256, 256, True),
)


@pytest.mark.parametrize("case", in_rotation(TRAINED))
def test_training_through_the_front_door_gives_the_hopper_gradients(case):
    """attention() pairs forward and backward of one architecture: the same, but for a rounding of O and LSE."""
    inputs, found = make_inputs(case), {}
    for arch in ("sm_90a", ARCH):
        leaves = [x.clone().requires_grad_() for x in inputs.qkv]
        with (
            settings.override(cache_dir=None, backend=None, strict=True),
            cute_flash.emulate(arch, mode="late", seed=1),
        ):
            cute_flash.attention(*leaves, **case.options).backward(inputs.dout)
        found[arch] = [x.grad for x in leaves]
    for ours, theirs in zip(found[ARCH], found["sm_90a"], strict=True):
        assert oracle.relative_error(ours, theirs.double()) < 2e-3


def test_rows_past_the_end_touch_nothing():
    """Values beyond the tensors' true rows are neither read into a result nor written."""
    check_rows_past_the_end(ARCH, 256)
