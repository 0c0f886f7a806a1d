"""Runs the PTX of CuTe-DSL kernels on a CPU, host code included. See docs/emulator.md; Linux only.

    with cute_flash.emulator.emulate("sm_90a") as emulation:
        compiled = cute.compile(kernel, ...)      # any CuTe-DSL callable, anyone's
        compiled(q, k, v, out, lse, scale)        # plain CPU tensors
    print(emulation.counters.total())

Nothing here imports cutlass until emulation is switched on.
"""

from __future__ import annotations

import contextlib
import dataclasses

from .errors import (
    BadAccess,
    Deadlock,
    EmulatorError,
    IllegalInstruction,
    Race,
    StepLimit,
    Unavailable,
    UnknownInstruction,
)

__all__ = [
    "BadAccess",
    "Deadlock",
    "Emulation",
    "EmulatorError",
    "IllegalInstruction",
    "Race",
    "StepLimit",
    "Unavailable",
    "UnknownInstruction",
    "call",
    "current",
    "emulate",
    "register",
    "run",
]

_entered: list[Emulation] = []  # and not left yet, oldest first: the last one is on
_hooks = contextlib.ExitStack()  # what was changed for it


class Emulation:
    """An architecture and the knobs of its runs; a context manager, and the record of the launches made inside."""

    def __init__(self, arch: str, edit=None, **knobs):
        from .hooks import CAPABILITY
        from .machine import Options

        if arch not in CAPABILITY:
            raise ValueError(f"arch={arch!r} is not one of {', '.join(CAPABILITY)}")
        if edit is not None and not callable(edit):
            raise TypeError(f"edit={edit!r} is not a function from PTX text to PTX text")
        known = [field.name for field in dataclasses.fields(Options)]
        for name in knobs:
            if name not in known:
                raise TypeError(f"{name}={knobs[name]!r}: no such knob; there are {', '.join(known)} and edit")
        self.arch, self.edit = arch, edit
        self.options = Options(**knobs)
        self.launches: list[dict] = []

    def __enter__(self) -> Emulation:
        if self in _entered:
            raise EmulatorError("this emulation is on already: make another with emulate()")
        _entered.append(self)
        try:
            _switch()
        except BaseException:
            _entered.remove(self)
            _switch()
            raise
        return self

    def __exit__(self, *_) -> None:
        was_on = _entered[-1] is self
        _entered.remove(self)
        if was_on:
            _switch()

    @property
    def counters(self):
        """Counters of the last launch."""
        if not self.launches:
            raise EmulatorError("nothing was launched")
        return self.launches[-1]["counters"]


def _switch() -> None:
    """Let the latest entered emulation be the one that is on, with everything anew: so contexts may be left in any
    order."""
    global _hooks
    from .hooks import apply
    from .host import RUNTIME

    _hooks.close()
    _hooks = contextlib.ExitStack()
    RUNTIME.forget_knobs()
    if _entered:
        on = _entered[-1]
        _hooks = apply(on.arch)
        RUNTIME.options, RUNTIME.launches, RUNTIME.edit = on.options, on.launches, on.edit


def emulate(arch: str, **knobs) -> Emulation:
    """A context in which CuTe-DSL compiles for `arch` (sm_90a, sm_100a, sm_103a) and launches run on the CPU.

    mode: when asynchronous operations take effect: "eager", "late" or "random" (default).
    scheduler: "round_robin", "random" (default) or "priority"; seed: of both, 0 or more.
    race: report unordered accesses (default True). resident: clusters in flight at once, 1 or more (default 4).
    max_steps: raise StepLimit after so many steps (default None).
    strict_exit: a warp may not exit with bulk stores it has not waited for (default False).
    edit: a function from PTX text to PTX text, applied to every kernel (for planted faults).

    Contexts may nest and overlap: of those still open the latest entered is on. ValueError or TypeError, naming value
    and rule, for a bad argument.
    """
    return Emulation(arch, **knobs)


def current() -> Emulation | None:
    """The emulation that is on, innermost first."""
    return _entered[-1] if _entered else None


def call(function, *args):
    """Call a compiled or loaded function (a bare tvm_ffi.Function too) with CPU tensors; emulation must be on."""
    from .hooks import present, raising

    if not _entered:
        raise EmulatorError("no emulation is on: use `with emulate(arch):`")
    if getattr(type(function).__call__, "presents", False):  # by itself: presented twice, nobody knew the tensors
        return function(*args)
    return raising(lambda: function(*(present(a) for a in args)), args)


def run(function, *args, arch: str, **knobs) -> Emulation:
    """Run any CuTe-DSL callable once: a @cute.jit function, a compiled one or a loaded one. -> the finished
    emulation."""
    with emulate(arch, **knobs) as emulation:
        if hasattr(function, "__tvm_ffi_object__") or type(function).__module__.startswith("tvm_ffi"):
            call(function, *args)
        else:
            function(*args)
    return emulation


def register(cubin: bytes, ptx: str) -> None:
    """Make a kernel that was compiled elsewhere known: its cubin and the PTX it came from."""
    from .host import RUNTIME

    RUNTIME.register(cubin, ptx)
