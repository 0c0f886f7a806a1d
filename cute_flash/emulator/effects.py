"""Registry of instructions with effects beyond registers, predicates, and control flow."""

from __future__ import annotations

import importlib

import numpy as np

from . import access
from .errors import IllegalInstruction, UnknownInstruction
from .ptx import Instr, Kernel
from .registers import LANES, RegisterPool
from .warp import BLOCKED

REGISTRY: dict = {}
_FAMILIES = ("memory_ops", "atomics", "warp_ops", "matrix_moves", "sync_ops", "bulk", "wgmma", "tcgen05", "tmem_moves")


def effect(*names: str, visible: bool = True):
    """Register a builder (instr, kernel) -> step. `visible`: other warps can tell, so the scheduler may switch after
    it."""

    def register(builder):
        for name in names:
            REGISTRY[name] = (builder, visible)
        return builder

    return register


def build(instr: Instr, kernel: Kernel):
    """-> (step, visible)"""
    _load_families()
    entry = REGISTRY.get(instr.parts[0])
    if entry is None:
        return _unknown(instr), True
    builder, visible = entry
    try:
        step = builder(instr, kernel)
    except (UnknownInstruction, KeyError, ValueError, IndexError, StopIteration, AttributeError) as error:
        return _unknown(instr, str(error)), True
    return (_predicated(instr, step) if instr.pred is not None else step), visible


def _load_families() -> None:
    if "ld" not in REGISTRY:
        for name in _FAMILIES:
            importlib.import_module(f"{__package__}.{name}")


def _unknown(instr: Instr, why: str = ""):
    def step(w, mask):
        raise w.fail(UnknownInstruction, f"not modelled{': ' + why if why else ''}")

    return step


def _predicated(instr: Instr, step):
    guard, after = access.row(instr.pred, "pred"), instr.pc + 1

    def guarded(w, mask):
        chosen = guard(w) if mask is True else guard(w) & mask
        if not chosen.any():
            return after
        return step(w, True if chosen.all() else chosen.copy())

    return guarded


def fall_off(w, mask):
    """Running past the last instruction is a return."""
    return w.leave(mask)


@effect("ret", "exit")
def leave(i: Instr, kernel: Kernel):
    return lambda w, mask: w.leave(mask)


@effect("trap")
def trap(i: Instr, kernel: Kernel):
    def step(w, mask):
        raise w.fail(IllegalInstruction, "the kernel executed trap (a failed device assertion, for instance)")

    return step


@effect("brx")
def indirect(i: Instr, kernel: Kernel):
    index, targets = access.row(i.args[0], "u32"), i.targets

    def step(w, mask):
        chosen = index(w)
        active = access.pick(chosen, mask)
        if (active == active[0]).all():
            return targets[int(active[0])]
        lanes = w.fragment.lanes()
        return w.split_at({targets[int(v)]: lanes & (chosen == v) for v in np.unique(active)})

    return step


class _RegisterWait:
    def __init__(self, pool: RegisterPool, need: int):
        self.pool, self.need = pool, need

    def ready(self) -> bool:
        return self.pool.free >= self.need

    def describe(self) -> str:
        return (
            f"waits for {self.need} registers, {self.pool.free} are free "
            f"(the CTA started with {self.pool.at_launch} a thread)"
        )


@effect("setmaxnreg", visible=False)
def setmaxnreg(i: Instr, kernel: Kernel):
    count, after, raising = i.args[0].value, i.pc + 1, "inc" in i.parts

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        if count % 8 or not 24 <= count <= 256:
            raise w.fail(IllegalInstruction, f"setmaxnreg {count}: a multiple of 8 between 24 and 256 is needed")
        if w.cta.program.kernel.reqntid is None and not w.cta.launch.block:
            raise w.fail(IllegalInstruction, "setmaxnreg without a known block size")
        pool = w.cta.registers
        held = w.state.get("maxnreg", pool.at_launch)
        if (count > held) != raising:
            return after  # nothing to take, nothing to give
        need = (count - held) * LANES
        if need > pool.free:
            w.fragment.wait = _RegisterWait(pool, need)
            return BLOCKED
        pool.free -= need
        w.state["maxnreg"] = count
        return after

    return step


@effect(
    "nanosleep",
    "pmevent",
    "membar",
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    visible=True,
)
def nothing(i: Instr, kernel: Kernel):
    """Hints, and orderings that a sequentially consistent memory has anyway."""
    after = i.pc + 1
    return lambda w, mask: after


@effect("griddepcontrol")
def griddepcontrol(i: Instr, kernel: Kernel):
    """See succession.py."""
    after = i.pc + 1

    def launch_dependents(w, mask):
        launch = w.cta.launch
        launch.lets_start, launch.lets_start_early = True, launch.ahead is not None and not launch.ahead.landed
        return after

    def wait(w, mask):
        launch = w.cta.launch
        if launch.ahead is None or launch.ahead.landed:
            return after
        launch.ahead.waited = True
        if launch.engine.at_once():
            launch.ahead.land()
            return after
        w.fragment.wait = launch.ahead
        return BLOCKED

    return wait if "wait" in i.parts else launch_dependents


__all__ = ["BLOCKED", "REGISTRY", "build", "effect", "fall_off"]
