"""Blackwell Plans compile for sm_100a and sm_103a with no GPU; spills are failures.

Every pair of widths under every mask, with and without a softcap; architecture, dtype, LSE or its gradient, and
`deterministic` go around, so that not every combination of these is met.

Every run: two plans of each direction and a fortieth of all, rotating by day. scripts/test --all: all.
"""

import csv
import itertools
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cute_flash.arch.sm100 import tiles
from cute_flash.arch.sm100.backend import ARCHES, BACKEND
from cute_flash.arch.sm100.grad.memory import BackwardShape
from cute_flash.arch.sm100.grad.schedule import HALVES, REGISTERS
from cute_flash.arch.sm100.schedule import BUDGETS, ROWS, WARPGROUP
from cute_flash.spec.device import imagined
from cute_flash.spec.mask import CAUSAL, FULL, Mask
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem

from ..emulator.hopper import turn
from .test_hopper_compile import REGISTER_FILE, compile_and_report

RESULTS = Path(__file__).resolve().parents[2] / "perf" / "results"
PAIRS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (64, 128), (192, 192), (256, 256), (64, 256), (256, 64)]
WINDOWS = (Mask(left=True), Mask(right=True), Mask(left=True, right=True), Mask(left=True, right=True, causal=True))
VARIANTS = tuple(itertools.product(ARCHES, ("bfloat16", "float16"), (False, True)))  # capability, dtype, LSE
SLICES = 40


def plan(head_dims, mask: Mask, capability=(10, 0), dtype: str = "bfloat16", lse: bool = True, softcap=False) -> Plan:
    features, device = frozenset({"softcap"} if softcap else ()), imagined(capability, "imagined")
    problem = Problem(FORWARD, device, dtype, *head_dims, heads_q=8, heads_kv=2, mask=mask, lse=lse, features=features)
    return BACKEND.plan(problem)


def rotated(kinds):
    """A plan for every pair of head dims and kind, (mask, softcap); what else there is goes around."""
    for index, (dims, (mask, softcap)) in enumerate(itertools.product(PAIRS, kinds)):
        yield plan(dims, mask, *VARIANTS[index % len(VARIANTS)], softcap=softcap)


COMMON = [plan((128, 128), CAUSAL), plan((64, 64), FULL, (10, 3))]
PLAIN = [plan(dims, mask, *each) for dims in PAIRS for mask in (FULL, CAUSAL) for each in VARIANTS]
BOUNDED = [*rotated(itertools.product(WINDOWS, (False, True))), *rotated(((FULL, True), (CAUSAL, True)))]
SPLIT = [BACKEND.split(each) for each in rotated(((FULL, False), (CAUSAL, False)))]
PACKED = [BACKEND.pack(each) for each in rotated(((FULL, False), (CAUSAL, False)))]
EVERY = [*PLAIN, *BOUNDED, *SPLIT, *PACKED]


def backward(head_dims, mask: Mask, capability=(10, 0), dtype: str = "bfloat16", more=(False, False), softcap=False):
    """more: (gradient through LSE, deterministic)."""
    features, device = frozenset({"softcap"} if softcap else ()), imagined(capability, "imagined")
    fields = {"lse": True, "lse_grad": more[0], "deterministic": more[1], "features": features}
    return BACKEND.plan(Problem(BACKWARD, device, dtype, *head_dims, heads_q=8, heads_kv=2, mask=mask, **fields))


MORE = tuple(itertools.product(ARCHES, ("bfloat16", "float16"), ((False, False), (True, False), (False, True))))
BACKWARD_PAIRS = [(d, d_v) for d in (32, 64, 96, 128, 256) for d_v in (32, 64, 96, 128, 192, 256)]
BACKWARD_KINDS = tuple(itertools.product((FULL, CAUSAL, *WINDOWS), (False, True)))  # mask, softcap
COMMON_BACKWARD = [backward((128, 128), CAUSAL), backward((64, 64), FULL, (10, 3))]
EVERY_BACKWARD = [
    *(backward((d, d), mask, *each) for d in (64, 128, 256) for mask in (FULL, CAUSAL) for each in MORE),
    *(
        backward(dims, mask, *MORE[index % len(MORE)], softcap=softcap)
        for index, (dims, (mask, softcap)) in enumerate(itertools.product(BACKWARD_PAIRS, BACKWARD_KINDS))
    ),
    *(  # both at once: one concerns the kernel before, the other the main one
        backward((d, d), mask, tuple(ARCHES)[index % 2], "bfloat16", (True, True))
        for index, (d, mask) in enumerate(itertools.product((64, 128, 256), (FULL, CAUSAL)))
    ),
]
EVERY_BACKWARD = list(dict.fromkeys(EVERY_BACKWARD))


def every_plan():
    for index, each in enumerate([*EVERY, *EVERY_BACKWARD]):
        due = (index + turn()) % SLICES == 0
        yield pytest.param(each, id=str(each), marks=[] if due else [pytest.mark.slow])


@pytest.mark.parametrize("chosen", [*COMMON, *COMMON_BACKWARD], ids=str)
def test_common_plans_compile_without_spills(chosen, capfd, record_property):
    compile_and_report(BACKEND, chosen, capfd, record_property)


@pytest.mark.parametrize("chosen", every_plan())
def test_every_plan_compiles_without_spills(chosen, capfd, record_property):
    compile_and_report(BACKEND, chosen, capfd, record_property)


