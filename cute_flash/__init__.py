"""cute_flash: exact attention. `cute_flash.attention(q, k, v)` picks the best kernel for the GPU it finds."""

from .api import attention, explain
from .runtime.dispatch import Decision
from .runtime.emulation import emulate
from .spec.errors import BackendBuildError, FallbackWarning, StrictFallbackError, UnsupportedError

__version__ = "0.1.0"

__all__ = [
    "BackendBuildError",
    "Decision",
    "FallbackWarning",
    "StrictFallbackError",
    "UnsupportedError",
    "attention",
    "emulate",
    "explain",
]
