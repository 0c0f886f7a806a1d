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


def build(arch: str, make: Callable[[], Any]) -> Callable[..., Any]:
    """Compile under emulation of `arch` and return a kernel that launches under it, on CPU tensors."""
    _switch_on(arch)
    return functools.partial(_launch, arch, make())


def _launch(arch: str, kernel: Callable[..., Any], *args: Any) -> Any:
    """Compiled inside a `with` block, a kernel may run outside it, where the environment variable asks for the same."""
    from .. import emulator

    _switch_on(arch)
    return emulator.call(kernel, *args)


def _switch_on(arch: str) -> None:
    """See that `arch` is the architecture emulated now. RuntimeError when it is another."""
    from .. import emulator

    on = emulator.current()
    if on is None:
        _for_the_process(arch)
    elif on.arch != arch:
        raise RuntimeError(f"a kernel for {arch} cannot run here: the emulation that is on is of {on.arch}")


def emulate(arch: str, **knobs: Any) -> contextlib.AbstractContextManager[Any]:
    """Run the kernels of `arch` ("sm_90a", "sm_100a", "sm_103a") on CPU tensors, inside the `with` block.

        with cute_flash.emulate("sm_90a") as emulation:
            out = cute_flash.attention(q, k, v)      # CPU tensors, the Hopper kernel's own PTX
        print(emulation.counters.total())

    Thousands of times slower than a GPU: for tests and for reading what a kernel does. `knobs` are the emulator's
    (mode, scheduler, seed, race, resident, max_steps; see docs/emulator.md). Blocks may nest and overlap: the latest
    entered of those still open counts. ValueError or TypeError here, not inside, for a value outside its rule.
    """
    from .. import emulator

    return _emulating(emulator.emulate(arch, **knobs))


@contextlib.contextmanager
def _emulating(emulation: Any) -> Iterator[Any]:
    with settings.override(emulate=emulation.arch), emulation:
        yield emulation
