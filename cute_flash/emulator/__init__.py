"""Runs the PTX of CuTe-DSL kernels on a CPU, host code included. See docs/emulator.md; Linux only.

    with cute_flash.emulator.emulate("sm_90a") as emulation:
        compiled = cute.compile(kernel, ...)      # any CuTe-DSL callable, anyone's
        compiled(q, k, v, out, lse, scale)        # plain CPU tensors
    print(emulation.counters.total())

Nothing here imports cutlass until emulation is switched on.
"""

from __future__ import annotations

import contextlib

from .errors import BadAccess, Deadlock, EmulatorError, IllegalInstruction, Race, UnknownInstruction

__all__ = [
    "BadAccess",
    "Deadlock",
    "Emulation",
    "EmulatorError",
    "IllegalInstruction",
    "Race",
    "UnknownInstruction",
    "call",
    "current",
    "emulate",
    "register",
    "run",
]

_stack: list[Emulation] = []


class Emulation:
    """An architecture and the knobs of its runs; a context manager, and the record of the launches made inside."""

    def __init__(self, arch: str, edit=None, **knobs):
        from .machine import Options

        self.arch, self.edit = arch, edit
        self.options = Options(**knobs)
        self.launches: list[dict] = []
        self._hooks: contextlib.ExitStack | None = None
        self._outer: tuple = ()

    def __enter__(self) -> Emulation:
        from .hooks import apply
        from .host import RUNTIME

        self._hooks = apply(self.arch)
        self._outer = (RUNTIME.options, RUNTIME.launches, RUNTIME.edit)
        RUNTIME.options, RUNTIME.launches, RUNTIME.edit = self.options, self.launches, self.edit
        _stack.append(self)
        return self

    def __exit__(self, *_) -> None:
        from .host import RUNTIME

        _stack.remove(self)
        RUNTIME.options, RUNTIME.launches, RUNTIME.edit = self._outer
        if self._hooks is not None:
            self._hooks.close()

    @property
    def counters(self):
        """Counters of the last launch."""
        if not self.launches:
            raise EmulatorError("nothing was launched")
        return self.launches[-1]["counters"]


def emulate(arch: str, **knobs) -> Emulation:
    """A context in which CuTe-DSL compiles for `arch` (sm_90a, sm_100a, sm_103a) and launches run on the CPU.

    mode: when asynchronous operations take effect: "eager", "late" or "random" (default).
    scheduler: "round_robin", "random" (default) or "priority"; seed: of both.
    race: report unordered accesses (default True). resident: clusters in flight at once (default 4).
    max_steps: give up after so many steps (default None).
    edit: a function from PTX text to PTX text, applied to every kernel (for planted faults).
    """
    return Emulation(arch, **knobs)


def current() -> Emulation | None:
    """The emulation that is on, innermost first."""
    return _stack[-1] if _stack else None


def call(function, *args):
    """Call a compiled or loaded function (a bare tvm_ffi.Function too) with CPU tensors; emulation must be on."""
    from .hooks import present, raising

    if not _stack:
        raise EmulatorError("no emulation is on: use `with emulate(arch):`")
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
