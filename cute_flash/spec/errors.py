"""The exceptions users meet, and the one place that lays out refusals."""

from collections.abc import Mapping, Sequence


class UnsupportedError(NotImplementedError):
    """No backend (or not the one asked for) can run the request; the message lists every refusal."""


class StrictFallbackError(UnsupportedError):
    """`CUTE_FLASH_STRICT=1` and the backend made for this GPU refused the request."""


class BackendBuildError(RuntimeError):
    """A kernel failed to compile. Never a reason to try another backend."""


class FallbackWarning(UserWarning):
    """A backend made for this device refused the request and a more general one runs instead."""


def lay_out(headline: str, refusals: Mapping[str, Sequence[str]]) -> str:
    """One headline, then one line per refusal: `  sm90: head_dim=300 is outside 8..256`."""
    lines = [f"  {name}: {sentence}" for name, sentences in refusals.items() for sentence in sentences]
    return "\n".join([headline, *lines])
