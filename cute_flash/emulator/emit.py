"""Source text for one register-only instruction: the building block of compiled segments.

A segment is a run of instructions that touch registers only. It becomes one Python function over rows of 32 lanes, so
the cost of a warp instruction is about one numpy call. Emitters live in scalar.py; this file knows operands and
masks.
"""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .ptx import Imm, Instr, Pair, Reg, Special, Sym, Vec

# type -> view letter of the register file (see registers.py)
VIEWS = {
    "pred": "P",
    "u16": "H", "b16": "H", "s16": "I", "f16": "E", "bf16": "H", "u8": "H", "s8": "I", "b8": "H",
    "u32": "R", "b32": "R", "s32": "S", "f32": "F", "f16x2": "X", "bf16x2": "R", "tf32": "R",
    "u64": "D", "b64": "D", "s64": "L", "f64": "G", "f32x2": "V", "b32x2": "W",
    "b128": "Q",
}  # fmt: skip
_BY_CLASS = {
    "H": {"u": "H", "b": "H", "s": "I", "f": "E"},
    "R": {"u": "R", "b": "R", "s": "S", "f": "F"},
    "D": {"u": "D", "b": "D", "s": "L", "f": "G"},
}
DTYPES = {
    "P": np.bool_, "H": np.uint16, "I": np.int16, "E": np.float16, "R": np.uint32, "S": np.int32, "F": np.float32,
    "X": np.float16, "D": np.uint64, "L": np.int64, "G": np.float64, "V": np.float32, "W": np.uint32, "Q": np.uint64,
}  # fmt: skip
CLASS_OF_VIEW = dict(zip("PHIERSFXDLGVWQ", "PHHHRRRRDDDDDQ", strict=False))
CLASS_BITS = {"P": 1, "H": 16, "R": 32, "D": 64, "Q": 128}
WIDE = "XVW"  # views of 64 elements: two per lane


def type_bits(kind: str) -> int:
    if kind == "pred":
        return 1
    digits = "".join(c for c in kind.split("x")[0].lstrip("abcdefstu").split("_")[0] if c.isdigit())
    lanes = int(kind.split("x")[1]) if "x" in kind and kind.split("x")[1].isdigit() else 1
    base = {"bf16": 16, "tf32": 32}.get(kind.split("x")[0])
    return (base or int(digits)) * lanes


