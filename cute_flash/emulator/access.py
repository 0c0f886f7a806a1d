"""Operand access for effects: closures that read rows, addresses and scalars of a warp, and write rows back."""

from __future__ import annotations

import numpy as np

from .emit import CLASS_OF_VIEW, DTYPES, VIEWS, _row
from .errors import UnknownInstruction
from .ptx import Imm, Mem, Reg, Special, Sym
from .registers import LANES

_CLASS_DEFAULT = {"P": "P", "H": "H", "R": "R", "D": "D", "Q": "Q"}


def _letter(arg: Reg, kind: str) -> str:
    letter = VIEWS[kind]
    return letter if CLASS_OF_VIEW[letter] == arg.cls else _CLASS_DEFAULT[arg.cls]


def row(arg, kind: str):
    """-> function(warp) giving a row of 32 lanes."""
    if isinstance(arg, Reg):
        letter, index = _letter(arg, kind), arg.index
        if arg.negated:
            return lambda w: ~getattr(w.registers, letter)[index]
        return lambda w: getattr(w.registers, letter)[index]
    if isinstance(arg, Imm):
        value = _row(np.dtype(DTYPES[VIEWS[kind]]), arg.value, VIEWS[kind])
        return lambda w: value
    if isinstance(arg, Special):
        return lambda w: w.special(arg.name, kind)
    if isinstance(arg, Sym):
        return lambda w: np.broadcast_to(np.asarray(w.symbol(arg.name)), (LANES,))
    raise UnknownInstruction(f"operand {arg!r}")


def setter(arg, kind: str):
    """-> function(warp, values, mask) writing a row; a sink ('_') swallows it."""
    if isinstance(arg, Sym):
        return lambda w, values, mask: None
    letter, index = _letter(arg, kind), arg.index

    def write(w, values, mask):
        target = getattr(w.registers, letter)[index]
        if mask is True:
            np.copyto(target, values, "unsafe")
        else:
            np.copyto(target, values, "unsafe", where=mask)

    return write


def scalar(arg, kind: str = "u32"):
    """-> function(warp, mask) giving the Python value of the first active lane."""
    if isinstance(arg, Imm):
        return lambda w, mask: arg.value
    get = row(arg, kind)
    return lambda w, mask: get(w)[first(mask)].item()


def first(mask) -> int:
    return 0 if mask is True else int(np.argmax(mask))


def lanes_of(mask) -> np.ndarray:
    return np.arange(LANES) if mask is True else np.flatnonzero(mask)


def pick(values: np.ndarray, mask) -> np.ndarray:
    return values if mask is True else values[mask]


def address(mem: Mem):
    """-> function(warp) giving int64 byte addresses of 32 lanes (coordinates excluded)."""
    offset = mem.offset
    if isinstance(mem.base, Reg):
        index = mem.base.index
        if mem.base.cls == "D":
            return lambda w: w.registers.L[index] + offset
        return lambda w: w.registers.R[index].astype(np.int64) + offset
    if isinstance(mem.base, Imm):
        fixed = np.full(LANES, mem.base.value + offset, np.int64)
        return lambda w: fixed
    name = mem.base.name
    return lambda w: np.broadcast_to(np.asarray(w.symbol(name)), (LANES,)).astype(np.int64) + offset


def address_scalar(mem: Mem):
    get = address(mem)
    return lambda w, mask: int(get(w)[first(mask)])
