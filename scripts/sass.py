"""Reads what a compiler made: registers and stack from a cubin, spills and the mix of its main loops from its SASS."""

from __future__ import annotations

import glob
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REGCOUNT, FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info: value per function symbol
SYMBOLS = 2  # section type SHT_SYMTAB
FORMAT_SIZED = 4  # an .nv.info entry whose last 16 bits are the size of what follows
MATRIX = re.compile(r"(HGMMA|QGMMA|IGMMA|HMMA|QMMA|UTC\w*MMA)\b")
BRANCHES = ("BRA", "BRX", "JMP", "EXIT", "RET", "BREAK", "BSYNC")
GROUPS = (
    *("MUFU.EX2", "MUFU", "FFMA2", "FFMA", "FMUL2", "FMUL", "FADD2", "FADD", "FMNMX", "F2FP", "FSEL", "FSETP"),
    *("ISETP", "R2P", "LOP3", "PRMT", "IMAD", "IADD3", "MOV", "SHFL", "LDSM", "STSM", "LDS", "STS", "LDTM", "STTM"),
    *("LDG", "STG", "LDL", "STL", "RED", "ATOM", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKRED", "SYNCS", "BAR"),
    *("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR", "LDGSTS", "LDGDEPBAR", "DEPBAR", "NANOSLEEP", "NOP"),
)
EXP2_LOOP = 16  # a loop with no matrix instruction but this many exponentials is shown too


@dataclass(frozen=True)
class Instruction:
    labels: frozenset[str]  # that stand right before it
    guarded: bool  # runs under a predicate
    opcode: str
    operands: str


def resources(cubin: bytes) -> dict[str, dict[str, int]]:
    """Function -> {"registers": launch value, "stack": bytes a thread}, from the ELF sections .nv.info."""
    start = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]

    def text(base: int, offset: int) -> str:
        return cubin[base + offset : cubin.index(b"\0", base + offset)].decode()

    symbols: list[str] = []
    for section in (s for s in sections if s[1] == SYMBOLS):
        offsets = range(section[4], section[4] + section[5], 24)
        symbols = [text(sections[section[6]][4], struct.unpack_from("<I", cubin, o)[0]) for o in offsets]
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for section in (s for s in sections if text(sections[names_index][4], s[0]) == ".nv.info"):
        at, end = section[4], section[4] + section[5]
        while at < end:
            layout, attribute, length = struct.unpack_from("<BBH", cubin, at)
            if layout == FORMAT_SIZED and attribute in (REGCOUNT, FRAME_SIZE):
                symbol, value = struct.unpack_from("<II", cubin, at + 4)
                found[symbols[symbol]]["registers" if attribute == REGCOUNT else "stack"] = value
            at += 4 + (length if layout == FORMAT_SIZED else 0)
    return dict(found)


def disassembler() -> str | None:
    """nvdisasm on PATH or in an installed nvidia-cuda-nvdisasm; None where there is neither."""
    installed = [
        path for folder in sys.path for path in glob.glob(os.path.join(folder, "nvidia", "*", "bin", "nvdisasm"))
    ]
    return next((path for path in (shutil.which("nvdisasm"), *installed) if path and os.access(path, os.X_OK)), None)


def disassemble(cubin: bytes, tool: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"(\.L_[\w.]+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")


def functions(text: str) -> dict[str, list[Instruction]]:
    """Kernel name -> its instructions in order."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    waiting: set[str] = set()
    for line in text.splitlines():
        if section := _SECTION.match(line):
            current = found.setdefault(section.group(1), [])
            waiting = set()
        elif label := _LABEL.match(line):
            waiting.add(label.group(1))
        elif match := _INSTRUCTION.match(line):
            guard, opcode, operands = match.groups()
            current.append(Instruction(frozenset(waiting), guard is not None, opcode, operands))
            waiting = set()
    return found


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Where control may go after each instruction."""
    at = {label: i for i, instruction in enumerate(code) for label in instruction.labels}
    after: list[list[int]] = []
    for i, instruction in enumerate(code):
        following = [i + 1] if i + 1 < len(code) else []
        if instruction.opcode.split(".")[0] not in BRANCHES:
            after.append(following)
            continue
        targets = [at[label] for label in re.findall(r"\.L_[\w.]+", instruction.operands) if label in at]
        conditional = instruction.guarded or bool(re.match(r"\s*!?U?P\w+\s*,", instruction.operands))
        falls = conditional or instruction.opcode.startswith("BSYNC") or re.search(r"\.(DIV|CONV)", instruction.opcode)
        after.append(targets + (following if falls else []))
    return after


