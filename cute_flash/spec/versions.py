"""The oldest versions of other packages that this one runs with: pyproject.toml's bounds (a test compares them)."""

import re

TORCH = "2.9"
# What backends compile with: module -> (distribution, oldest version, what to install).
TOOLCHAIN = {
    "cutlass": ("nvidia-cutlass-dsl", "4.8.1", "nvidia-cutlass-dsl[cu13]"),
    "tvm_ffi": ("apache-tvm-ffi", "0.1.15", "apache-tvm-ffi"),
    "triton": ("triton", "3.6", "triton"),
}


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with: "2.13.0+cpu" is (2, 13, 0), "3.6.0.dev1" is (3, 6, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def too_old(name: str, found: str, oldest: str, install: str = "") -> str:
    """A sentence, or nothing. What has no version (an unpacked folder, "absent") is taken for new enough."""
    if not release(found) or release(found) >= release(oldest):
        return ""
    return f"{name} {found} is too old, {oldest} or newer is needed: pip install --upgrade '{install or name}'"


def require_torch() -> None:
    """ImportError for a torch that has not what the imports of this package ask of it."""
    import torch

    fault = too_old("torch", str(torch.__version__), TORCH)
    if fault:
        raise ImportError(fault)
