"""What a launch executed: warp instructions by class and role, MMA work, bytes moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_FAMILIES = {
    "ex2": "ex2",
    "sfu": "lg2 rcp sqrt rsqrt sin cos tanh",
    "convert": "cvt",
    "move": "mov",
    "select": "selp",
    "compare": "setp set",
    "shuffle": "shfl",
    "vote": "vote elect redux match",
    "branch": "bra brx ret exit",
    "mma": "wgmma",
    "tcgen05": "tcgen05",
    "barrier": "mbarrier bar barrier",
    "fence": "fence",
    "async copy": "cp",
    "shared": "ldmatrix stmatrix",
    "atomic": "atom red",
}
_FAMILY = {head: family for family, heads in _FAMILIES.items() for head in heads.split()}


def class_of(instr) -> str:
    """One word for an instruction: which pipe or mechanism it uses."""
    head = instr.parts[0]
    if head in ("ld", "st"):
        space = next(
            (p.split("::")[0] for p in instr.parts[1:] if p.split("::")[0] in ("shared", "global", "param", "local")),
            "generic",
        )
        return space
    if head in ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "mad", "div") and "f" in instr.parts[-1]:
        packed = "2" if "x2" in instr.parts[-1] else ""  # FFMA2, FADD2, FMUL2: one instruction, two values a lane
        return {"fma": "ffma", "mad": "ffma", "min": "fminmax", "max": "fminmax"}.get(head, "fadd/fmul") + packed
    return _FAMILY.get(head, "integer")


def classify(instrs) -> Counter:
    return Counter(class_of(i) for i in instrs)


@dataclass
class Counters:
    """Totals of one launch. Bytes are counted once per executed access of a warp or operation."""

    instructions: dict = field(default_factory=dict)  # warp index in the CTA -> Counter by class
    mma_flops: int = 0
    mma_by_shape: Counter = field(default_factory=Counter)
    shared_read: int = 0
    shared_written: int = 0
    mma_shared_read: int = 0
    tmem_read: int = 0
    tmem_written: int = 0
    l2_read: int = 0
    l2_written: int = 0
    atomics: int = 0
    ctas: int = 0
    lines: set = field(default_factory=set)  # PTX lines executed
    taught: set = field(default_factory=set)  # lines of waits that told their warp something new (with race detection)

    def shared(self, warp, nbytes: int, write: bool) -> None:
        if write:
            self.shared_written += nbytes
        else:
            self.shared_read += nbytes

    def add_hits(self, warp) -> None:
        """Fold a finished warp's step counts into classes."""
        total = self.instructions.setdefault(warp.index, Counter())
        program = warp.program
        classes, instrs = program.classes, program.kernel.instrs
        for pc, times in enumerate(warp.hits):
            if times and classes[pc]:
                self.lines.update(i.line for i in instrs[slice(*program.spans[pc])])
                for name, count in classes[pc].items():
                    total[name] += count * times

    def total(self) -> Counter:
        return sum(self.instructions.values(), Counter())

    def by_role(self, roles: dict) -> dict:
        """roles: name -> warp indices; -> name -> Counter."""
        return {
            name: sum((self.instructions.get(i, Counter()) for i in warps), Counter()) for name, warps in roles.items()
        }