def test_plans_are_told_apart():
    every = [*EVERY, *EVERY_BACKWARD]
    assert len({each.key() for each in every}) == len(every)


@pytest.mark.parametrize(
    "name, every", [("blackwell_plans.csv", EVERY), ("blackwell_backward_plans.csv", EVERY_BACKWARD)]
)
def test_the_table_in_the_tree_holds_every_plan(name, every):
    """Recorded by scripts/test --all tests/host/test_blackwell_compile.py -k every_plan --plans-csv FILE."""
    with (RESULTS / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["plan"] for row in rows) == sorted(map(str, every))
    assert all(int(row["spill_bytes"]) == 0 for row in rows)


@pytest.mark.parametrize("head_dim", range(8, 257))
def test_every_head_dim_has_a_tile_that_fits(head_dim):
    for head_dim_v in (8, head_dim, 128, 256):
        tile = tiles.forward_tile(head_dim, head_dim_v)
        widths = tiles.width(head_dim), tiles.width(head_dim_v)
        assert tile.stages >= tiles.chunks(*widths)
        assert tile.stages == tiles.slots(tile.tile_m, *widths)
        assert tiles.tmem_columns(tile.tile_m // ROWS, widths[1]) <= tiles.TMEM_COLUMNS


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_a_backward_that_fits(head_dim):
    """BackwardShape checks the columns of tensor memory, backward_slots the bytes of shared memory."""
    for head_dim_v in range(8, 257, 8):
        widths = tiles.backward_widths(head_dim, head_dim_v)
        tile, variant = tiles.backward_tile(*widths), tiles.backward_variant(*widths)
        shapes = [BackwardShape(tile, *widths, part) for part in tiles.backward_parts(variant)]
        assert all(min(shape.slots) >= 1 for shape in shapes)
        assert sum(shape.makes_dk for shape in shapes) == sum(shape.makes_dv for shape in shapes) == 1


def backward_columns(shape: BackwardShape) -> dict[str, range]:
    """Of tensor memory, of what a kernel makes."""
    made = {"S": (0, shape.tile.tile_m)}
    if shape.makes_dv:
        made["dV"] = (shape.dv_column, shape.width_v)
    if shape.makes_dk:
        made |= {"dP": (shape.dp_column, shape.tile.tile_m), "dK": (shape.dk_column, shape.width_qk)}
        made["dQ"] = (shape.dq_column, shape.dq_columns)
    return {name: range(start, start + count) for name, (start, count) in made.items()}


@pytest.mark.parametrize(
    "head_dims, columns",
    [
        ((64, 64), [{"S": 0, "dP": 128, "dV": 256, "dK": 320, "dQ": 384}]),
        ((96, 96), [{"S": 0, "dP": 128, "dV": 256, "dK": 352, "dQ": 128}]),
        ((128, 128), [{"S": 0, "dP": 128, "dV": 256, "dK": 384, "dQ": 128}]),
        ((192, 128), [{"S": 0, "dP": 64, "dK": 128, "dQ": 384}, {"S": 0, "dV": 64}]),
        ((256, 256), [{"S": 0, "dP": 64, "dK": 128, "dQ": 384}, {"S": 0, "dV": 64}]),
    ],
    ids=str,
)
def test_where_the_backward_lies_in_tensor_memory(head_dims, columns):
    widths = tiles.backward_widths(*head_dims)
    tile, parts = tiles.backward_tile(*widths), tiles.backward_parts(tiles.backward_variant(*widths))
    shapes = [BackwardShape(tile, *widths, part) for part in parts]
    assert [{name: each.start for name, each in backward_columns(shape).items()} for shape in shapes] == columns


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_only_dq_lies_over_something_in_tensor_memory(head_dim):
    """Over dP, where the columns end before; P and dS, packed, over the first half of their own halves of S and dP."""
    for head_dim_v in range(8, 257, 8):
        widths = tiles.backward_widths(head_dim, head_dim_v)
        for part in tiles.backward_parts(tiles.backward_variant(*widths)):
            shape = BackwardShape(tiles.backward_tile(*widths), *widths, part)
            found = backward_columns(shape)
            assert all(columns.stop <= tiles.TMEM_COLUMNS for columns in found.values())
            over = {pair for pair in itertools.combinations(sorted(found), 2) if {*found[pair[0]]} & {*found[pair[1]]}}
            assert over == ({("dP", "dQ")} if shape.makes_dk and not shape.dq_apart else set())
            if over:
                assert found["dQ"].stop <= found["dP"].stop and {*found["dQ"]} <= {*found["dP"]}


def test_dk_and_dv_too_wide_for_tensor_memory_are_refused():
    with pytest.raises(ValueError, match="exceed 512 columns"):
        BackwardShape(tiles.backward_tile(256, 256), 256, 256)


def test_register_budgets_fit_the_register_file():
    reduce, weigh, other = REGISTERS
    assert WARPGROUP * (reduce + HALVES * weigh + other) <= REGISTER_FILE
    assert all(registers % 8 == 0 for registers in REGISTERS)
    for query_tiles, (softmax, correction, other) in BUDGETS.items():
        assert WARPGROUP * (query_tiles * softmax + correction + other) <= REGISTER_FILE
        assert softmax % 8 == correction % 8 == other % 8 == 0  # setmaxnreg counts in eights
