"""PTX text to instructions: the subset of the grammar that NVVM and CuTe-DSL's inline assembly produce."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

REGISTER_CLASSES = {
    "pred": "P",
    "b8": "H", "u8": "H", "s8": "H",
    "b16": "H", "u16": "H", "s16": "H", "f16": "H", "bf16": "H",
    "b32": "R", "u32": "R", "s32": "R", "f32": "R", "f16x2": "R", "bf16x2": "R",
    "b64": "D", "u64": "D", "s64": "D", "f64": "D", "f32x2": "D",
    "b128": "Q",
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    cls: str  # P H R D Q: predicate, 16, 32, 64, 128 bits
    index: int
    name: str
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    value: int  # two's complement integer, or the bits of a floating constant
    floating: int = 0  # 32 or 64 when written as 0f... or 0d...


@dataclass(frozen=True)
class Sym:
    name: str


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Mem:
    base: object  # Reg, Sym or Imm
    offset: int
    coords: tuple = ()  # TMA: [map, {c0, c1, ...}]


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Pair:
    first: object
    second: object


@dataclass
class Instr:
    op: str
    parts: tuple
    args: list
    pred: Reg | None
    line: int
    text: str
    loc: tuple | None = None  # (file, line) in the Python source
    pc: int = -1
    target: int = -1
    targets: tuple = ()

    def where(self) -> str:
        python = f"  ({self.loc[0]}:{self.loc[1]})" if self.loc else ""
        return f"PTX line {self.line}: {self.text[:160]}{python}"


@dataclass
class Param:
    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    name: str
    params: list = field(default_factory=list)
    param_bytes: int = 0
    instrs: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)
    counts: dict = field(default_factory=lambda: dict.fromkeys("PHRDQ", 0))
    shared: dict = field(default_factory=dict)  # static symbol -> offset
    shared_bytes: int = 0
    local: dict = field(default_factory=dict)  # local (per-thread) symbol -> offset
    local_bytes: int = 0
    reqntid: tuple | None = None
    reqnctapercluster: tuple | None = None


_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([bufs]\d+)\s+(?:\.ptr[^\s]*(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?\s+)?([\w$]+)(?:\[(\d+)\])?"
)
_VAR = re.compile(r"\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.([bufs]\d+)\s+([\w$]+)(?:\[(\d*)\])?")
_LABEL = re.compile(r"\s*([$A-Za-z_][\w$]*)\s*:(?!:)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_REG_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>$")
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')


def _align(value: int, to: int) -> int:
    return (value + to - 1) // to * to


def parse(text: str) -> dict[str, Kernel]:
    """All entry points of a PTX module."""
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    lines = [re.sub(r"//.*", "", line) for line in text.split("\n")]
    files = {int(m[1]): m[2] for line in lines if (m := _FILE.match(line))}
    externs = {m[4] for line in lines if ".extern" in line and (m := _VAR.search(line))}
    kernels = {}
    at = 0
    while at < len(lines):
        match = _ENTRY.search(lines[at])
        if match:
            parser = _Body(Kernel(match[1]), files, externs)
            at = parser.run(lines, at)
            kernels[match[1]] = parser.kernel
        at += 1
    return kernels


class _Body:
    """Parses one entry: signature, declarations, statements with nested scopes."""

    def __init__(self, kernel: Kernel, files: dict, externs: set):
        self.kernel, self.files, self.externs = kernel, files, externs
        self.scopes: list[dict] = [{}]
        self.label_scopes: list[dict] = [{}]
        self.loc = None
        self.pending: list[tuple] = []  # (instr, label text, label scopes) resolved once all labels are known

    def run(self, lines: list, at: int) -> int:
        at = self._signature(lines, at)
        depth, buffer, start = 1, "", at
        while depth:
            line = lines[at]
            if not buffer.strip() and self._directive(line):
                at += 1
                continue
            for char in line:
                empty = not buffer.strip()
                if empty and char == "{":
                    depth += 1
                    self._open()
                elif empty and char == "}":
                    depth -= 1
                    self._close()
                elif char == ";":
                    self._statement(buffer.strip(), start + 1)
                    buffer = ""
                elif char == ":" and empty is False and self._is_label(buffer, line):
                    self._label(buffer.strip())
                    buffer = ""
                else:
                    if empty and not char.isspace():
                        start = at
                    buffer += char
                if not depth:
                    break
            buffer += "\n" if buffer else ""
            at += 1
        self._resolve()
        return at - 1

    def _signature(self, lines: list, at: int) -> int:
        header = ""
        while "{" not in re.sub(r"\{[^}]*\}", "", lines[at]):
            header += lines[at] + " "
            at += 1
        kernel = self.kernel
        for align, kind, name, count in _PARAM.findall(header):
            unit = _TYPE_BYTES[kind[1:]]
            size = unit * int(count or 1)
            offset = _align(kernel.param_bytes, int(align or unit))
            kernel.params.append(Param(name, offset, size))
            kernel.param_bytes = offset + size
        if match := re.search(r"\.reqntid\s+([\d,\s]+)", header):
            kernel.reqntid = tuple(int(v) for v in match[1].split(",") if v.strip())
        if match := re.search(r"\.reqnctapercluster\s+([\d,\s]+)", header):
            kernel.reqnctapercluster = tuple(int(v) for v in match[1].split(",") if v.strip())
        return at + 1

    def _is_label(self, buffer: str, line: str) -> bool:
        name = buffer.strip()
        return bool(re.fullmatch(r"[$A-Za-z_][\w$]*", name)) and bool(_LABEL.search(line)) and f"{name}::" not in line

    def _directive(self, line: str) -> bool:
        if match := _LOC.match(line):
            file, number = (match[3], match[4]) if match[3] else (match[1], match[2])
            self.loc = (self.files.get(int(file), "?"), int(number))
            return True
        return bool(_FILE.match(line))

    def _open(self) -> None:
        self.scopes.append({})
        self.label_scopes.append({})

    def _close(self) -> None:
        self.scopes.pop()
        self.label_scopes.pop()

    def _label(self, name: str) -> None:
        self.label_scopes[-1][name] = len(self.kernel.instrs)
        self.kernel.labels.setdefault(name, len(self.kernel.instrs))

    def _statement(self, text: str, line: int) -> None:
        text = " ".join(text.split())
        if not text or text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".branchtargets"):
            # the label just defined names a table, not a place
            name = next(k for k, v in reversed(self.label_scopes[-1].items()) if v == len(self.kernel.instrs))
            self.kernel.tables[name] = [t.strip() for t in text[len(".branchtargets") :].split(",")]
        elif text.startswith("."):
            self._variable(text)
        else:
            self._instruction(text, line)

    def _registers(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        vector = 0
        if kind in (".v2", ".v4"):
            vector = int(kind[2:])
            kind, names = names.split(None, 1)
        cls = REGISTER_CLASSES[kind.lstrip(".")]
        for name in (n.strip() for n in names.split(",")):
            match = _REG_RANGE.match(name)
            wanted = [f"{match[1]}{i}" for i in range(int(match[2]))] if match else [name]
            if vector:
                wanted = [f"{name}.{axis}" for axis in "xyzw"[:vector]]
            for one in wanted:
                self.scopes[-1][one] = Reg(cls, self.kernel.counts[cls], one)
                self.kernel.counts[cls] += 1
            if vector:
                self.scopes[-1][name] = Vec(tuple(self.scopes[-1][one] for one in wanted))

    def _variable(self, text: str) -> None:
        match = _VAR.match(text.replace(".visible", "").replace(".extern", "").strip())
        if not match or match[1] not in ("shared", "local"):
            return
        unit = _TYPE_BYTES[match[3][1:]]
        size, align = unit * int(match[5] or 1), int(match[2] or unit)
        kernel = self.kernel
        if match[1] == "shared":
            kernel.shared[match[4]] = _align(kernel.shared_bytes, align)
            kernel.shared_bytes = kernel.shared[match[4]] + size
        else:
            kernel.local[match[4]] = _align(kernel.local_bytes, align)
            kernel.local_bytes = kernel.local[match[4]] + size

    def _instruction(self, text: str, line: int) -> None:
        pred, body = None, text
        if text.startswith("@"):
            guard, body = text.split(None, 1)
            pred = self._operand(guard[1:])
        op, _, rest = body.partition(" ")
        instr = Instr(op, tuple(op.split(".")), [], pred, line, text, self.loc, len(self.kernel.instrs))
        self.kernel.instrs.append(instr)
        if instr.parts[0] in ("bra", "brx"):
            operands = _split(rest)
            self.pending.append((instr, operands[-1], list(self.label_scopes)))
            if instr.parts[0] == "brx":
                instr.args = [self._operand(operands[0])]
        elif instr.parts[0] == "call":
            instr.args = [Sym(rest)]
        else:
            instr.args = [self._operand(a) for a in _split(rest)]

    def _resolve(self) -> None:
        for instr, label, scopes in self.pending:
            if instr.parts[0] == "brx":
                instr.targets = tuple(self.kernel.labels[t] for t in self.kernel.tables[label])
                continue
            instr.target = next(s[label] for s in reversed(scopes) if label in s)

    def _operand(self, text: str):
        text = text.strip()
        if text.startswith("["):
            return self._memory(text[1:-1])
        if text.startswith("{"):
            return Vec(tuple(self._operand(t) for t in _split(text[1:-1])))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first), self._operand(second))
        if text.startswith("!"):
            reg = self._operand(text[1:])
            return Reg(reg.cls, reg.index, reg.name, True)
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if text.startswith("%"):
            return Special(text)
        return _constant(text)

    def _memory(self, text: str) -> Mem:
        parts = _split(text)
        base = parts[0]
        offset = 0
        match = re.match(r"^(.*?)\s*\+\s*(-?\w+)$", base)
        if match:
            base, offset = match[1], int(match[2], 0)
        coords = tuple(self._operand(p) for p in parts[1:])
        flat = tuple(c for item in coords for c in (item.items if isinstance(item, Vec) else (item,)))
        return Mem(self._operand(base), offset, flat)


def _constant(text: str):
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Imm(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Imm(int(text[2:], 16), 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)[uU]?", text):
        return Imm(int(text.rstrip("uU"), 0))
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
        import struct

        return Imm(struct.unpack("<I", struct.pack("<f", float(text)))[0], 32)
    return Sym(text)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += char in "[{("
        depth -= char in "]})"
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        parts.append(current.strip())
    return parts
