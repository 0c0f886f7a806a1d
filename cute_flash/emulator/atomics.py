"""atom and red: lane by lane, on global and shared memory."""

from __future__ import annotations

import numpy as np

from . import access, lanes
from .effects import effect
from .emit import type_bits
from .errors import UnknownInstruction
from .memory import check_alignment
from .memory_ops import read, space_of, vector_of, write
from .ptx import Instr, Kernel, Vec
from .registers import LANES

_OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec", "sub")
_DTYPES = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "f16x2": np.float16,
    "bf16": np.uint16,
    "bf16x2": np.uint16,
}


def _combine(op: str, kind: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    if kind in ("bf16", "bf16x2"):
        a, b = lanes.from_bf16(old), lanes.from_bf16(new)
        return lanes.bf16_bits(_combine(op, "f32", a, b)).astype(np.uint16)
    table = {
        "add": lambda: old + new,
        "sub": lambda: old - new,
        "min": lambda: np.fmin(old, new),
        "max": lambda: np.fmax(old, new),
        "and": lambda: old & new,
        "or": lambda: old | new,
        "xor": lambda: old ^ new,
        "exch": lambda: new,
        "inc": lambda: np.where(old >= new, 0, old + 1).astype(old.dtype),
        "dec": lambda: np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype),
    }
    return table[op]()


def _dtype(kind: str) -> np.dtype:
    if kind in _DTYPES:
        return np.dtype(_DTYPES[kind])
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{type_bits(kind) // 8}")


@effect("atom", "red")
def atomic(i: Instr, kernel: Kernel):
    if "async" in i.parts:
        raise UnknownInstruction("red.async")
    has_result = i.parts[0] == "atom"
    op = next(p for p in i.parts[1:] if p in _OPS)
    kind, count, space = i.parts[-1], vector_of(i), space_of(i)
    bits = type_bits(kind)
    args = i.args[1:] if has_result else i.args
    where = access.address(args[0])
    sources = [_rows(a, bits) for a in args[1:]]
    writers = _writers(i.args[0], bits) if has_result else []
    dtype, after = _dtype(kind), i.pc + 1
    unit = min(bits // 8, 8)
    acquiring = space != "shared" and any(part in i.parts for part in ("acquire", "acq_rel"))

    def step(w, mask):
        addresses = where(w)
        results = np.zeros((LANES, count), f"u{unit}")
        values = [np.stack([r(w) for r in rows], axis=1).astype(f"u{unit}") for rows in sources]
        w.cta.launch.counters.atomics += 1
        if acquiring:
            w.acquired = i
        for lane in access.lanes_of(mask):
            spot = addresses[lane : lane + 1]
            check_alignment(spot, unit)
            old = read(w, space, spot, unit, count).reshape(-1)
            results[lane] = old
            if op == "cas":
                new = values[1][lane] if (old == values[0][lane]).all() else old
            else:
                new = _combine(op, kind, old.view(dtype), values[0][lane].view(dtype)).view(f"u{unit}")
            write(w, space, spot, unit, new.reshape(1, -1))
        for n, put in enumerate(writers):
            put(w, results[:, n], mask)
        return after

    return step


def _rows(arg, bits: int) -> list:
    items = arg.items if isinstance(arg, Vec) else (arg,)
    return [access.row(item, f"u{max(bits, 16)}") for item in items]


def _writers(arg, bits: int) -> list:
    items = arg.items if isinstance(arg, Vec) else (arg,)
    return [access.setter(item, f"u{max(bits, 16)}") for item in items]
