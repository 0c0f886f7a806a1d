"""wgmma: fence, mma_async, commit_group, wait_group.

An mma_async is one operation of a warpgroup: its four warps issue it at their own pace, and it can execute once all
have. Its accumulator and A registers belong to it until a wait_group in their warp covers it.
"""

from __future__ import annotations

import re

import numpy as np

from . import access, descriptors, formats
from .effects import effect
from .emit import operands
from .engine import Operation
from .errors import IllegalInstruction, Race, UnknownInstruction
from .order import GRANULE
from .ptx import Imm, Instr, Kernel, Vec
from .warp import BLOCKED

_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")


class _WarpgroupWait:
    def __init__(self, ops: list):
        self.ops = ops

    def ready(self) -> bool:
        return all(op.done or op.ready() for op in self.ops)

    def describe(self) -> str:
        return "waits for the other warps of its warpgroup to issue the same wgmma"


@effect("wgmma")
def wgmma(i: Instr, kernel: Kernel):
    build = {"fence": _fence, "mma_async": _mma, "commit_group": _commit, "wait_group": _wait}[i.parts[1]]
    return build(i)


def _fence(i: Instr):
    after = i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        w.unfenced = 0
        return after

    return step


class Spec:
    """What one mma_async instruction says, apart from the values of its descriptors."""

    def __init__(self, i: Instr):
        if "sp" in i.parts:
            raise UnknownInstruction("sparse wgmma")
        shape = next(m for p in i.parts if (m := _SHAPE.match(p)))
        self.n = int(shape[1])
        at = i.parts.index(shape[0])
        self.d_type, self.a_type, self.b_type = i.parts[at + 1 : at + 4]
        self.element = formats.BYTES[self.a_type]
        self.d_index = np.array([r.index for r in i.args[0].items])
        self.a_index = np.array([r.index for r in i.args[1].items]) if isinstance(i.args[1], Vec) else None
        rest = [a.value for a in i.args[4:] if isinstance(a, Imm)]
        signs = [rest[0], rest[1]] if len(rest) > 1 else [1, 1]
        self.signs = [-1 if s & 0xFFFFFFFF == 0xFFFFFFFF else 1 for s in signs]
        transposes = rest[2:]
        self.a_mn_major = bool(transposes[0]) if self.a_index is None and len(transposes) > 1 else False
        self.b_mn_major = bool(transposes[-1]) if transposes else False
        self.registers = 0
        for index in [*self.d_index, *(self.a_index if self.a_index is not None else ())]:
            self.registers |= 1 << int(index)
        expected = self.n // 2 if self.d_type in ("f32", "s32") else self.n // 4
        if len(self.d_index) != expected:
            raise UnknownInstruction(f"{len(self.d_index)} accumulator registers for N = {self.n}")


