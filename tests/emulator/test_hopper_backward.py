"""Our Hopper backward, emulated, against float64: tile edges, masks, groups, lengths, head dims, windows, softcaps.

Every run: a third of the cases, late, under one of three seeds, rotating by day. scripts/test --all: each under every
seed, and in the other modes too.
"""

import contextlib
import re
from unittest import mock

import pytest
import torch

from cute_flash.arch.common import order
from cute_flash.arch.sm90 import backend as sm90
from cute_flash.arch.sm90 import backward_shared, backward_wide, dq
from cute_flash.arch.sm90.grad import epilogue, units, zeros
from cute_flash.emulator.errors import Deadlock, EmulatorError
from cute_flash.spec import scratch

from .. import oracle
from ..runner import TWICE_ROUNDED
from . import gradients as checker
from .gradients import (
    EVERY_DAY,
    SCHEDULES,
    Cell,
    Compiled,
    bits,
    cell,
    check_and_record,
    check_rows_past_the_end,
    gradients,
)
from .hopper import ARCH, Schedule, way_of_today

# Tiles: 128 queries x 128 keys up to (64, 64), 64 x 128 (128 under a full mask: 80 x 128) up to 128, 64 x 96 from 129
# to 192 columns; beyond, and where such heads have few keys, 64 x 64 or 64 x 128, and 128 x 64.
CELLS = (
    cell(64, (130, 257)),  # two query tiles, three key tiles, one key in the last
    cell(64, (193, 193), causal=True, heads=(2, 1)),
    cell(64, (200, 70), causal=True),  # 130 rows see no key, a query tile of them whole
    cell(40, (65, 129), heads=(3, 1), dtype="float16"),
    cell(64, (129, 300), window=(40, 17)),
    cell(64, (100, 130), softcap=3.0, causal=True, lse_grad=True),
    cell(128, (65, 129), batch=2),
    cell(128, (193, 193), causal=True),
    cell(128, (70, 300), causal=True, heads=(4, 2)),
    cell(128, (150, 64), causal=True, lse_grad=True),
    cell(72, (129, 63), layout="heads_first"),
    cell((64, 128), (65, 191)),
    cell(128, (129, 200), window=(64, None), softcap=20.0),
    cell(96, (65, 129)),
    cell((96, 64), (129, 100), causal=True, heads=(2, 1)),
    cell(64, (300, 400), window=(70, 30), deterministic=True),  # a query tile's first key tile is not 0
    cell(128, (65, 200), heads=(2, 1), deterministic=True),
    cell(96, (129, 200), causal=True, heads=(2, 1), deterministic=True),  # the second key tile starts further on
    cell(96, (200, 70), causal=True, deterministic=True),  # two query tiles that nobody adds to
    cell(64, (130, 200), heads=(6, 3), batch=2),  # zeros for later heads
    cell(256, (65, 65), causal=True),
    cell(256, (129, 63), heads=(2, 1)),
    cell(256, (190, 130), causal=True),  # rows that see no key, and tiles that one warpgroup leaves out
    cell((192, 128), (127, 130), causal=True, heads=(2, 1)),
    cell(192, (64, 129), window=(None, 20)),
    cell((120, 112), (161, 130), heads=(2, 1), lse_grad=True),  # three tiles of 80 queries, one in the last
    cell(192, (193, 193), causal=True),  # four query tiles, three key tiles, one key in the last
    cell(136, (65, 95), heads=(2, 1), batch=2, lse_grad=True),  # keys end in the second warpgroup's
    cell((160, 104), (130, 193), heads=(2, 2), layout="heads_first", dtype="float16"),
    cell(192, (150, 40), causal=True, softcap=4.0),  # rows that see no key, a warpgroup without a key
    cell(192, (100, 300), window=(60, 10), softcap=15.0, heads=(2, 1), deterministic=True),
    cell((192, 128), (129, 193), causal=True, deterministic=True),
    cell((192, 128), (129, 193), causal=True, short=True),
    cell(192, (65, 130), heads=(2, 1), window=(50, 9), short=True),
    cell(192, (65, 200), short=True, deterministic=True),  # three key tiles
    cell(160, (130, 193), causal=True, heads=(4, 2), deterministic=True),
    cell((40, 136), (70, 70), softcap=5.0, lse_grad=True),
)


