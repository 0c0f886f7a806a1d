"""What the Triton backend says it can do, and what it plans, without a GPU."""

import subprocess
import sys
from dataclasses import replace

import pytest

from cute_flash.arch.triton import tiles
from cute_flash.arch.triton.backend import BACKEND
from cute_flash.spec.device import Device
from cute_flash.spec.mask import CAUSAL, FULL
from cute_flash.spec.plan import Tile
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem


def problem(capability=(8, 6), direction=FORWARD, **fields) -> Problem:
    device = Device("cuda", 0, "simulated", capability, 1) if capability else Device("cpu", 0, "cpu", None, 0)
    return replace(Problem(direction, device, "bfloat16", 64, 64, 4, 4), **fields)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (11, 0), (12, 0), (12, 1)])
def test_native_where_no_backend_is_made_for_the_device(capability):
    assert BACKEND.native(problem(capability).device)


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 0), (10, 3), None])
def test_not_native_elsewhere(capability):
    assert not BACKEND.native(problem(capability).device)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 1)])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_takes_every_gpu_from_8_0(capability, direction):
    assert BACKEND.refuse(problem(capability, direction)) == ()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (problem(None), ["8.0", "cpu"]),
        (problem((7, 5)), ["8.0", "7.5"]),
        (problem(dtype="float64"), ["float64"]),
        (problem(head_dim=257), ["head_dim=257", "8..256"]),
        (problem(head_dim_v=4), ["head_dim_v=4", "8..256"]),
        (problem(features=frozenset({"sink"})), ["sink="]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refuses_in_a_sentence(wanted, words):
    sentences = BACKEND.refuse(wanted)
    assert len(sentences) == 1
    assert all(word in sentences[0] for word in words)


@pytest.mark.parametrize("head_dim", range(8, 257))
def test_width_is_a_sum_of_at_most_two_powers_of_two_of_16_or_more(head_dim):
    width = tiles.width(head_dim)
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    assert width >= head_dim
    assert main >= 16
    assert rest == 0 or (rest >= 16 and rest & (rest - 1) == 0)
    assert rest == 0 or head_dim > main  # only the last part is ever padded


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (13, 0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", tiles.WIDTHS)
def test_rows_of_dq_tiles_are_whole_steps_of_dkdv(capability, dtype, width):
    for ieee in (True, False):
        plan = BACKEND.plan(
            problem(capability, BACKWARD, head_dim=width, head_dim_v=width, dtype=dtype, ieee_float32=ieee)
        )
        assert tiles.dq_tile(plan).tile_m % plan.tile.tile_n == 0


def test_dq_tile_is_a_word_of_the_variant():
    plan = BACKEND.plan(problem((8, 6), BACKWARD, head_dim=72))
    assert plan.variant.split() == [tiles.PADDED, tiles.MASK_ALL]
    assert tiles.dq_tile(plan) == plan.tile
    for tile in (Tile(128, 32, 3, 8), Tile(64, 32, 2, 4)):
        plan = tiles.with_dq_tile(plan, tile)
        assert tiles.dq_tile(plan) == tile
        assert len(plan.variant.split()) == 3


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_candidates_are_distinct_and_the_own_tile_comes_first(capability, direction, width):
    plan = BACKEND.plan(problem(capability, direction, head_dim=width, head_dim_v=width))
    kinds = [(False, plan.tile), (True, tiles.dq_tile(plan))] if direction == BACKWARD else [(False, plan.tile)]
    for dq, own in kinds:
        found = tiles.candidates(plan, dq=dq)
        assert found[0] == own
        assert len(set(found)) == len(found)


def test_plan_states_what_runs():
    plan = BACKEND.plan(problem((12, 0), BACKWARD, head_dim=72, head_dim_v=40, mask=CAUSAL, lse_grad=True))
    assert (plan.backend, plan.arch, plan.head_dim, plan.head_dim_v) == ("triton", "12.0", 80, 48)
    assert (plan.mask, plan.lse, plan.lse_grad, plan.deterministic) == (CAUSAL, True, True, True)


def test_ieee_only_matters_to_float32():
    plans = {BACKEND.plan(problem(mask=FULL, ieee_float32=ieee)) for ieee in (True, False)}
    assert len(plans) == 1
    plans = {BACKEND.plan(problem(dtype="float32", ieee_float32=ieee)) for ieee in (True, False)}
    assert len(plans) == 2


def test_planning_imports_no_triton():
    code = "import sys; import cute_flash.arch.triton.backend; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
