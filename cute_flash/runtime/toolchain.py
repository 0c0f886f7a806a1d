"""Facts about the installed compiler, found without importing it: its versions, its runtime library, the linker."""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from ..spec import settings, versions
from ..spec.backend import Backend

_PACKAGE = Path(__file__).resolve().parents[1]
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
DISTRIBUTIONS = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
# Compiler drivers first; a shared object without start files is also within a bare linker's reach.
LINKERS = ("cc", "gcc", "clang", "ld", "ld.lld")


def modules(backend: Backend) -> tuple[str, ...]:
    """What building with this backend imports."""
    declared: tuple[str, ...] = getattr(backend, "toolchain", ("cutlass", "tvm_ffi") if backend.exports else ())
    return declared


def missing(module: str) -> str:
    """Why `import module` would fail, or nothing. Cheap: looks for the module and imports none."""
    try:
        return "" if importlib.util.find_spec(module) else f"No module named {module!r}"
    except (ImportError, ValueError) as error:
        return str(error)


def outdated(module: str) -> str:
    """Why what is installed of this module is too old, or nothing."""
    if module not in versions.TOOLCHAIN:
        return ""
    distribution, oldest, install = versions.TOOLCHAIN[module]
    return versions.too_old(distribution, version(distribution), oldest, install)


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _driver_cuda_major() -> int | None:
    driver = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int(0)
    return value.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(value)) == 0 else None


@functools.cache
def runtime_library() -> Path | None:
    """The library that exported kernels call for their launches: newest CUDA major that the driver takes.

    Chosen as the compiler chooses its own, so that a kernel never meets the other one.
    """
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.origin is None:
        return None
    root = next((p for p in Path(spec.origin).parents if p.name == "nvidia_cutlass_dsl"), None)
    if root is None:
        return None
    found = {int(p.parts[-3].removeprefix("cu")): p for p in root.glob(f"cu[0-9]*/lib/{RUNTIME_LIBRARY}")}
    try:
        driver = _driver_cuda_major()
    except (OSError, AttributeError):
        driver = None  # no driver here: compiling ahead
    usable = [major for major in found if driver is None or major <= driver]
    return found[max(usable)] if usable else None


def runtime_is_loaded() -> bool:
    """Has anybody in this process (this package, the compiler, another library) opened it?"""
    path = runtime_library()
    try:
        return path is not None and bool(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    except OSError:
        return False


@functools.cache
def load_runtime_library() -> None:
    """Its symbols must be global before a kernel's shared library is opened. 43 MB, 2 ms."""
    path = runtime_library()
    if path is None:
        raise OSError(f"{RUNTIME_LIBRARY} of nvidia-cutlass-dsl was not found")
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def cpu_features() -> str:
    """The launcher inside a kernel's library is compiled for the build machine's CPU."""
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            head = file.read(8192).decode("ascii", "replace")  # the first processor; a large host lists hundreds
    except OSError:
        return ""
    for line in head.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(value.split()))
    return ""


@functools.cache
def source_hash(backend_name: str) -> str:
    """Of every source a kernel's trace can read: its folder, arch/common and the spec floor (a test keeps it so)."""
    import cute_flash.arch as arch

    root = Path(arch.__file__).parent
    digest = hashlib.sha256()
    for folder in (root / backend_name, root / "common", _PACKAGE / "spec"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder.parent)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(backend_name: str) -> tuple[str, ...]:
    """Everything beside the Plan that can change a compiled kernel."""
    library = runtime_library()
    return (
        source_hash(backend_name),
        *(f"{name} {version(name)}" for name in DISTRIBUTIONS),
        library.parts[-3] if library else "no runtime",
        cpu_features(),
        *settings.compiler_variables(),
    )


def linkers() -> list[str]:
    return [path for path in map(shutil.which, LINKERS) if path]


def link(source: Path, target: Path) -> str:
    """source.o -> target.so. Returns why not, or nothing."""
    failures = []
    for linker in linkers():
        done = subprocess.run([linker, "-shared", "-o", target, source], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return ""
        failures.append(f"{linker}: {done.stderr.strip()[:200]}")
    return "; ".join(failures) or f"none of {', '.join(LINKERS)} is installed"