def schedules():
    """Every cell under every schedule; those whose turn it is not are slow."""
    cells = []
    for index, each in enumerate(CELLS):
        for schedule in SCHEDULES:
            way = way_of_today(index, 3, len(EVERY_DAY))
            marks = [] if way is not None and schedule == EVERY_DAY[way] else [pytest.mark.slow]
            cells.append(pytest.param(each, schedule, id=f"{each}-{schedule}", marks=marks))
    return cells


def test_at_least_twelve_shapes():
    assert len(set(CELLS)) == len(CELLS) >= 12


@pytest.mark.parametrize("each, schedule", schedules())
def test_right_under_every_schedule(each: Cell, schedule: Schedule, record_property):
    check_and_record(each, schedule, record_property)


IN_TURN = (
    cell(64, (65, 385), deterministic=True),  # four key tiles
    cell(128, (193, 385), causal=True, heads=(4, 2), deterministic=True),
    cell(96, (129, 385), window=(100, 40), deterministic=True),
    cell(192, (193, 385), causal=True, heads=(2, 2), deterministic=True),  # five key tiles of 96; no group
    cell((192, 128), (129, 385), deterministic=True),
    cell(192, (129, 385), window=(100, 40), deterministic=True),
)
TURN_RUNS = tuple(zip(SCHEDULES[::2], (8, 2, 1, 8, 8), strict=True))  # how many of four CTAs at once


