"""Plan -> callable: memory first, then disk, then the backend's build()."""

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..spec.backend import Backend
from ..spec.errors import BackendBuildError
from ..spec.plan import Plan
from . import dispatch

Kernel = Callable[..., Any]


class ToolchainError(Exception):
    """A module the backend compiles with does not import. Caught by the office: never reaches users."""

    def __init__(self, module: str, cause: ImportError) -> None:
        super().__init__(f"import {module} fails: {cause}")
        self.module = module
        self.cause = cause


@dataclass(frozen=True)
class Compiled:
    kernel: Kernel
    origin: str  # "from memory", "from disk in 3 ms", "compiled in 2.1 s"


_memory: dict[Plan, Compiled] = {}
_lock = threading.RLock()


def build(backend: Backend, plan: Plan) -> Kernel:
    for module in dispatch.toolchain(backend):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ToolchainError(module, error) from error
    try:
        return backend.build(plan)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise BackendBuildError(f"{backend.name} failed to compile {plan}: {type(error).__name__}: {error}") from error


def kernel_for(backend: Backend, plan: Plan) -> Compiled:
    with _lock:
        hit = _memory.get(plan)
        if hit is None:
            start = time.perf_counter()
            hit = _memory[plan] = Compiled(build(backend, plan), f"compiled in {time.perf_counter() - start:.2f} s")
        return hit