class Mma(Operation):
    def __init__(self, warp, spec: Spec, a_bits: int, b_bits: int, accumulate: bool):
        super().__init__(warp)
        self.spec, self.accumulate = spec, accumulate
        self.values = (a_bits, b_bits, accumulate)
        self.warps = [warp]
        self.channel = ("wgmma", warp.cta, warp.index // 4)
        self.a = descriptors.hopper(a_bits) if spec.a_index is None else None
        self.b = descriptors.hopper(b_bits)
        self.a_chunks = descriptors.operand_chunks(self.a, 64, spec.element, spec.a_mn_major) if self.a else None
        self.b_chunks = descriptors.operand_chunks(self.b, spec.n, spec.element, spec.b_mn_major)
        self.track(self.channel)
        self.note_reads(warp)

    def note_reads(self, warp) -> None:
        """B is read for all warps, A only for the rows of each."""
        order = warp.cta.order
        if order is None:
            return
        found = self.b_chunks
        if self.a_chunks is not None:
            mine = self.a_chunks
            if not self.spec.a_mn_major:
                mine = self.a_chunks[16 * (warp.index % 4) : 16 * (warp.index % 4) + 16]
            found = np.concatenate([found.ravel(), mine.ravel()])
        order.async_access(warp.cta.shadow, descriptors.cells(found, GRANULE), self, write=False)

    def join(self, warp, a_bits: int, b_bits: int, accumulate: bool) -> None:
        if (a_bits, b_bits, accumulate) != self.values:
            raise IllegalInstruction("the warps of a warpgroup issue different descriptors for one wgmma")
        self.warps.append(warp)
        order = warp.cta.order
        if order is not None:
            self.clock = warp.clock.with_tick(self.actor, self.epoch)
            self.note_reads(warp)

    def ready(self) -> bool:
        return len(self.warps) == 4

    def run(self) -> None:
        spec, cta = self.spec, self.warp.cta
        warps = sorted(self.warps, key=lambda w: w.index)
        k = 32 // spec.element
        a = self._a(warps)
        raw = descriptors.fetch(cta.shared, self.b_chunks)
        b = formats.decode(raw, spec.b_type)
        b = b if spec.b_mn_major else b.T  # (k, n)
        product = a @ b if spec.d_type != "s32" else (a.astype(np.float64) @ b.astype(np.float64))
        if spec.signs[0] * spec.signs[1] < 0:
            product = -product
        for n, warp in enumerate(warps):
            _accumulate(warp, spec, product[16 * n : 16 * n + 16], self.accumulate)
        counters = cta.launch.counters
        counters.mma_flops += 2 * 64 * spec.n * k
        source = "RS" if spec.a_index is not None else "SS"
        counters.mma_by_shape[f"m64n{spec.n}k{k} {spec.a_type} {source}"] += 1
        counters.mma_shared_read += self.b_chunks.size * 16 + (
            self.a_chunks.size * 16 if self.a_chunks is not None else 0
        )

    def _a(self, warps: list) -> np.ndarray:
        spec = self.spec
        if spec.a_index is None:
            raw = descriptors.fetch(self.warp.cta.shared, self.a_chunks)
            a = formats.decode(raw, spec.a_type)
            return a.T if spec.a_mn_major else a
        parts = []
        for warp in warps:
            words = np.ascontiguousarray(warp.registers.matrix()[spec.a_index])  # (4, 32)
            raw = words.view(np.uint8).reshape(2, 2, 8, 4, 4).transpose(1, 2, 0, 3, 4).reshape(16, 32)
            parts.append(formats.decode(raw, spec.a_type))
        return np.concatenate(parts)


def _accumulate(warp, spec: Spec, product: np.ndarray, accumulate: bool) -> None:
    """Add a warp's 16 rows into its accumulator registers."""
    matrix, n = warp.registers.matrix(), spec.n
    if spec.d_type == "f16":
        held = np.ascontiguousarray(matrix[spec.d_index]).view(np.float16).reshape(n // 8, 2, 8, 4, 2)
        tile = held.transpose(1, 2, 0, 3, 4).reshape(16, n).astype(np.float32)
        result = (product + tile if accumulate else product).astype(np.float16)
        back = result.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 1, 3, 4)
        matrix[spec.d_index] = np.ascontiguousarray(back).view(np.uint32).reshape(n // 4, 32)
        return
    dtype = np.int32 if spec.d_type == "s32" else np.float32
    # register (column block, row half, column bit), lane (row, column pair) -> tile (row, column)
    new = product.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)
    if accumulate:
        new = matrix[spec.d_index].view(dtype) + new
    matrix[spec.d_index] = np.ascontiguousarray(new.astype(dtype)).view(np.uint32)


def _mma(i: Instr):
    spec, after = Spec(i), i.pc + 1
    a_bits = access.scalar(i.args[1], "b64") if spec.a_index is None else (lambda w, mask: 0)
    b_bits = access.scalar(i.args[2], "b64")
    scale = access.scalar(i.args[3], "pred")

    def step(w, mask):
        if not w.converged(mask) or mask is not True:
            return w.wait_for_lanes()
        if w.unfenced & spec.registers:
            _report_unfenced(w, i, spec)
        number = w.state.get("wgmma issued", 0)
        if len(w.cta.warps) < w.index // 4 * 4 + 4:
            raise w.fail(IllegalInstruction, "wgmma needs a whole warpgroup of four warps")
        shared = w.cta.warps[w.index // 4 * 4].state.setdefault("wgmmas", {})
        values = (a_bits(w, mask), b_bits(w, mask), bool(scale(w, mask)))
        op = shared.get(number)
        if op is None:
            op = shared[number] = Mma(w, spec, *values)
            w.cta.engine.issue(op)
        else:
            op.join(w, *values)
            if op.ready():
                del shared[number]
                if w.cta.engine.mode == "eager":
                    w.cta.engine.settle()
        w.state["wgmma issued"] = number + 1
        w.wgmma_open.append(op)
        w.inflight |= spec.registers
        return after

    return step


def _report_unfenced(w, i: Instr, spec: Spec) -> None:
    late = w.unfenced & spec.registers
    names = [r.name for r in operands(i) if r.cls == "R" and late >> r.index & 1]
    raise w.fail(Race, f"no wgmma.fence after the last write of {', '.join(names[:8])}, which this wgmma uses")


def _commit(i: Instr):
    after = i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        w.wgmma_groups.append(w.wgmma_open)
        w.wgmma_open = []
        return after

    return step


def _wait(i: Instr):
    keep, after = i.args[0].value, i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        groups = w.wgmma_groups
        due = [op for group in groups[: max(0, len(groups) - keep)] for op in group]
        if not all(op.done or op.ready() for op in due):
            w.fragment.wait = _WarpgroupWait(due)
            return BLOCKED
        for op in due:
            if not op.done:
                w.cta.engine.finish(op)
        if due and w.cta.order is not None:
            w.cta.order.learn(w, due[-1].actor, due[-1].epoch)
        w.wgmma_groups = groups[max(0, len(groups) - keep) :]
        w.inflight = 0
        for group in [*w.wgmma_groups, w.wgmma_open]:
            for op in group:
                w.inflight |= op.spec.registers
        return after

    return step