def in_turn(ask, each: Cell, schedule: Schedule, **knobs):
    """What `ask` finds of four CTAs; L2 holds one head, so that causal heads but the last are walked upwards."""
    with mock.patch.object(order, "L2_SECTION_BYTES", 1), mock.patch.object(checker, "SMS", 4):
        return ask(each, schedule, ARCH, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("each", IN_TURN, ids=str)
def test_deterministic_gradients_are_the_same_under_every_schedule(each):
    """dQ is summed in one order of the key tiles, whoever comes first."""
    backend = Compiled(sm90.BACKEND)
    in_turn(checker.check, each, EVERY_DAY[0], backend=backend)
    runs = [in_turn(bits, each, schedule, backend=backend, resident=resident) for schedule, resident in TURN_RUNS]
    assert all(torch.equal(runs[0], found) for found in runs[1:])


def test_heads_that_are_walked_upwards():
    """The turns of a causal head that is not among the last: a query tile's last key tile comes first."""
    each = cell(64, (130, 257), causal=True, heads=(2, 2), deterministic=True)
    in_turn(checker.check, each, EVERY_DAY[0], backend=Compiled(sm90.BACKEND))


@pytest.mark.slow
@pytest.mark.parametrize("each", IN_TURN, ids=str)
def test_sums_of_those_who_do_not_wait_for_their_turn_differ(each):
    backend, results = Compiled(sm90.BACKEND), []
    with mock.patch.object(epilogue, "wait_for", lambda *_: None):
        for schedule, resident in TURN_RUNS:
            try:
                results.append(in_turn(bits, each, schedule, backend=backend, resident=resident))
            except EmulatorError:
                return
            if not torch.equal(results[0], results[-1]):
                return
    pytest.fail("nothing noticed it")


@pytest.mark.slow
def test_turns_that_do_not_follow_the_order_of_drawing_never_come():
    """By keys, while the last are drawn first: with one CTA at a time the first unit waits for a later one."""
    in_turn(gradients, IN_TURN[3], SCHEDULES[3], resident=1)
    with (
        mock.patch.object(epilogue, "turn_of", lambda unit, *_: unit.key_block),
        pytest.raises(Deadlock, match="polls"),
    ):
        in_turn(gradients, IN_TURN[3], SCHEDULES[3], backend=Compiled(sm90.BACKEND), resident=1)


@pytest.mark.parametrize("deterministic", [False, True], ids=["zeros", "turns"])
def test_who_has_not_started_holds_nothing_that_others_wait_for(deterministic):
    """A GPU busy with something else starts a CTA only when another has ended: here one at a time."""
    each = cell(64, (130, 200), heads=(2, 2), batch=2, deterministic=deterministic)
    found, inputs, _ = gradients(each, EVERY_DAY[0], resident=1)
    assert max(_errors(each, found, inputs)) < TWICE_ROUNDED


def _errors(each: Cell, found, inputs) -> list[float]:
    exact = oracle.backward(*inputs.qkv, inputs.dout, causal=each.case.causal)
    return [oracle.relative_error(a, b) for a, b in zip(found, exact, strict=True)]


DAILY_AND_SLOW = [EVERY_DAY[0], *(pytest.param(each, marks=pytest.mark.slow) for each in EVERY_DAY[1:])]


@pytest.mark.parametrize("schedule", DAILY_AND_SLOW, ids=str)
def test_zeros_for_later_sections(schedule):
    """Causal: L2 holds one head, so that most zeros are made by earlier CTAs."""
    each = cell(64, (193, 193), causal=True, batch=4, short=True)
    with mock.patch.object(order, "L2_SECTION_BYTES", 1):
        found, inputs, _ = gradients(each, schedule, backend=Compiled(sm90.BACKEND))
    assert max(_errors(each, found, inputs)) < TWICE_ROUNDED


SHARED = (
    cell(128, (193, 193), causal=True, small=True),
    cell(64, (300, 257), causal=True, heads=(2, 1), batch=2, small=True),
    cell(96, (150, 200), causal=True, lse_grad=True, small=True),
    cell(128, (70, 300), causal=True, heads=(4, 2), small=True, short=True),  # one query tile or two: shares of none
    cell(64, (200, 257), causal=True, heads=(4, 1), small=True, short=True),  # eight shares
    cell(64, (200, 70), causal=True, small=True),  # rows that see no key
)


@pytest.mark.parametrize("each, schedule", [
    pytest.param(each, schedule, marks=[] if way_of_today(at, 2, len(SCHEDULES)) == way else [pytest.mark.slow])
    for at, each in enumerate(SHARED)
    for way, schedule in enumerate(SCHEDULES)
], ids=str)  # fmt: skip
def test_key_tiles_that_two_ctas_share(each, schedule):
    launches = []
    found, inputs, dlse = gradients(each, schedule, launches=launches)
    exact = oracle.backward(*inputs.qkv, inputs.dout, dlse, causal=True)
    assert max(oracle.relative_error(a, b) for a, b in zip(found, exact, strict=True)) < TWICE_ROUNDED
    assert "SharedBackward" in launches[1]["kernel"]


def test_a_groups_heads_are_halved_together_where_key_tiles_are_many():
    each = SHARED[1]
    with mock.patch.object(scratch, "SHARED_TILES", 1), mock.patch.object(units, "SHARED_TILES", 1):
        found, inputs, _ = gradients(each, EVERY_DAY[0], backend=Compiled(sm90.BACKEND))
    assert max(_errors(each, found, inputs)) < TWICE_ROUNDED


def test_who_shares_a_key_tile_waits_for_nobody_who_has_not_started():
    found, inputs, _ = gradients(SHARED[1], EVERY_DAY[0], resident=1)
    assert max(_errors(SHARED[1], found, inputs)) < TWICE_ROUNDED


PLANTED_SHARED = {
    "nobody waits for the other's sums": {"wait_for": lambda *_: None},
    "nobody is told": {"tell": lambda *_: None},
}


@pytest.mark.parametrize("fault", PLANTED_SHARED)
def test_a_planted_fault_in_shared_key_tiles_is_noticed(fault):
    """Eight shares of one key tile, all at once: of four heads, half of which have the one query tile."""
    each = cell(64, (70, 100), causal=True, heads=(4, 1), small=True, short=True)
    with mock.patch.object(checker, "SMS", 8):
        must_be_noticed(each, backward_shared, PLANTED_SHARED[fault], resident=8)


PLANTED = {
    "nobody waits for the zeros": {"wait_zeroed": lambda *_: None},
    "the zeros count before they are there": {"edit": lambda p: re.sub(r"cp\.async\.bulk\.wait_group\s+0;", "", p)},
    "no fence between the word and the addition": {"edit": lambda p: p.replace("fence.proxy.async.global;", "")},
}


SLOW_FAULT = "nobody waits for the zeros"  # several schedules pass before one shows it


def must_be_noticed(each: Cell, module, changes: dict, **knobs) -> None:
    """By some schedule: the emulator objects, or the gradients are wrong. changes: names of the module, and `edit`."""
    patches = {name: value for name, value in changes.items() if name != "edit"}
    edit = changes.get("edit")
    backend = None if edit else Compiled(sm90.BACKEND)
    for schedule in SCHEDULES:
        try:
            with mock.patch.multiple(module, **patches) if patches else contextlib.nullcontext():
                found, inputs, _ = gradients(each, schedule, backend=backend, edit=edit, **knobs)
        except EmulatorError:
            return
        if not max(_errors(each, found, inputs)) < 0.02:
            return
    pytest.fail("nothing noticed it")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * (f == SLOW_FAULT)) for f in PLANTED])
