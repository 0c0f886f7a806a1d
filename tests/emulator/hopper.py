"""Our forward kernels through the front door, emulated: which schedules, how often, and what a run reports."""

import contextlib
import datetime
import os
import time
from dataclasses import dataclass
from unittest import mock

import torch

import cute_flash
from cute_flash import api
from cute_flash.arch.sm90 import tiles
from cute_flash.emulator.counters import Counters
from cute_flash.runtime import compiler, counters, request
from cute_flash.spec import device as device_facts
from cute_flash.spec import settings
from cute_flash.spec import splits as split_rules
from cute_flash.spec.splits import SPLIT_KEYS, SplitRule

from ..cases import Inputs

ARCH = "sm_90a"
BACKENDS = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}
SMS = 132


@dataclass(frozen=True)
class Schedule:
    mode: str  # when asynchronous operations take effect
    scheduler: str
    seed: int

    def __str__(self) -> str:
        return f"{self.mode}-{self.scheduler}-{self.seed}"

    @property
    def knobs(self) -> dict:
        return {"mode": self.mode, "scheduler": self.scheduler, "seed": self.seed}


SCHEDULES = tuple(
    Schedule(mode, scheduler, seed)
    for seed, scheduler in ((1, "random"), (2, "random"), (3, "priority"), (4, "round_robin"))
    for mode in ("eager", "late", "random")
)


@dataclass(frozen=True)
class Answer:
    out: torch.Tensor
    lse: torch.Tensor | None
    kernels: tuple[str, ...]  # names, in launch order
    steps: int  # warp instructions of all launches
    seconds: float  # of this processor, without compiling
    counters: tuple[Counters, ...]  # of each launch


def turn() -> int:
    """Whose turn it is in a rotation: CUTE_FLASH_TEST_TURN, else the day."""
    chosen = os.environ.get("CUTE_FLASH_TEST_TURN", "")
    return int(chosen) if chosen else datetime.datetime.now(datetime.timezone.utc).date().toordinal()


def way_of_today(at: int, days: int, ways: int, every: int = 1) -> int | None:
    """In which of its ways the at-th of some cells runs; None on all but one of `days` days. In days * ways days each
    cell has run in each way. Counts each so manyth day alone (`every`), where the days between are another's."""
    today = turn() // every + at
    return None if today % days else today // days % ways


@contextlib.contextmanager
def counters_left_at_zero():
    """A launch whose CTAs draw their tiles must leave its counter as it was, for the next launch of the stream."""
    made: list[torch.Tensor] = []

    def counter() -> torch.Tensor:
        made.append(torch.zeros(1, dtype=torch.int32))
        return made[-1]

    with mock.patch.object(counters, "counter_for", lambda device: counter):
        yield
    assert not any(made), made


class _CompileClock:
    """Processor time that compiling takes."""

    def __init__(self) -> None:
        self.seconds, self.build = 0.0, compiler.build

    def __call__(self, *args):
        start = time.process_time()
        try:
            return self.build(*args)
        finally:
            self.seconds += time.process_time() - start


def attend(
    inputs: Inputs,
    causal: bool,
    splits: int | None,
    return_lse: bool = True,
    *,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    arch: str = ARCH,
    sms: int = SMS,
    scale: float | None = None,
    long: bool = False,
    small: bool = False,
    **knobs,
) -> Answer:
    """attention() of CPU tensors on the own kernel of a GPU with `sms` SMs.

    `splits` overrules the front door's own count; `long`: the plan of long sequences, whatever the length;
    `small`: of few query rows on a large GPU, which these all have.
    """
    clock = _CompileClock()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(counters_left_at_zero())
        enter(mock.patch.object(compiler, "build", clock))
        if splits is not None:
            enter(mock.patch.object(SplitRule, "count", lambda *_: splits))
        enter(mock.patch.dict(device_facts._SM_COUNTS, {device_facts.ARCHES[arch]: sms}))
        enter(mock.patch.object(tiles, "small", lambda problem: small))
        enter(mock.patch.object(split_rules, "WHOLE_KEYS", SPLIT_KEYS))  # few keys are shared out as many are
        if long:
            for module in (api, request):  # the warm key and the problem
                enter(mock.patch.object(module, "SHORT_KEYS", 0))
        enter(settings.override(cache_dir=None, backend=None, strict=False))
        emulation = enter(cute_flash.emulate(arch, **knobs))
        start = time.process_time()
        options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
        result = cute_flash.attention(*inputs.qkv, **options, return_lse=return_lse, backend=BACKENDS[arch])
        seconds = time.process_time() - start - clock.seconds
        launches = list(emulation.launches)
    out, lse = result if return_lse else (result, None)
    names, steps = tuple(x["kernel"] for x in launches), sum(x["steps"] for x in launches)
    return Answer(out, lse, names, steps, seconds, tuple(x["counters"] for x in launches))
