"""Compiled kernels on disk: one file an entry, checked before it is opened, written whole or not at all.

An entry is a shared library followed by a trailer: a line of JSON (what it is), its length, and the SHA-256 of all
before it. Linkers and loaders ignore bytes after the ELF image. The check matters: opening a truncated library ends the
process with a bus error, or succeeds and ends it at the first call.

A lock file per key keeps one compile a key across processes; the kernel drops the lock when its holder dies.
"""

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from . import toolchain

FORMAT = "1"  # bump when the recipe below changes: it is part of every key
_MAGIC = b"cute_flash entry"
_TAIL = struct.Struct(f"<Q32s{len(_MAGIC)}s")  # length of the JSON, digest, magic

Kernel = Callable[..., Any]
_held: set[IO[str]] = set()  # lock files of this process


@dataclass(frozen=True)
class Entry:
    """One file of the cache, as `python -m cute_flash cache` lists it. `facts` is empty when the file is damaged."""

    path: Path
    size: int
    facts: dict[str, Any]


def key_of(plan_key: str, fingerprint: tuple[str, ...]) -> str:
    return hashlib.sha256(repr((FORMAT, plan_key, fingerprint)).encode()).hexdigest()[:40]


def _seal(image: bytes, facts: dict[str, Any]) -> bytes:
    text = json.dumps(facts, sort_keys=True).encode()
    digest = hashlib.sha256(image + text).digest()
    return image + text + _TAIL.pack(len(text), digest, _MAGIC)


def _unseal(data: bytes) -> dict[str, Any] | None:
    """The facts of an intact entry; None for one that is cut short or altered."""
    if len(data) < _TAIL.size:
        return None
    length, digest, magic = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    body = data[: -_TAIL.size]
    if magic != _MAGIC or length > len(body) or hashlib.sha256(body).digest() != digest:
        return None
    facts: dict[str, Any] = json.loads(body[len(body) - length :])
    return facts


def _open_library(path: Path) -> Kernel:
    import tvm_ffi

    toolchain.load_runtime_library()
    kernel: Kernel = tvm_ffi.load_module(str(path))["entry"]
    return kernel


def _open_object(path: Path) -> Kernel:
    """The slower way: the linker of the compiler's own JIT, 0.5 s to import."""
    from cutlass.cute.runtime import load_module

    kernel: Kernel = load_module(str(path), enable_tvm_ffi=True)["entry"]
    return kernel


_OPENERS = {".so": _open_library, ".o": _open_object}


def load(root: Path, key: str, remove_bad: bool = False) -> Kernel | None:
    """The kernel of an intact entry. A damaged or unloadable one counts as a miss and, under the lock, is removed."""
    for suffix, open_kernel in _OPENERS.items():
        path = root / f"{key}{suffix}"
        try:
            intact = _unseal(path.read_bytes()) is not None
        except FileNotFoundError:
            continue
        try:
            if intact:
                return open_kernel(path)
        except Exception:
            if not remove_bad:
                return None  # seen without the lock: its holder may be replacing it
        if remove_bad:
            path.unlink(missing_ok=True)
    return None


def unusable(root: Path, error: OSError) -> str:
    return f"the cache folder {root} cannot be used ({error.strerror or error})"


def fault(root: Path, make: bool = False) -> str:
    """Why nothing can be written there, or nothing. Of a folder that is missing, where it would be; or it is made."""
    try:
        if make:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        nearest = next((folder for folder in (root, *root.parents) if folder.exists()), root)
        with tempfile.TemporaryFile(dir=nearest):
            return ""
    except OSError as error:
        return unusable(root, error)


@contextlib.contextmanager
def locked(root: Path, key: str) -> Iterator[None]:
    """One holder a key, across processes and threads."""
    import fcntl

    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(root / f"{key}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the file open, too


def _in_a_forked_child() -> None:
    """Locks that other threads held at the fork are the parent's: should it die, nobody would be left to drop ours."""
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_forked_child)


def store(root: Path, key: str, exported: Any, facts: dict[str, Any]) -> tuple[Path, str]:
    """Export, link, seal and move into place. Returns the entry and why it could not be linked, or nothing."""
    workshop = root / f"{key}.building"
    shutil.rmtree(workshop, ignore_errors=True)  # left by a builder that was killed; we hold its lock now
    workshop.mkdir(mode=0o700)
    try:
        built = workshop / "kernel.o"
        exported.export_to_c(str(built), "entry")
        library = workshop / "kernel.so"
        unlinked = toolchain.link(built, library)
        product = built if unlinked else library
        sealed = workshop / "sealed"
        sealed.write_bytes(_seal(product.read_bytes(), facts))
        path = root / f"{key}{product.suffix}"
        os.replace(sealed, path)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return path, unlinked


def entries(root: Path) -> list[Entry]:
    """Every entry of the folder, newest first; what cannot be read is damaged, what is gone meanwhile is none."""
    found = []
    for path in root.glob("*"):
        if path.suffix in _OPENERS:
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, _entry(path)))
    return [entry for _, entry in sorted(found, key=lambda pair: -pair[0])]


def _entry(path: Path) -> Entry:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError:
        data = b""
    return Entry(path, len(data), _unseal(data) or {})


def clear(root: Path) -> int:
    """Remove every entry, and what killed builders left. Lock files stay: a builder may hold one. Returns the count."""
    count = 0
    for path in root.glob("*"):
        if path.suffix in _OPENERS and not path.is_dir():  # no entry is a folder: whoever made it may remove it
            path.unlink(missing_ok=True)
            count += 1
        elif path.suffix == ".building" and time.time() - path.stat().st_mtime > 3600:
            shutil.rmtree(path, ignore_errors=True)
    return count
