"""cute_flash: exact attention. `cute_flash.attention(q, k, v)` picks the best kernel for the GPU it finds."""

import importlib
from typing import Any

from .api import attention, explain
from .kvcache import attention_kvcache
from .runtime.dispatch import Decision
from .runtime.emulation import emulate
from .spec.errors import BackendBuildError, FallbackWarning, StrictFallbackError, UnsupportedError
from .states import merge_attention_states
from .varlen import attention_varlen

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
