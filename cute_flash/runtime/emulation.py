"""Running an architecture's kernels on CPU tensors: the one place where the office meets the emulator.

While `settings.emulate` names an architecture, CPU tensors are dispatched as if they lay on that GPU, kernels are
compiled for it, and each launch goes through the emulator.
"""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..spec import device as device_facts
from ..spec import settings
from ..spec.device import Device
from . import toolchain

WORD = "emulated"  # in the name of the device that CPU tensors stand in for


def device_for(device: torch.device) -> Device:
    """The device a problem is dispatched for: the tensors' own, or the emulated GPU."""
    arch = settings.current.emulate
    if arch is not None and device.type == "cpu":
        return device_facts.imagined(device_facts.ARCHES[arch], WORD)
    return device_facts.describe(device)


def is_emulated(device: Device) -> bool:
    return device.name.startswith(WORD)


def refuse_mixture() -> None:
    """The emulator stands in for the library that kernels launch through, and a process binds to one of the two.

    Beside each other, an emulated kernel would launch on the GPU with host pointers, or a GPU's kernel on the CPU.
    """
    host = sys.modules.get("cute_flash.emulator.host")
    stand_in = None if host is None else host.RUNTIME.library
    if settings.current.emulate is None and stand_in is not None:
        raise RuntimeError("this process has emulated a GPU: run kernels on a real one in another process")
    if settings.current.emulate is not None and toolchain.runtime_is_loaded() and not _binds_to(stand_in):
        raise RuntimeError("this process has loaded kernels for a real GPU: emulate in another process")


def _binds_to(library: ctypes.CDLL | None) -> bool:
    """Was it opened before the real one (which importing FlashAttention-4 opens)? The first gives the symbols."""
    if library is None:
        return False
    launch, found = (where._cudaLaunchKernelEx for where in (library, ctypes.CDLL(None)))
    return ctypes.cast(launch, ctypes.c_void_p).value == ctypes.cast(found, ctypes.c_void_p).value


@functools.cache
def _for_the_process(arch: str) -> Any:
    """CUTE_FLASH_EMULATE: switched on at the first kernel, and left on."""
    from ..emulator import emulate as enter

    return enter(arch).__enter__()


def build(make: Callable[[], Any]) -> Callable[..., Any]:
    """Compile under emulation and return a kernel that launches under it, on CPU tensors."""
    from .. import emulator

    arch = settings.current.emulate
    if arch is not None and emulator.current() is None:
        _for_the_process(arch)
    return functools.partial(emulator.call, make())


@contextlib.contextmanager
def emulate(arch: str, **knobs: Any) -> Iterator[Any]:
    """Run the kernels of `arch` ("sm_90a", "sm_100a", "sm_103a") on CPU tensors, inside the `with` block.

        with cute_flash.emulate("sm_90a") as emulation:
            out = cute_flash.attention(q, k, v)      # CPU tensors, the Hopper kernel's own PTX
        print(emulation.counters.total())

    Thousands of times slower than a GPU: for tests and for reading what a kernel does. `knobs` are the emulator's
    (mode, scheduler, seed, race, resident, max_steps; see docs/emulator.md).
    """
    from .. import emulator

    with settings.override(emulate=arch), emulator.emulate(arch, **knobs) as emulation:
        yield emulation
