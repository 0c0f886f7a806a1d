"""Matrix descriptors of wgmma and tcgen05: from 64 bits to the 16-byte chunks of shared memory they name."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .errors import IllegalInstruction
from .tensormap import swizzled_chunks

_HOPPER = {0: "0", 1: "128", 2: "64", 3: "32"}
_BLACKWELL = {0: "0", 1: "128w", 2: "128", 4: "64", 6: "32"}


@dataclass(frozen=True)
class Descriptor:
    start: int  # bytes
    leading: int  # LBO, bytes
    stride: int  # SBO, bytes
    swizzle: str


def hopper(bits: int) -> Descriptor:
    return _common(bits, _HOPPER[bits >> 62 & 3])


def blackwell(bits: int) -> Descriptor:
    if bits >> 46 & 3 != 1:
        raise IllegalInstruction(f"matrix descriptor {bits:#x} is not of version 1")
    layout = bits >> 61 & 7
    if layout not in _BLACKWELL:
        raise IllegalInstruction(f"matrix descriptor {bits:#x} has the unknown layout {layout}")
    return _common(bits, _BLACKWELL[layout])


def _common(bits: int, swizzle: str) -> Descriptor:
    if bits >> 49 & 7:
        raise IllegalInstruction(f"matrix descriptor {bits:#x} has a base offset, which is not modelled")
    return Descriptor((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle)


@functools.lru_cache(65536)
def chunks(d: Descriptor, extent: int, k_bytes: int, k_extent: int, mn_major: bool) -> np.ndarray:
    """Chunk numbers after the swizzle: (rows, k chunks) when K is contiguous, (k, row chunks) when M/N is.

    extent: rows of M or N; for MN-major operands k_extent is the number of K indices and k_bytes the bytes of one
    element.
    """
    span = int(d.swizzle.rstrip("w"))
    if mn_major:
        k = np.arange(k_extent)[:, None]
        j = np.arange(extent * k_bytes // 16)[None, :]
        if span == 0:
            offset = k % 8 * 16 + k // 8 * d.leading + j * d.stride
        elif d.swizzle == "128w":
            offset = j % 8 * 16 + j // 8 * d.leading + k % 4 * 128 + k // 4 * d.stride
        else:
            n = span // 16
            offset = j % n * 16 + j // n * d.leading + k % 8 * span + k // 8 * d.stride
    else:
        r = np.arange(extent)[:, None]
        c = np.arange(k_bytes // 16)[None, :]
        if span == 0:
            offset = r % 8 * 16 + r // 8 * d.stride + c * d.leading
        else:
            offset = r % 8 * span + r // 8 * d.stride + c * 16
    found = swizzled_chunks((d.start + offset) >> 4, d.swizzle)
    found.flags.writeable = False
    return found


def operand_chunks(d: Descriptor, rows: int, element: int, mn_major: bool) -> np.ndarray:
    """The chunks of one K = 32-byte slice of an operand with `rows` rows."""
    if mn_major:
        return chunks(d, rows, element, 32 // element, True)
    return chunks(d, rows, 32, 0, False)


def fetch(shared, found: np.ndarray) -> np.ndarray:
    """Bytes of an operand: (rows, 32) for K-major, (k, rows * element) for MN-major."""
    top = int(found.max()) * 16 + 16
    if top > shared.limit:
        raise IllegalInstruction(
            f"a matrix descriptor reaches shared memory at {top:#x}, of which {shared.limit:#x} bytes exist"
        )
    return shared.data.reshape(-1, 16)[found].reshape(found.shape[0], -1)


def cells(found: np.ndarray, granule: int) -> np.ndarray:
    """Shadow cells of chunks."""
    per = 16 // granule
    return (found.ravel()[:, None] * per + np.arange(per)).ravel()
