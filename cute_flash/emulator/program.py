"""A kernel compiled to steps: one Python function per segment of register-only code, one closure per effect.

Steps are indexed by the pc of their first instruction. A step takes (warp, mask) and returns the next pc, or one of
BLOCKED, SPLIT and EXITED. The mask is True when all 32 lanes take part, else a row of booleans.
"""

from __future__ import annotations

import numpy as np

from . import effects, formats, lanes, scalar, scalar_float  # noqa: F401  (scalar_float registers its emitters)
from .counters import classify
from .emit import CLASS_OF_VIEW, Emitter, operands, targets
from .memory import SHARED_WINDOW
from .ptx import Instr, Kernel
from .warp import ALL, NONE

_GLOBALS = {
    "np": np, "lanes": lanes, "formats": formats, "SHARED_WINDOW": np.uint64(SHARED_WINDOW), "ALL": ALL, "NONE": NONE,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
for _name in [
    "add",
    "subtract",
    "multiply",
    "true_divide",
    "negative",
    "absolute",
    "invert",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
    "left_shift",
    "right_shift",
    "minimum",
    "maximum",
    "fmin",
    "fmax",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "isnan",
    "where",
    "copyto",
    "copysign",
]:
    _GLOBALS[_name] = getattr(np, _name)


def _pack32(low, high):
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def _pack64(low, high):
    return np.stack([low, high], axis=1).ravel()


_GLOBALS.update(pack32=_pack32, pack64=_pack64)


class Program:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.constants = dict(_GLOBALS)
        count = len(kernel.instrs)
        self.full: list = [None] * (count + 1)
        self.part: list = [None] * (count + 1)
        self.visible = [False] * (count + 1)
        self.registers: list = [0] * (count + 1)  # bitmask of 32-bit registers a step touches
        self.writes: list = [0] * (count + 1)  # and of those it writes
        self.classes: list = [None] * (count + 1)
        self.spans: list = [None] * (count + 1)
        self._build(self._leaders())

    def _leaders(self) -> set:
        leaders = {0}
        for instr in self.kernel.instrs:
            kind = instr.parts[0]
            if kind == "bra":
                leaders.update({instr.target, instr.pc + 1})
            elif kind == "brx":
                leaders.update({instr.pc, *instr.targets, instr.pc + 1})
            elif scalar.lookup(instr) is None:
                leaders.update({instr.pc, instr.pc + 1})
        return leaders

    def _build(self, leaders: set) -> None:
        instrs = self.kernel.instrs
        starts = sorted(leader for leader in leaders if leader < len(instrs))
        for start, stop in zip(starts, [*starts[1:], len(instrs)], strict=False):
            first = instrs[start]
            self.spans[start] = (start, stop)
            if scalar.lookup(first) is None and first.parts[0] not in ("bra",):
                self._effect(first)
            else:
                self._segment(start, stop)
            self.classes[start] = classify(instrs[start:stop])
        self.full[len(instrs)] = self.part[len(instrs)] = effects.fall_off

    def _effect(self, instr: Instr) -> None:
        step, visible = effects.build(instr, self.kernel)
        self.full[instr.pc] = self.part[instr.pc] = step
        self.visible[instr.pc] = visible
        self._note(instr.pc, instr)

    def _note(self, pc: int, instr: Instr) -> None:
        for reg in operands(instr):
            if reg.cls == "R":
                self.registers[pc] |= 1 << reg.index
        for reg in targets(instr):
            if reg.cls == "R" and instr.parts[0] != "wgmma":
                self.writes[pc] |= 1 << reg.index

    def _segment(self, start: int, stop: int) -> None:
        instrs = self.kernel.instrs[start:stop]
        for instr in instrs:
            self._note(start, instr)
        self.full[start] = _Lazy(self, start, stop, masked=False)
        self.part[start] = _Lazy(self, start, stop, masked=True)

    def compile_segment(self, start: int, stop: int, masked: bool):
        emitter = Emitter(self.constants, masked)
        terminated = False
        for instr in self.kernel.instrs[start:stop]:
            if instr.parts[0] == "bra":
                _branch(emitter, instr)
                terminated = instr.pred is None
            else:
                emitter.guarded(instr, scalar.lookup(instr))
        if not terminated:
            emitter.line(f"return {stop}")
        head = ["def segment(w, m):"]
        if emitter.views:
            head.append("    f = w.registers")
        head += [f"    {v} = f.{v}" for v in sorted(emitter.views) if v in CLASS_OF_VIEW]
        scope: dict = {}
        source = "\n".join(head + emitter.lines)
        exec(
            compile(source, f"<{self.kernel.name[:40]} {start}-{stop}{' masked' if masked else ''}>", "exec"),
            self.constants,
            scope,
        )
        function = scope["segment"]
        (self.part if masked else self.full)[start] = function
        return function


class _Lazy:
    """Compiles its segment at the first call: most masked variants are never needed."""

    def __init__(self, program: Program, start: int, stop: int, masked: bool):
        self.args = (program, start, stop, masked)

    def __call__(self, warp, mask):
        program, start, stop, masked = self.args
        return program.compile_segment(start, stop, masked)(warp, mask)


def _branch(e: Emitter, instr: Instr) -> None:
    if instr.pred is None:
        e.line(f"return {instr.target}")
        return
    guard = e.src(instr.pred, "pred")
    e.line(f"b = {guard}")
    if e.base_mask is None:
        e.line("s = b.tobytes()")
        e.line(f"if s == ALL: return {instr.target}")
        e.line(f"if s != NONE: return w.diverge(m, b, {instr.target}, {instr.pc + 1})")
    else:
        e.line("b = b & m")
        e.line("s = b.tobytes()")
        e.line(f"if s == m.tobytes(): return {instr.target}")
        e.line(f"if s != NONE: return w.diverge(m, b, {instr.target}, {instr.pc + 1})")
    e.line(f"return {instr.pc + 1}")
