"""Calls of few query rows on Hopper, emulated: tiles of 64 rows, one MMA warpgroup a CTA."""

import pytest

from cute_flash.arch.sm90.tiles import SMALL

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import Runner
from .hopper import SCHEDULES, attend, turn

# (head dims, lengths, heads, SMs, causal): tile edges both ways, rows without a key, several query tiles a CTA.
# Neighbours share a kernel.
CASES = (
    ((128, 128), (63, 65), (1, 1), 132, True),
    ((128, 128), (129, 385), (2, 1), 2, True),
    ((128, 128), (193, 64), (1, 1), 1, True),
    ((128, 128), (129, 385), (2, 1), 1, False),
    ((128, 128), (65, 127), (1, 1), 132, False),
    ((64, 64), (127, 129), (2, 1), 1, True),
    ((64, 64), (65, 257), (2, 1), 1, False),
    ((96, 96), (64, 257), (1, 1), 132, True),
    ((192, 128), (65, 191), (1, 1), 1, True),
    ((192, 192), (128, 257), (1, 1), 1, True),
    ((256, 256), (65, 161), (1, 1), 1, True),
)


def due():
    """A third of them a day; the others are slow."""
    for number, case in enumerate(CASES):
        marks = [] if (number + turn()) % 3 == 0 else [pytest.mark.slow]
        yield pytest.param(number, id=str(case).replace(" ", ""), marks=marks)


@pytest.mark.parametrize("number", due())
def test_right(number, poisoned_empty):
    dims, lengths, heads, sms, causal = CASES[number]
    case = Case(1, *lengths, *heads, *dims, causal)
    inputs, schedule = make_inputs(case), SCHEDULES[(number + turn()) % len(SCHEDULES)]
    answer = attend(inputs, causal, 1, sms=sms, small=True, strict_exit=True, **schedule.knobs)
    Runner(inputs.q.device, case.torch_dtype).check(*inputs.qkv, result=(answer.out, answer.lse), causal=causal)


def test_every_row_of_the_table_is_emulated():
    assert {(*dims, "causal" if causal else "full") for dims, *_, causal in CASES} == set(SMALL)


def test_less_is_walked_than_by_tiles_of_128_rows():
    """320 rows: five tiles of 64 walk 1, 1, 2, 2 and 3 key tiles of 128, three of 128 rows, two warpgroups each, 1, 2
    and 3."""
    inputs = make_inputs(Case(1, 320, 320, 1, 1, 128, 128, True))
    few, many = (attend(inputs, True, 1, small=small, seed=1) for small in (True, False))
    assert oracle.relative_error(few.out, many.out) < 4e-3
    assert few.steps < many.steps
