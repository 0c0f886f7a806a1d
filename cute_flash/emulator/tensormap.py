"""The 128-byte TMA descriptor as CuTe-DSL's host code writes it, and the boxes it names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import IllegalInstruction, UnknownInstruction
from .memory import HostMemory

# code -> (bytes, name)
TYPES = {
    0: (1, "u8"), 1: (2, "u16"), 2: (4, "u32"), 3: (4, "s32"), 4: (8, "u64"), 5: (8, "s64"), 6: (2, "f16"),
    7: (4, "f32"),
    8: (4, "f32"), 9: (8, "f64"), 10: (2, "bf16"),
}  # fmt: skip
SWIZZLE_SPAN = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class TensorMap:
    base: int
    rank: int
    size: int  # bytes of an element
    kind: str
    swizzle: str  # as swizzled_chunks() takes it
    dims: tuple
    strides: tuple  # bytes, of dims 1..
    box: tuple
    to_tf32: bool

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.size


def decode(raw: bytes) -> TensorMap:
    words = np.frombuffer(raw[:64], "<u4")
    flags = int(words[2])
    if flags & 0xF != 2:
        raise UnknownInstruction(f"not a tiled tensor map (kind {flags & 0xF})")
    rank = (flags >> 4 & 7) + 1
    code = flags >> 7 & 15
    if code not in TYPES or flags >> 11 & 3:
        raise UnknownInstruction(f"tensor map of element type {code}, interleave {flags >> 11 & 3}")
    size, kind = TYPES[code]
    span, wide_atom = SWIZZLE_SPAN[flags >> 13 & 3], flags >> 19 & 3
    if wide_atom > 1:
        raise UnknownInstruction(f"swizzle atom {wide_atom}")
    upper = int(words[7])
    strides = tuple((int(words[3 + d]) | (upper >> 4 * d & 15) << 32) * 16 for d in range(rank - 1))
    boxes = [int(words[13]) >> 24 & 255, *(int(words[14]) >> 8 * d & 255 for d in range(4))]
    steps = int(words[13]) & 0x7FFF
    if any(steps >> 3 * d & 7 for d in range(rank)):
        raise UnknownInstruction("tensor map with element strides")
    found = TensorMap(
        base=int(words[0]) | int(words[1]) << 32,
        rank=rank,
        size=size,
        kind=kind,
        swizzle=f"{span}w" if wide_atom and span == 128 else str(span),
        dims=tuple(int(words[8 + d]) + 1 for d in range(rank)),
        strides=strides,
        box=tuple(b + 1 for b in boxes[:rank]),
        to_tf32=bool(flags >> 16 & 1) and kind == "f32",
    )
    if span and found.box[0] * size > span:
        raise IllegalInstruction(f"box row of {found.box[0] * size} bytes is wider than its {span}-byte swizzle")
    return found


def swizzled_chunks(chunks: np.ndarray, swizzle: str) -> np.ndarray:
    """Where a 16-byte chunk of shared memory lands: a function of its absolute address."""
    if swizzle == "128":
        return chunks ^ (chunks >> 3 & 7)
    if swizzle == "64":
        return chunks ^ (chunks >> 3 & 3)
    if swizzle == "32":
        return chunks ^ (chunks >> 3 & 1)
    if swizzle == "128w":  # atoms of 32 bytes
        return chunks ^ (chunks >> 3 & 3) << 1
    return chunks


def _rows(tmap: TensorMap, coords: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Byte address of every box row (dimension 1 fastest), and whether it is inside the tensor."""
    address = np.zeros(1, np.int64)
    inside = np.ones(1, np.bool_)
    for dim in range(1, tmap.rank):
        at = coords[dim] + np.arange(tmap.box[dim], dtype=np.int64)
        good = (at >= 0) & (at < tmap.dims[dim])
        address = (at * tmap.strides[dim - 1])[:, None] + address[None, :]
        inside = good[:, None] & inside[None, :]
        address, inside = address.ravel(), inside.ravel()
    return tmap.base + address, inside


def _window(tmap: TensorMap, coords: tuple) -> tuple[int, int]:
    """First and one past last element of a box row that are inside the tensor."""
    low = max(0, -coords[0])
    high = min(tmap.box[0], tmap.dims[0] - coords[0])
    return low, max(low, high)


def _unit(tmap: TensorMap, start: int, nbytes: int) -> int:
    for unit in (8, 4, 2):
        if start % unit == 0 and nbytes % unit == 0 and tmap.base % unit == 0:
            return unit
    return 1


def _addresses(tmap: TensorMap, coords: tuple):
    """-> (mask of rows, byte addresses of the row pieces, low byte, byte count) of what is inside."""
    rows, inside = _rows(tmap, coords)
    low, high = _window(tmap, coords)
    first = (coords[0] + low) * tmap.size
    return inside, rows[inside] + first, low * tmap.size, (high - low) * tmap.size


def load_box(host: HostMemory, tmap: TensorMap, coords: tuple) -> np.ndarray:
    """The box as bytes, (rows, row bytes), zero where it leaves the tensor."""
    inside, starts, low, count = _addresses(tmap, coords)
    out = np.zeros((len(inside), tmap.box[0] * tmap.size), np.uint8)
    if count and len(starts):
        unit = _unit(tmap, int(starts[0]), count)
        piece = host.load(starts, unit, count // unit).reshape(len(starts), -1)
        out[inside, low : low + count] = np.ascontiguousarray(piece).view(np.uint8)
    if tmap.to_tf32:
        from .lanes import tf32

        out = tf32(out.view(np.float32)).view(np.uint8)
    return out


def store_box(host: HostMemory, tmap: TensorMap, coords: tuple, box: np.ndarray, combine=None) -> int:
    """Write what lies inside the tensor; `combine(old, new)` on element arrays makes it a reduction. -> bytes
    written."""
    inside, starts, low, count = _addresses(tmap, coords)
    if not count or not len(starts):
        return 0
    piece = np.ascontiguousarray(box[inside, low : low + count])
    unit = tmap.size if combine else _unit(tmap, int(starts[0]), count)
    values = piece.view(f"u{unit}").reshape(len(starts), -1)
    if combine:
        old = host.load(starts, unit, values.shape[1]).reshape(values.shape)
        values = combine(old, values)
    host.store(starts, unit, values)
    return piece.size
