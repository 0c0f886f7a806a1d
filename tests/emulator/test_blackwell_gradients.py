"""The known cases and values that break gradients, on an emulated Blackwell through the front door: both directions.

Every run: one of each kind, rotating by day. scripts/test --all: all.
"""

import contextlib
import math

import pytest
import torch

import cute_flash
from cute_flash.spec import settings

from .. import oracle
from ..cases import Case, make_inputs
from ..known_cases import CASES
from ..runner import ALLOWED_RATIO, HALF_ULP, TWICE_ROUNDED, Runner
from .hopper import turn

ARCH = "sm_100a"
# Those that ask for a gradient and are not about packs alone; 36 needs a GPU's memory.
NUMBERS = (4, 5, 10, 11, 15, 16, 19, 20, 23, 26, 32, 33, 34, 40, 43, 51, 60)
SOON = (4, 5, 10, 23, 43)  # 4 to 16 s of a core each
PEAKED = ("rising", "falling", "outliers", "large")
VANISHING = ("very_negative", "constant", "tiny", "huge_score")


@contextlib.contextmanager
def emulated(arch: str, backend: str):
    with (
        settings.override(cache_dir=None, backend=None, strict=True),
        cute_flash.emulate(arch, mode="late", seed=1),
    ):
        yield Runner(torch.device("cpu"), torch.bfloat16, backend)


def blackwell():
    return emulated(ARCH, "sm100")


def in_turn(some, soon=None):
    """One of `soon` a day; the rest are slow."""
    soon = some if soon is None else soon
    for each in some:
        due = each == soon[turn() % len(soon)]
        yield pytest.param(each, id=str(each), marks=[] if due else [pytest.mark.slow])


@pytest.mark.parametrize("number", in_turn(NUMBERS, SOON))
def test_known_case(number, poisoned_empty):
    with blackwell() as run:
        CASES[number](run)


def values_of(values: str) -> Case:
    """Last tiles are partial; head dims in turn."""
    dims = (64, 128, 256)[(PEAKED + VANISHING).index(values) % 3]
    return Case(1, 130, 300, 2, 1, dims, dims, True, values=values)


@pytest.mark.parametrize("values", in_turn(PEAKED))
def test_scores_that_spread_widely(values, poisoned_empty):
    case = values_of(values)
    inputs = make_inputs(case)
    with blackwell() as run:
        _, grads = run.gradients(*inputs.qkv, inputs.dout, causal=True)
    exact = oracle.backward(*inputs.qkv, inputs.dout, causal=True)
    plain = oracle.plain_16bit_backward(*inputs.qkv, inputs.dout, causal=True)
    for value, right, yardstick in zip(grads, exact, plain, strict=True):
        # Few rows matter, so ratios are luck: a rounding each of P, dS and the result always passes.
        limit = max(ALLOWED_RATIO * oracle.relative_error(yardstick, right), 3 * HALF_ULP[torch.bfloat16])
        assert oracle.relative_error(value, right) <= limit


@pytest.mark.parametrize("values", in_turn(VANISHING))
def test_vanishing_gradients(values, poisoned_empty):
    """All weights alike, or one of them 1: dV is a mean or a copy, and everything is finite."""
    inputs = make_inputs(values_of(values))
    with blackwell() as run:
        _, (dq, dk, dv) = run.gradients(*inputs.qkv, inputs.dout, causal=True)
    exact = oracle.backward(*inputs.qkv, inputs.dout, causal=True)
    assert dq.isfinite().all() and dk.isfinite().all()
    assert oracle.relative_error(dv, exact.dv) <= 2 * HALF_ULP[torch.bfloat16]  # P rounded, dV rounded


@pytest.mark.parametrize("hard", in_turn((math.nan, math.inf)))
def test_a_key_that_is_no_number_shows_in_every_gradient_that_depends_on_it(hard, poisoned_empty):
    """One of batch 0's, in the second tile: probabilities of all its rows are NaN, of every key. Batch 1 has none."""
    inputs = make_inputs(Case(2, 140, 257, 2, 1, 64, 64))
    inputs.q.abs_()
    inputs.k[0, 130] = hard
    with blackwell() as run:
        (out, lse), grads = run.gradients(*inputs.qkv, inputs.dout)
    assert all(value[0].isnan().all() for value in (out, lse, *grads))
    for value, right in zip(grads, oracle.backward(*inputs.qkv, inputs.dout), strict=True):
        assert oracle.relative_error(value[1], right[1]) < TWICE_ROUNDED


@pytest.mark.parametrize("hard", in_turn((math.nan, math.inf)))
@pytest.mark.parametrize("arch, backend", [(ARCH, "sm100"), ("sm_90a", "sm90")])
def test_hard_gradients_of_rows_without_keys_show_where_their_tile_is_visited(arch, backend, hard, poisoned_empty):
    """Rows 0 to 129 see no key; 128 and 129 lie in a tile of rows that do. A limit that README names: 0 times no number
    is none, and only dV's is also plain attention's."""
    inputs = make_inputs(Case(1, 200, 70, 1, 1, 64, 64))
    results = {}
    with emulated(arch, backend) as run:
        for row in (None, 5, 129):
            dout = inputs.dout.clone()
            if row is not None:
                dout[0, row] = hard
            _, results[row] = run.gradients(*inputs.qkv, dout, causal=True)
    clean, apart, (dq, dk, dv) = results[None], results[5], results[129]
    exact = oracle.backward(*inputs.qkv, inputs.dout, causal=True)
    assert all(oracle.relative_error(value, right) < TWICE_ROUNDED for value, right in zip(clean, exact, strict=True))
    assert (clean[0][0, :130] == 0).all()
    assert all(torch.equal(*pair) for pair in zip(apart, clean, strict=True))
    assert dk.isnan().all() and dv.isnan().all() and dq[0, 129].isnan().all()
    others = torch.arange(200) != 129
    assert torch.equal(dq[0, others], clean[0][0, others])