def test_a_planted_fault_in_the_zeros_is_noticed(fault):
    """The second head's sums are zeroed by CTAs of the first."""
    must_be_noticed(cell(64, (130, 200), heads=(2, 2), batch=2), zeros, PLANTED[fault], resident=8)


PLANTED_WIDE = {
    "nobody waits until P and dS are read": {"wait_read": lambda *_: None, "tell_read": lambda *_: None},
    "P and dS are not fenced": {"edit": lambda p: p.replace("fence.proxy.async.shared::cta;", "")},
}


@pytest.mark.parametrize("fault", PLANTED_WIDE)
def test_a_planted_fault_in_wide_heads_is_noticed(fault):
    must_be_noticed(cell(192, (193, 100)), backward_wide, PLANTED_WIDE[fault])


def test_a_tile_left_out_that_is_seen_is_noticed():
    """Two kernels, causal: a warpgroup leaves out a tile that it sees nothing of; here also one it sees a corner of."""

    def hides(self, context, row_start, at):
        seqlen_q, seqlen_k = context.seqlens
        return at * self.tile.tile_n >= row_start + context.group * 64 + seqlen_k - seqlen_q  # the diagonal's

    must_be_noticed(cell(256, (65, 65), causal=True), dq.QueryGradientsSm90, {"hides": hides})


def test_rows_past_the_end_touch_nothing():
    """Values beyond the tensors' true columns and rows are neither read into a result nor written."""
    check_rows_past_the_end(ARCH, 80)


@pytest.mark.parametrize("dims", [64, (192, 128)], ids=str)
def test_no_grid_ends_where_a_batch_may_go_on(dims):
    """Along y and z a grid has at most 65535 CTAs, and batches of short sequences are larger: all lie along x."""
    launches = []
    each = cell(dims, (70, 70), heads=(2, 1), batch=3)
    found, inputs, _ = gradients(each, EVERY_DAY[0], launches=launches)
    assert max(_errors(each, found, inputs)) < TWICE_ROUNDED
    grids = [launch["grid"] for launch in launches]
    assert len(grids) == 3 and all(grid[1:] == (1, 1) for grid in grids), grids