class Emitter:
    """Collects the lines of one segment function; `mask` is the name of the lane mask in scope, or None for all
    lanes."""

    def __init__(self, constants: dict, masked: bool):
        self.constants = constants
        self.lines: list[str] = []
        self.views: set[str] = set()
        self.base_mask = "m" if masked else None
        self.mask = self.base_mask
        self.indent = "    "
        self.temporaries = 0

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def temp(self) -> str:
        self.temporaries += 1
        return f"t{self.temporaries}"

    def constant(self, view: str, bits: int) -> str:
        """A row holding an immediate, by name in the function's globals."""
        dtype = np.dtype(DTYPES[view])
        name = f"k_{view}_{bits & ((1 << 128) - 1):x}"
        if name not in self.constants:
            self.constants[name] = _row(dtype, bits, view)
        return name

    def view(self, letter: str) -> str:
        self.views.add(letter)
        return letter

    def src(self, arg, kind: str) -> str:
        """Expression for a source row seen as `kind`; a wider register is read in its own width."""
        if isinstance(arg, Imm):
            return self._immediate(arg, VIEWS[kind])
        if isinstance(arg, Special):
            return self.special(arg, kind)
        if isinstance(arg, Sym):
            return f"w.symbol({arg.name!r})"
        if not isinstance(arg, Reg):
            raise UnknownInstruction(f"operand {arg!r}")
        letter = VIEWS[kind]
        if CLASS_OF_VIEW[letter] != arg.cls:
            letter = _BY_CLASS[arg.cls][kind[0] if kind[0] in "usb" else "b"]
        text = f"{self.view(letter)}[{arg.index}]"
        return f"~{text}" if arg.negated else text

    def _immediate(self, arg: Imm, view: str) -> str:
        if view in "FV" and not arg.floating:
            return self.constant(view, arg.value if view == "V" else _f32_bits(float(arg.value)))
        if view == "G" and arg.floating == 32:
            return self.constant(view, _f64_bits(np.uint32(arg.value).view(np.float32)))
        return self.constant(view, arg.value)

    def special(self, arg: Special, kind: str) -> str:
        return f"w.special({arg.name!r}, {kind!r})"

    def dst(self, arg, kind: str) -> str | None:
        if isinstance(arg, Sym) and arg.name == "_":
            return None
        letter = VIEWS[kind]
        if CLASS_OF_VIEW[letter] != arg.cls:
            letter = _BY_CLASS[arg.cls][kind[0] if kind[0] in "usb" else "b"]
        return f"{self.view(letter)}[{arg.index}]"

    def where(self, target: str) -> str:
        if self.mask is None:
            return ""
        return f", where={self.mask}.repeat(2)" if target[0] in WIDE else f", where={self.mask}"

    def ufunc(self, name: str, target: str | None, *sources: str) -> None:
        if target is None:
            return
        if self.mask is None and name not in ("minimum", "maximum"):  # those two want their output by name
            self.line(f"{name}({', '.join(sources)}, {target})")
        else:
            self.line(f"{name}({', '.join(sources)}, out={target}{self.where(target)})")

    def put(self, target: str | None, expression: str, unsafe: bool = False) -> None:
        if target is None:
            return
        cast = ", 'unsafe'" if unsafe else ""
        self.line(f"copyto({target}, {expression}{cast}{self.where(target)})")

    def guarded(self, instr: Instr, emit) -> None:
        """Emit under the instruction's predicate, if it has one."""
        if instr.pred is None:
            emit(self, instr)
            return
        guard = self.src(instr.pred, "pred")
        name = self.temp()
        self.line(f"{name} = {guard}" if self.base_mask is None else f"{name} = {guard} & m")
        if self.base_mask is None and not instr.pred.negated:
            self.line(f"{name} = {name}.copy()")  # the instruction may overwrite its own guard
        self.mask = name
        emit(self, instr)
        self.mask = self.base_mask


def _f32_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _f64_bits(value) -> int:
    return int(np.float64(value).view(np.uint64))


def _row(dtype: np.dtype, bits: int, view: str) -> np.ndarray:
    if view == "P":
        return np.full(32, bool(bits))
    if view == "V":
        return np.tile(np.array([bits & (1 << 64) - 1], np.uint64), 32).view(np.float32)
    if view == "W":
        return np.tile(np.array([bits & (1 << 64) - 1], np.uint64), 32).view(np.uint32)
    if view == "X":
        return np.tile(np.array([bits & (1 << 32) - 1], np.uint32), 32).view(np.float16)
    size = dtype.itemsize * 8
    raw = np.array([bits & ((1 << size) - 1)], f"u{dtype.itemsize}")
    row = np.repeat(raw.view(dtype), 32)
    row.flags.writeable = False
    return row


def operands(instr: Instr) -> list[Reg]:
    """Every register an instruction names."""
    found: list[Reg] = [instr.pred] if instr.pred is not None else []

    def walk(item) -> None:
        if isinstance(item, Reg):
            found.append(item)
        elif isinstance(item, Vec):
            for one in item.items:
                walk(one)
        elif isinstance(item, Pair):
            walk(item.first)
            walk(item.second)
        elif hasattr(item, "base"):
            walk(item.base)
            for one in item.coords:
                walk(one)

    for arg in instr.args:
        walk(arg)
    return found


def targets(instr: Instr) -> list[Reg]:
    """The registers an instruction writes: those of its first operand, unless that is memory."""
    first = instr.args[0] if instr.args else None
    items = (
        first.items if isinstance(first, Vec) else (first.first, first.second) if isinstance(first, Pair) else (first,)
    )
    return [item for item in items if isinstance(item, Reg)]