def _reachable_in_post_order(after: Sequence[Sequence[int]]) -> list[int]:
    order: list[int] = []
    seen, stack = {0}, [(0, iter(after[0]))]
    while stack:
        node, rest = stack[-1]
        fresh = next((n for n in rest if n not in seen), None)
        if fresh is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(fresh)
            stack.append((fresh, iter(after[fresh])))
    return order


def _meet(one: int, other: int, parent: dict[int, int], rank: dict[int, int]) -> int:
    """The nearest node that dominates both, as far as `parent` is known."""
    while one != other:
        if rank[one] < rank[other]:
            one = parent[one]
        else:
            other = parent[other]
    return one


def _immediate_dominators(after: Sequence[Sequence[int]]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """(node -> its immediate dominator, node -> predecessors), by walking up from two predecessors until they meet."""
    order = _reachable_in_post_order(after)
    rank = {node: i for i, node in enumerate(order)}
    before: dict[int, list[int]] = defaultdict(list)
    for node in order:
        for n in after[node]:
            before[n].append(node)
    parent = {0: 0}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [p for p in before[node] if p in parent]
            best = known[0]
            for other in known[1:]:
                best = _meet(best, other, parent, rank)
            if parent.get(node) != best:
                parent[node], changed = best, True
    return parent, before


def loops(code: Sequence[Instruction]) -> dict[int, set[int]]:
    """First instruction -> all instructions of each natural loop. Wait loops that sit out of line join their loop."""
    after = _successors(code)
    parent, before = _immediate_dominators(after)

    def dominates(head: int, node: int) -> bool:
        while node != head and node != parent[node]:
            node = parent[node]
        return node == head

    found: dict[int, set[int]] = {}
    for node in parent:
        for head in after[node]:
            if not dominates(head, node):
                continue
            body, work = found.setdefault(head, {head}), [node]
            while work:
                member = work.pop()
                if member not in body:
                    body.add(member)
                    work.extend(p for p in before[member] if p in parent)
    return found


def mix(code: Iterable[Instruction]) -> Counter[str]:
    """Instructions by kind; matrix instructions with their shape and where operand A comes from (RS, SS, TS)."""
    counts: Counter[str] = Counter()
    for instruction in code:
        opcode = instruction.opcode
        if MATRIX.match(opcode):
            registers = re.match(r"\s*R\d+, R\d+", instruction.operands)
            source = "RS" if registers else "TS" if "tmem" in instruction.operands.split(",")[0] else "SS"
            counts[".".join(opcode.split(".")[:2]) + f" {source}"] += 1
            continue
        kind = next((g for g in GROUPS if opcode == g or opcode.startswith(g + ".")), None)
        counts[kind or ("uniform" if re.match(r"U[A-Z]|R2UR|S2UR", opcode) else "other")] += 1
    return counts


def main_loops(code: Sequence[Instruction]) -> list[tuple[int, Counter[str]]]:
    """(instructions, mix) of the innermost loops that do matrix products or many exponentials, in code order."""
    return [(len(body), mix(body)) for body in main_bodies(code)]


def ahead_of_waits(body: Sequence[Instruction]) -> list[int]:
    """For each wait of a loop for wgmma, the exponentials before it: they run while a product is in flight."""
    waits = [i for i, each in enumerate(body) if each.opcode.startswith("WARPGROUP.DEPBAR")]
    return [mix(body[:wait])["MUFU.EX2"] for wait in waits]


def ahead_of_wait(body: Sequence[Instruction]) -> int:
    """The same of the last one."""
    return [0, *ahead_of_waits(body)][-1]


def main_bodies(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The loops of main_loops()."""
    found = loops(code)
    mixes = {head: mix(code[i] for i in sorted(body)) for head, body in found.items()}

    def works(head: int) -> bool:
        return any(MATRIX.match(kind) for kind in mixes[head]) or mixes[head]["MUFU.EX2"] >= EXP2_LOOP

    shown = [h for h in sorted(found) if works(h)]
    inner = [h for h in shown if not any(o != h and found[o] < found[h] for o in shown)]
    return [[code[i] for i in sorted(found[h])] for h in inner]
