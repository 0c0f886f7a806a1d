"""Plan -> callable: memory first, then disk, then the backend's build()."""

import contextlib
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..spec import settings
from ..spec.backend import Backend
from ..spec.errors import BackendBuildError
from ..spec.plan import Plan
from . import diskcache, emulation, report, toolchain

Kernel = Callable[..., Any]


class ToolchainError(Exception):
    """A module the backend compiles with does not import. Caught by the office: never reaches users."""

    def __init__(self, module: str, cause: Exception) -> None:
        super().__init__(f"import {module} fails: {cause}")
        self.module = module
        self.cause = cause


@dataclass(frozen=True)
class Compiled:
    kernel: Kernel
    origin: str  # "in memory", "from disk in 0.003 s", "compiled in 2.10 s", "" where nothing is compiled


@dataclass
class Stats:
    """How often each door was used, in this process."""

    memory: int = 0
    disk: int = 0
    compiles: int = 0


stats = Stats()
_memory: dict[tuple[Plan, str | None], Kernel] = {}
_slots: dict[tuple[Plan, str | None], threading.Lock] = {}
_table = threading.Lock()  # guards _slots and stats
_compiling = threading.Lock()  # MLIR's context is per process: two traces at once fail


def _in_a_forked_child() -> None:
    """A lock that another thread held at the fork has nobody left to open it."""
    global _table, _compiling
    _table, _compiling = threading.Lock(), threading.Lock()
    _slots.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_forked_child)


def forget() -> None:
    """For tests: an empty memory and fresh counters."""
    _memory.clear()
    stats.memory = stats.disk = stats.compiles = 0


def _count(door: str) -> None:
    with _table:
        setattr(stats, door, getattr(stats, door) + 1)


def _refuse_in_capture(plan: Plan) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the kernel for {plan} is not compiled yet, and compiling inside a CUDA graph capture would break the "
            "capture: call attention once with these options before capturing"
        )


def _import_toolchain(backend: Backend) -> None:
    for module in toolchain.modules(backend):
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken install raises more than ImportError
            raise ToolchainError(module, error) from error


def build(backend: Backend, plan: Plan) -> tuple[Any, float]:
    """Compile, one at a time in this process. Returns what the backend built and the seconds it took."""
    with _compiling:
        _import_toolchain(backend)
        make = functools.partial(backend.build, plan)
        arch = settings.current.emulate
        if arch is not None and backend.exports:
            make = functools.partial(emulation.build, arch, make)
        start = time.perf_counter()
        try:
            built = make()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            message = f"{backend.name} failed to compile {plan}: {type(error).__name__}: {error}"
            raise BackendBuildError(message) from error
        seconds = time.perf_counter() - start
    _count("compiles")
    return built, seconds


def _from_disk(root: Path, key: str, remove_bad: bool = False) -> Compiled | None:
    start = time.perf_counter()
    kernel = diskcache.load(root, key, remove_bad)
    if kernel is None:
        return None
    _count("disk")
    return Compiled(kernel, f"from disk in {time.perf_counter() - start:.3f} s")


def _build_and_store(root: Path, key: str, backend: Backend, plan: Plan) -> Compiled:
    built, seconds = build(backend, plan)
    origin = f"compiled in {seconds:.2f} s"
    facts = {"plan": str(plan), "backend": backend.name, "seconds": round(seconds, 3), "made": time.time()}
    try:
        path, unlinked = diskcache.store(root, key, built, facts)
    except OSError as error:
        _say_unusable(root, error)
        return Compiled(built, origin)
    except Exception as error:
        raise BackendBuildError(f"{backend.name} built {plan}, which does not export: {error}") from error
    report.say("compile", f"{plan}: stored as {path}")
    if unlinked:
        report.once(f"no linker on this host ({unlinked}): kernels load through the compiler's own, 0.5 s slower")
        return Compiled(built, origin)
    # The library, not the object in memory: what every later process runs, and 0.3 us a call faster.
    return Compiled(diskcache.load(root, key) or built, origin)


def _say_unusable(root: Path, error: OSError) -> None:
    report.once(f"{diskcache.unusable(root, error)}: kernels are compiled for this process only")


def _through_disk(root: Path, backend: Backend, plan: Plan) -> Compiled:
    key = diskcache.key_of(plan.key(), toolchain.fingerprint(backend.name))
    try:
        hit = _from_disk(root, key)
    except OSError:
        hit = None
    if hit is not None:
        return hit
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(diskcache.locked(root, key))
            hit = _from_disk(root, key, remove_bad=True)
        except OSError as error:
            _say_unusable(root, error)
            return _in_memory(backend, plan)
        return hit or _build_and_store(root, key, backend, plan)


def _in_memory(backend: Backend, plan: Plan) -> Compiled:
    built, seconds = build(backend, plan)
    return Compiled(built, f"compiled in {seconds:.2f} s" if plan.arch else "")


def kernel_for(backend: Backend, plan: Plan) -> Compiled:
    """The compiled kernel of a plan, from the nearest place that has it."""
    emulated = settings.current.emulate
    slot = (plan, emulated)
    kernel = _memory.get(slot)
    if kernel is not None:
        _count("memory")
        return Compiled(kernel, "in memory" if plan.arch else "")
    _refuse_in_capture(plan)
    if backend.exports:
        emulation.refuse_mixture()
    with _table:
        lock = _slots.setdefault(slot, threading.Lock())
    with lock:  # threads that want the same plan wait for the first
        kernel = _memory.get(slot)
        if kernel is not None:
            _count("memory")
            return Compiled(kernel, "in memory")
        root = settings.current.cache_dir
        on_disk = backend.exports and root is not None and not emulated
        compiled = _through_disk(root, backend, plan) if on_disk and root else _in_memory(backend, plan)
        _memory[slot] = compiled.kernel
    if compiled.origin:
        report.say("compile", f"{plan}: {compiled.origin}")
    return compiled
