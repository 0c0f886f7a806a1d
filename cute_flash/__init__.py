"""cute_flash: exact attention. `cute_flash.attention(q, k, v)` picks the best kernel for the GPU it finds."""

import importlib
from pathlib import Path
from typing import Any

from .spec import versions

versions.require_torch()  # before the imports that an older one would fail, each in words of its own

# In a source tree the kernels stand beside this folder: Python started there finds it before an installed one.
if not Path(__file__).with_name("arch").exists():
    __path__.append(str(Path(__file__).parents[1]))

from .api import attention, explain  # noqa: E402
from .kvcache import attention_kvcache  # noqa: E402
from .runtime.dispatch import Decision  # noqa: E402
from .runtime.emulation import emulate  # noqa: E402
from .spec.errors import BackendBuildError, FallbackWarning, StrictFallbackError, UnsupportedError  # noqa: E402
from .states import merge_attention_states  # noqa: E402
from .varlen import attention_varlen  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "BackendBuildError",
    "Decision",
    "FallbackWarning",
    "StrictFallbackError",
    "UnsupportedError",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "emulate",
    "explain",
    "merge_attention_states",
]


def __getattr__(name: str) -> Any:
    """cute_flash.emulator without an import of its own; loaded when first asked for."""
    if name == "emulator":
        return importlib.import_module(".emulator", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
