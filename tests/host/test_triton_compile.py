"""Every Triton Plan compiles with no GPU and fits its capability's shared memory (and tensor memory)."""

import importlib

import pytest

from cute_flash.spec.device import Device
from cute_flash.spec.mask import CAUSAL, FULL, Mask
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem

pytest.importorskip("triton")

from cute_flash.arch.triton import tiles
from cute_flash.arch.triton.backend import BACKEND

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
TENSOR_MEMORY_COLUMNS = 512
LIMITS = (64, 128, 256)


def plan_for(direction: str, capability, dims, dtype="bfloat16", ieee=True, mask: Mask = CAUSAL, **fields) -> Plan:
    device = Device("cuda", 0, "simulated", capability, 1)
    problem = Problem(direction, device, dtype, *dims, 4, 4, mask, lse=True, ieee_float32=ieee, **fields)
    assert BACKEND.refuse(problem) == ()
    return BACKEND.plan(problem)


def check(plan: Plan) -> None:
    capability = tuple(int(part) for part in plan.arch.split("."))
    kernels = importlib.import_module(f"cute_flash.arch.triton.{plan.direction}").compile_ahead(plan)
    assert len(kernels) == (1 if plan.direction == FORWARD else 2)
    for kernel in kernels:
        assert kernel.metadata.shared <= tiles.shared_memory(capability), (kernel.metadata.name, str(plan))
        assert (kernel.metadata.tmem_size or 0) <= TENSOR_MEMORY_COLUMNS, (kernel.metadata.name, str(plan))
        assert kernel.asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(("direction", "dims"), [(FORWARD, (128, 128)), (BACKWARD, (256, 256))], ids=str)
def test_widest_rows_fit(capability, direction, dims):
    check(plan_for(direction, capability, dims))


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("fields", [{"mask": FULL}, {"lse_grad": True}, {"dtype": "float16"}], ids=str)
def test_variants_compile(direction, fields):
    check(plan_for(direction, (9, 0), (80, 64), **fields))


def test_matmuls_are_warpgroup_wide_on_hopper():
    kernels = importlib.import_module("cute_flash.arch.triton.forward").compile_ahead(
        plan_for(FORWARD, (9, 0), (128, 128))
    )
    assert "wgmma.mma_async" in kernels[0].asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", tiles.WIDTHS)
def test_all_widths_fit(capability, direction, width):
    check(plan_for(direction, capability, (width, width)))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", LIMITS)
@pytest.mark.parametrize("ieee", [True, False], ids=["ieee", "tf32"])
def test_float32_fits(capability, direction, width, ieee):
    check(plan_for(direction, capability, (width, width), "float32", ieee))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", LIMITS)
def test_full_mask_fits(capability, direction, width):
    check(plan_for(direction, capability, (width, width), mask=FULL))
