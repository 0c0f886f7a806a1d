"""The only file that reads os.environ. Values are read at import; `refresh()` re-reads, `override()` is for tests.

Every change bumps `generation`, which callers that cache a decision compare with the one they saw.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BACKEND_NAMES = ("sm100", "sm90", "triton", "reference")
LOG_TOPICS = ("dispatch", "compile")
EMULATED_ARCHES = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True)
class Settings:
    backend: str | None = None  # CUTE_FLASH_BACKEND: force one backend or raise
    log: frozenset[str] = frozenset()  # CUTE_FLASH_LOG: comma-separated topics
    strict: bool = False  # CUTE_FLASH_STRICT: a fallback is an error
    cache_dir: Path | None = None  # CUTE_FLASH_CACHE_DIR; None = no disk cache
    emulate: str | None = None  # CUTE_FLASH_EMULATE: run that architecture's kernels on CPU tensors


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def _flag(name: str, value: str) -> bool:
    if value.lower() in ("", "0", "false", "off", "no"):
        return False
    if value.lower() in ("1", "true", "on", "yes"):
        return True
    raise ValueError(f"{name}={value!r} is not 0 or 1")


def _cache_dir(environ: Mapping[str, str]) -> Path | None:
    """A leading ~ is the home folder here too: not every variable has been through a shell. Where nothing is set and no
    home is known there is none: no folder named ~ is made where the program runs."""
    given = environ.get("CUTE_FLASH_CACHE_DIR", "")
    if given:
        return None if given in ("0", "off") else Path(os.path.expanduser(given))
    root = environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    return None if root.startswith("~") else Path(root) / "cute_flash"


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from environment variables; a value outside its rule raises ValueError naming both."""
    backend = environ.get("CUTE_FLASH_BACKEND", "")
    topics = [t.strip() for t in environ.get("CUTE_FLASH_LOG", "").split(",") if t.strip()]
    emulate = environ.get("CUTE_FLASH_EMULATE", "")
    return Settings(
        backend=_choice("CUTE_FLASH_BACKEND", backend, BACKEND_NAMES) if backend else None,
        log=frozenset(_choice("CUTE_FLASH_LOG", t, LOG_TOPICS) for t in topics),
        strict=_flag("CUTE_FLASH_STRICT", environ.get("CUTE_FLASH_STRICT", "")),
        cache_dir=_cache_dir(environ),
        emulate=_choice("CUTE_FLASH_EMULATE", emulate, EMULATED_ARCHES) if emulate else None,
    )


# Variables of the DSL that change the code it emits; they are part of the disk cache's key.
_COMPILER_VARIABLES = ("ARCH", "AUTO_M2S", "COMPILER_BACKEND", "COMPILER_OPT", "DEBUG", "DRYRUN", "ENABLE_ASSERTIONS",
                       "ENABLE_PYIR", "LINEINFO", "LOC_TRACEBACKS", "TOLERATE_M2M")  # fmt: skip


def compiler_variables() -> tuple[str, ...]:
    """Those that are set, as NAME=value."""
    names = (f"CUTE_DSL_{name}" for name in _COMPILER_VARIABLES)
    return tuple(f"{name}={os.environ[name]}" for name in names if name in os.environ)


current: Settings = read(os.environ)
generation: int = 0
_of_environment = current
_overrides: list[dict[str, Any]] = []  # of the blocks that are open, oldest first


def _apply() -> None:
    global current, generation
    value = _of_environment
    for fields in _overrides:
        value = replace(value, **fields)
    current = value
    generation += 1


def refresh() -> Settings:
    """Read the environment again (it is otherwise read once, at import). Open overrides stay."""
    global _of_environment
    _of_environment = read(os.environ)
    _apply()
    return current


def _check_field(name: str, value: Any) -> None:
    """The rules of read() once more: what breaks one would be met much later, as a KeyError or a StopIteration."""
    if name in ("backend", "emulate") and value is not None:
        _choice(name, value, BACKEND_NAMES if name == "backend" else EMULATED_ARCHES)
    elif name == "log":
        if not isinstance(value, frozenset):
            raise TypeError(f"log={value!r} is not a frozenset of topics: {', '.join(LOG_TOPICS)}")
        for topic in value:
            _choice(name, topic, LOG_TOPICS)
    elif name == "strict" and not isinstance(value, bool):
        raise TypeError(f"strict={value!r} is not True or False")
    elif name == "cache_dir" and value is not None and not isinstance(value, Path):
        raise TypeError(f"cache_dir={value!r} is not a pathlib.Path or None")


@contextlib.contextmanager
def override(**fields: Any) -> Iterator[Settings]:
    """Settings with some fields replaced, for the length of a `with` block.

    Blocks may overlap and be left in any order (threads, generators): of those still open the latest entered counts.
    What is no setting, or a value outside its rule, raises TypeError or ValueError naming both, and changes nothing.
    """
    known = tuple(Settings.__dataclass_fields__)
    for name, value in fields.items():
        if name not in known:
            raise TypeError(f"{name}= is not a setting: the settings are {', '.join(known)}")
        _check_field(name, value)
    _overrides.append(fields)
    _apply()
    try:
        yield current
    finally:
        _overrides[:] = [other for other in _overrides if other is not fields]
        _apply()
