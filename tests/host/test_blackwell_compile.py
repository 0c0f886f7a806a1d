"""Every Blackwell Plan compiles for sm_100a and sm_103a with no GPU; spills are failures."""

import itertools

import pytest

from cute_flash.arch.sm100 import tiles
from cute_flash.arch.sm100.backend import BACKEND
from cute_flash.arch.sm100.schedule import BUDGETS, ROWS, WARPGROUP
from cute_flash.spec.device import imagined
from cute_flash.spec.mask import CAUSAL, FULL
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import FORWARD, Problem

from .test_hopper_compile import REGISTER_FILE, compile_and_report

PAIRS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (64, 128), (192, 192), (256, 256), (64, 256), (256, 64)]
# A single query tile stores the address of shared memory at entry and reads it again in each role: uniform registers
# run out. At (256, 64) a handful of words spill in the MMA and load warps.
SPILLS = {(192, 192), (256, 256), (64, 256), (256, 64)}


def plan(head_dims, causal: bool, capability=(10, 0), dtype: str = "bfloat16", lse: bool = True) -> Plan:
    mask, device = CAUSAL if causal else FULL, imagined(capability, "imagined")
    return BACKEND.plan(Problem(FORWARD, device, dtype, *head_dims, heads_q=8, heads_kv=2, mask=mask, lse=lse))


COMMON = [plan((128, 128), True), plan((64, 64), False, (10, 3))]
EVERY = [
    plan(*each)
    for each in itertools.product(PAIRS, (False, True), ((10, 0), (10, 3)), ("bfloat16", "float16"), (False, True))
]


@pytest.mark.parametrize("chosen", COMMON, ids=str)
def test_common_plans_compile_without_spills(chosen, capfd, record_property):
    compile_and_report(BACKEND, chosen, capfd, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", EVERY, ids=str)
def test_every_plan_compiles_without_spills(chosen, capfd, record_property):
    if (chosen.head_dim, chosen.head_dim_v) in SPILLS:
        pytest.xfail("known to spill a few words outside the softmax")
    compile_and_report(BACKEND, chosen, capfd, record_property)


@pytest.mark.parametrize("head_dim", range(8, 257))
def test_every_head_dim_has_a_tile_that_fits(head_dim):
    for head_dim_v in (8, head_dim, 128, 256):
        tile = tiles.forward_tile(head_dim, head_dim_v)
        widths = tiles.width(head_dim), tiles.width(head_dim_v)
        assert tile.stages >= tiles.chunks(*widths)
        assert tile.stages == tiles.slots(tile.tile_m, *widths)
        assert tiles.tmem_columns(tile.tile_m // ROWS, widths[1]) <= tiles.TMEM_COLUMNS


def test_register_budgets_fit_the_register_file():
    for (query_tiles, _), (softmax, correction, other) in BUDGETS.items():
        assert WARPGROUP * (query_tiles * softmax + correction + other) <= REGISTER_FILE
        assert softmax % 8 == correction % 8 == other % 8 == 0  # setmaxnreg counts in eights
