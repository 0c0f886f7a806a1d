"""Our backward kernels through the contract, emulated, against float64: cells, schedules, and what a run must show."""

import functools
import math
import time
from dataclasses import dataclass, replace
from unittest import mock

import torch

import cute_flash
from cute_flash.arch.sm90 import backend as sm90
from cute_flash.arch.sm90 import tiles
from cute_flash.arch.sm100 import backend as sm100
from cute_flash.spec import settings
from cute_flash.spec.device import ARCHES, imagined

from .. import direct, oracle
from ..cases import Case, make_inputs
from ..runner import ALLOWED_RATIO, HALF_ULP, TWICE_ROUNDED
from .hopper import ARCH, Schedule

SCHEDULES = tuple(
    Schedule(mode, scheduler, seed)
    for mode in ("late", "eager", "random")
    for seed, scheduler in ((1, "random"), (2, "random"), (3, "priority"))
)
EVERY_DAY = SCHEDULES[:3]
NAMES = ("dq", "dk", "dv")
SMS = 2  # fewer than most cases have key tiles: CTAs draw several


@dataclass(frozen=True)
class Cell:
    case: Case
    lse_grad: bool = False
    deterministic: bool = False
    short: bool = False  # the plan of few keys; without, that of many
    small: bool = False  # of few query rows on a large GPU

    def __str__(self) -> str:
        words = {"dlse": self.lse_grad, "deterministic": self.deterministic}
        words |= {"short": self.short, "small": self.small}
        return "-".join([str(self.case), *(word for word, said in words.items() if said)])


ASKED = ("lse_grad", "deterministic", "short", "small")


def cell(dims, lengths, heads=(1, 1), **fields) -> Cell:
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    batch, more = fields.pop("batch", 1), [fields.pop(name, False) for name in ASKED]
    return Cell(Case(batch, *lengths, *heads, *dims, **fields), *more)


class Compiled:
    """A backend, but a plan is compiled once."""

    def __init__(self, backend):
        self.scratch, self.refuse, self.plan = backend.scratch, backend.refuse, backend.plan
        self.build = functools.cache(backend.build)


BACKENDS = {"sm_90a": Compiled(sm90.BACKEND), "sm_100a": Compiled(sm100.BACKEND)}
BACKENDS["sm_103a"] = BACKENDS["sm_100a"]


def gradients(each: Cell, schedule: Schedule, arch: str = ARCH, backend=None, launches: list | None = None, **knobs):
    """(dQ, dK, dV) of the architecture's kernels, given the exact output and LSE; (inputs, dLSE) beside them. What was
    launched is added to `launches`, scratch memory to the list `kept`, if it is among the knobs."""
    case, inputs = each.case, make_inputs(each.case)
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    exact = oracle.forward(*inputs.qkv, **options)
    outputs = direct.Outputs(exact.out.to(case.torch_dtype), exact.lse.float())
    dlse = torch.randn(outputs.lse.shape) if each.lse_grad else None
    kept = knobs.pop("kept", [])
    knobs = {"strict_exit": True, **schedule.knobs, **knobs}
    with (
        mock.patch.object(tiles, "small", lambda problem: problem.small),
        settings.override(cache_dir=None, backend=None),
        cute_flash.emulate(arch, **knobs) as emulation,
    ):
        found = direct.backward(
            backend or BACKENDS[arch],
            inputs.dout,
            *inputs.qkv,
            outputs,
            dlse,
            device=replace(imagined(ARCHES[arch], "emulated"), sm_count=SMS),
            deterministic=each.deterministic,
            kept=kept,
            short=each.short,
            small=each.small,
            **options,
        )
    if launches is not None:
        launches += emulation.launches
    return found, inputs, dlse


def check(each: Cell, schedule: Schedule, arch: str = ARCH, **knobs) -> list[float]:
    """-> the errors of dQ, dK and dV."""
    case = each.case
    found, inputs, dlse = gradients(each, schedule, arch, **knobs)
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    exact = oracle.backward(*inputs.qkv, inputs.dout, dlse, **options)
    plain = oracle.plain_16bit_backward(*inputs.qkv, inputs.dout, **options)
    base = oracle.backward(*inputs.qkv, inputs.dout, **options) if each.lse_grad else exact
    errors = []
    for name, value, right, yardstick, without in zip(NAMES, found, exact, plain, base, strict=True):
        # with a gradient through LSE: that of the yardstick, which has none, and a rounding each of dS and the result
        limit = ALLOWED_RATIO * oracle.relative_error(yardstick, without)
        floor = 2 * HALF_ULP[case.torch_dtype] if each.lse_grad else 0.0
        errors.append(oracle.relative_error(value, right))
        assert errors[-1] <= max(limit, floor), name
    return errors


def bits(each: Cell, schedule: Schedule, arch: str, **knobs) -> torch.Tensor:
    """Of the sums of dQ in float32 and all else in scratch memory, dK and dV: that dQ itself, rounded, is the same says
    little."""
    kept: list[torch.Tensor] = []
    (_, dk, dv), *_ = gradients(each, schedule, arch, kept=kept, **knobs)
    return torch.cat([*kept, dk.float().flatten(), dv.float().flatten()]).view(torch.int32)


def check_and_record(each: Cell, schedule: Schedule, record_property, arch: str = ARCH) -> None:
    """A row for --gradients-csv."""
    start = time.process_time()
    errors = check(each, schedule, arch)
    seconds = time.process_time() - start  # compiling included, where this run was the first of its plan
    named = str(each), schedule.mode, schedule.scheduler, schedule.seed
    record_property("emulated_gradients", (*named, *(f"{x:.3e}" for x in errors), f"{seconds:.2f}"))


def check_rows_past_the_end(arch: str, stored: int) -> None:
    """dO, Q, K and V are the first rows of tensors of `stored` rows, which hold NaN beyond."""
    case = Case(1, 65, 70, 1, 1, 64, 64)
    wide = torch.full((3, 1, stored, 1, 64), math.nan, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    exact = oracle.forward(*inputs.qkv)
    outputs = direct.Outputs(exact.out.bfloat16(), exact.lse.float())
    operands = [inputs.dout, *inputs.qkv]
    for buffer, index in ((wide[0], 1), (wide[1], 2), (wide[2], 3)):
        rows = operands[index].shape[1]
        buffer[:, :rows] = operands[index]
        operands[index] = buffer[:, :rows]
    with settings.override(cache_dir=None, backend=None), cute_flash.emulate(arch, mode="late", seed=1):
        found = direct.backward(BACKENDS[arch], *operands, outputs, device=imagined(ARCHES[arch], "emulated"))
    for value, right in zip(found, oracle.backward(*inputs.qkv, inputs.dout), strict=True):
        assert oracle.relative_error(value, right) < TWICE_ROUNDED
