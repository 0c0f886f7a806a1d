"""tcgen05: allocation, mma, commit, cp. Loads and stores of TMEM are in tmem_moves.py.

Operations of one issuing warp execute in order; a commit in their stream arrives on its mbarrier when all before it
are done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import access, descriptors, formats, tmem_moves
from .effects import effect
from .engine import Operation
from .errors import IllegalInstruction, UnknownInstruction
from .memory_ops import write
from .order import GRANULE
from .ptx import Imm, Instr, Kernel, Mem, Vec
from .warp import BLOCKED

_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}


@effect("tcgen05")
def tcgen05(i: Instr, kernel: Kernel):
    kind = i.parts[1]
    table = {
        "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "mma": _mma, "commit": _commit,
        "cp": _cp, "ld": tmem_moves.load, "st": tmem_moves.store,
        "wait::ld": tmem_moves.wait_load, "wait::st": tmem_moves.wait_store,
        "fence::before_thread_sync": _fence, "fence::after_thread_sync": _fence,
    }  # fmt: skip
    if kind not in table:
        raise UnknownInstruction(i.op)
    if kind == "alloc":
        _one_group(kernel)
    return table[kind](i)


def _one_group(kernel: Kernel) -> None:
    """PTX: all tcgen05 instructions of a kernel name the same .cta_group."""
    of_tcgen05 = (i for i in kernel.instrs if i.parts[0] == "tcgen05")
    groups = {part for i in of_tcgen05 for part in i.parts if part.startswith("cta_group::")}
    if len(groups) > 1:
        raise IllegalInstruction(f"{kernel.name} mixes {' and '.join(sorted(groups))} in its tcgen05 instructions")


def _fence(i: Instr):
    """Orders tcgen05 operations across thread synchronisation; a sequentially consistent memory needs nothing."""
    after = i.pc + 1
    return lambda w, mask: after


def paired(i: Instr) -> bool:
    return "cta_group::2" in i.parts


def pair_of(cta) -> list:
    """Even and odd CTA of the pair a CTA belongs to."""
    even = cta.rank & ~1
    return [cta.peer(even), cta.peer(even + 1)]


# --- allocation ---------------------------------------------------------------------------------------
class _PairWait:
    def __init__(self, meeting: dict, ctas: list, number: int, what: str):
        self.meeting, self.ctas, self.number, self.what = meeting, ctas, number, what

    def ready(self) -> bool:
        return all(self.meeting["count"].get(cta, 0) >= self.number for cta in self.ctas)

    def describe(self) -> str:
        return f"waits for the other CTA of its pair to {self.what}"


class _SpaceWait:
    def __init__(self, tmem, columns: int):
        self.tmem, self.columns = tmem, columns

    def ready(self) -> bool:
        free = ~self.tmem.allocated
        return any(free[s : s + self.columns].all() for s in range(0, 512 - self.columns + 1, self.columns))

    def describe(self) -> str:
        return f"waits for {self.columns} free TMEM columns (allocated: {self.tmem.blocks})"


def _meet(w, what: str) -> dict | None:
    """One warp of each CTA of a pair gets here together; None while the other is missing, then their meeting."""
    even = w.cta.rank & ~1
    ctas, order = w.cta.cluster.ctas[even : even + 2], w.cta.order
    meeting = w.cta.cluster.rendezvous.setdefault((what, even), {"count": {}, "clock": None, "granted": {}})
    if w.fragment.token is None:
        number = meeting["count"].get(w.cta, 0) + 1
        meeting["count"][w.cta] = number
        w.fragment.token = number
        if order is not None:
            clock = order.release(w)
            meeting["clock"] = clock if meeting["clock"] is None else meeting["clock"].joined(clock)
    wait = _PairWait(meeting, ctas, w.fragment.token, what)
    if not wait.ready():
        w.fragment.wait = wait
        return None
    if order is not None:
        order.acquire(w, meeting["clock"])
    return meeting


def _grant(w, columns: int, two: bool) -> int | None:
    """First column of a new block, or None while the other CTA or the space is missing."""
    if not two:
        start = w.cta.tmem.allocate(columns)
        if start is None:
            w.fragment.wait = _SpaceWait(w.cta.tmem, columns)
        return start
    meeting = _meet(w, "allocate TMEM")
    if meeting is None:
        return None
    granted = meeting["granted"]
    if w.fragment.token not in granted:  # for both CTAs at once: the leader's first MMA writes the TMEM of both
        starts = {cta: cta.tmem.allocate(columns) for cta in pair_of(w.cta)}
        if None in starts.values():
            raise w.fail(UnknownInstruction, "a paired tcgen05.alloc that has to wait for free columns")
        granted[w.fragment.token] = starts
    start = granted[w.fragment.token][w.cta]
    w.fragment.token = None
    return start


def _alloc(i: Instr):
    address, columns, after = access.address(i.args[0]), access.scalar(i.args[1]), i.pc + 1
    two = paired(i)

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        count = columns(w, mask)
        if count < 32 or count > 512 or count & (count - 1):
            raise w.fail(
                IllegalInstruction, f"tcgen05.alloc of {count} columns: a power of two from 32 to 512 is needed"
            )
        if not w.cta.tmem.permit:
            raise w.fail(IllegalInstruction, "tcgen05.alloc after relinquish_alloc_permit")
        start = _grant(w, count, two)
        if start is None:
            return BLOCKED
        one = np.zeros(32, np.bool_)
        one[access.first(mask)] = True
        write(w, "shared", address(w)[one], 4, np.array([start], np.uint32))
        return after

    return step


def _dealloc(i: Instr):
    start, columns, after, two = access.scalar(i.args[0]), access.scalar(i.args[1]), i.pc + 1, paired(i)

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        if two and _meet(w, "deallocate TMEM") is None:
            return BLOCKED
        w.fragment.token = None
        tmem, first, count = w.cta.tmem, start(w, mask) & 0xFFFF, columns(w, mask)
        tmem.free(first, count)
        order = w.cta.order
        if order is not None:  # whoever still uses the columns must be known to be done
            event = order.event(w.actor, order.epochs[w.actor], w.instr(), w, True, False)
            order.access(tmem.shadow, tmem.cells(0, 128, first, count), event, w.clock)
        return after

    return step


def _relinquish(i: Instr):
    after = i.pc + 1

    def step(w, mask):
        w.cta.tmem.permit = False
        return after

    return step


# --- mma ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """An instruction descriptor, decoded."""

    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_mn_major: bool
    b_mn_major: bool
    negative: bool

    @property
    def element(self) -> int:
        return formats.BYTES[self.a_type]


def decode_shape(bits: int, kind: str) -> Shape:
    if bits & 0b100:
        raise UnknownInstruction("sparse tcgen05.mma")
    names = _FORMATS[kind]
    d_type = {0: "f16", 1: "f32", 2: "s32"}[bits >> 4 & 3]
    if d_type == "f16":
        raise UnknownInstruction("tcgen05.mma with an f16 accumulator")
    a, b = bits >> 7 & 7, bits >> 10 & 7
    if a not in names or b not in names:
        raise UnknownInstruction(f"tcgen05.mma operand formats {a} and {b} of kind {kind}")
    return Shape(
        m=(bits >> 24 & 31) << 4,
        n=(bits >> 17 & 63) << 3,
        a_type=names[a],
        b_type=names[b],
        d_type=d_type,
        a_mn_major=bool(bits >> 15 & 1),
        b_mn_major=bool(bits >> 16 & 1),
        negative=bool((bits >> 13 ^ bits >> 14) & 1),
    )


def _placement(rows: int, n: int, two: bool, ws: bool) -> tuple[np.ndarray, int]:
    """Lane of each accumulator row for the two column halves, (2, rows), and the columns of a half (n when not
    split)."""
    i = np.arange(rows)
    if rows == 128:
        return np.stack([i, i]), n
    if rows == 64 and not two and not ws:
        lane = 32 * (i // 16) + i % 16
        return np.stack([lane, lane]), n
    if rows == 64:
        return np.stack([i, i + 64]), n // 2
    if rows == 32 and ws:
        return np.stack([i + 32 * q for q in range(4)]), n // 4
    raise IllegalInstruction(f"tcgen05.mma with {rows} rows per CTA")


class Mma(Operation):
    def __init__(self, warp, i: Instr, shape: Shape, where: dict):
        super().__init__(warp)
        self.shape, self.accumulate, self.ws = shape, where["accumulate"], "ws" in i.parts
        self.two = paired(i)
        self.ctas = pair_of(warp.cta) if self.two else [warp.cta]
        if self.two and warp.cta.rank & 1:
            raise IllegalInstruction("tcgen05.mma with cta_group::2 issued by the odd CTA of its pair")
        self.rows = shape.m // len(self.ctas)
        self.d, self.a_tmem = where["d"], where.get("a_tmem")
        b = descriptors.blackwell(where["b"])
        self.b_chunks = descriptors.operand_chunks(b, shape.n // len(self.ctas), shape.element, shape.b_mn_major)
        self.a_chunks = None
        if self.a_tmem is None:
            a = descriptors.blackwell(where["a"])
            self.a_chunks = descriptors.operand_chunks(a, self.rows, shape.element, shape.a_mn_major)
        self.lanes, self.columns = _placement(self.rows, shape.n, self.two, self.ws)
        self.base_lane, self.base_column = self.d >> 16, self.d & 0xFFFF
        self.channel = ("tcgen05", warp)
        for cta in self.ctas:
            cta.tmem.check(self.base_column, self.columns)
            if self.a_tmem is not None:
                cta.tmem.check(self.a_tmem & 0xFFFF, 8)
        self.track(self.channel)
        self._note()

    def _note(self) -> None:
        order = self.warp.cta.order
        if order is None:
            return
        for cta in self.ctas:
            found = (
                self.b_chunks.ravel()
                if self.a_chunks is None
                else np.concatenate([self.a_chunks.ravel(), self.b_chunks.ravel()])
            )
            order.async_access(cta.shadow, descriptors.cells(found, GRANULE), self, write=False)
            lanes = np.unique((self.lanes.ravel() + self.base_lane) // 16 * 16)
            if self.a_tmem is not None:
                cells = np.concatenate([cta.tmem.cells(int(lane), 16, self.a_tmem & 0xFFFF, 8) for lane in lanes])
                order.async_access(cta.tmem.shadow, cells, self, write=False)
            cells = np.concatenate([cta.tmem.cells(int(lane), 16, self.base_column, self.columns) for lane in lanes])
            order.async_access(cta.tmem.shadow, cells, self, write=True)

    def run(self) -> None:
        shape = self.shape
        b = np.concatenate([self._b(cta) for cta in self.ctas], axis=1)  # (k, n)
        for cta in self.ctas:
            self._one(cta, b)
        counters = self.warp.cta.launch.counters
        counters.mma_flops += 2 * shape.m * shape.n * (32 // shape.element)
        source = "TS" if self.a_chunks is None else "SS"
        name = f"m{shape.m}n{shape.n}k{32 // shape.element} {shape.a_type} {source}{' 2-CTA' if self.two else ''}"
        counters.mma_by_shape[name] += 1
        per_cta = self.b_chunks.size * 16 + (self.a_chunks.size * 16 if self.a_chunks is not None else 0)
        counters.mma_shared_read += per_cta * len(self.ctas)

    def _b(self, cta) -> np.ndarray:
        raw = descriptors.fetch(cta.shared, self.b_chunks)
        b = formats.decode(raw, self.shape.b_type)
        return b if self.shape.b_mn_major else b.T

    def _a(self, cta, lanes: np.ndarray) -> np.ndarray:
        shape = self.shape
        if self.a_chunks is not None:
            a = formats.decode(descriptors.fetch(cta.shared, self.a_chunks), shape.a_type)
            return a.T if shape.a_mn_major else a
        column = self.a_tmem & 0xFFFF
        words = np.ascontiguousarray(cta.tmem.data[lanes + (self.a_tmem >> 16), column : column + 8])
        return formats.decode(words.view(np.uint8), shape.a_type)

    def _one(self, cta, b: np.ndarray) -> None:
        """Accumulate this CTA's rows, one column part after the other where the layout splits N over lanes."""
        data, width = cta.tmem.data, self.columns
        cta.launch.counters.tmem_written += self.rows * self.shape.n * 4
        for part in range(self.shape.n // width):
            lanes = self.lanes[part]
            product = self._a(cta, lanes) @ b[:, part * width : (part + 1) * width]
            if self.shape.negative:
                product = -product
            where = np.ix_(lanes + self.base_lane, np.arange(self.base_column, self.base_column + width))
            dtype = np.int32 if self.shape.d_type == "s32" else np.float32
            if self.accumulate:
                product = data[where].view(dtype) + product
            data[where] = np.ascontiguousarray(product.astype(dtype)).view(np.uint32)


def _mma(i: Instr):
    if "block_scale" in i.parts or "sp" in i.parts:
        raise UnknownInstruction(i.op)
    kind = next(p.split("::")[1] for p in i.parts if p.startswith("kind::"))
    if kind not in _FORMATS:
        raise UnknownInstruction(i.op)
    d = access.address_scalar(i.args[0])
    a_in_tmem = isinstance(i.args[1], Mem)
    a = access.address_scalar(i.args[1]) if a_in_tmem else access.scalar(i.args[1], "b64")
    b, shape_bits = access.scalar(i.args[2], "b64"), access.scalar(i.args[3])
    rest = i.args[4:]
    disabled = [access.scalar(x) for x in rest.pop(0).items] if rest and isinstance(rest[0], Vec) else []
    if len(rest) > 1 and not (isinstance(rest[1], Imm) and rest[1].value == 0):
        raise UnknownInstruction(f"{i.op} with an input scale")
    enable = access.scalar(rest[0], "pred") if rest else (lambda w, mask: True)
    shapes: dict = {}
    after = i.pc + 1

    def step(w, mask):
        for one in tmem_moves.single_lanes(mask):
            bits = shape_bits(w, one)
            if bits not in shapes:
                shapes[bits] = decode_shape(bits, kind)
            if any(get(w, one) for get in disabled):
                raise w.fail(UnknownInstruction, "disabled output lanes")
            where = {"d": d(w, one), "b": b(w, one), "accumulate": bool(enable(w, one))}
            where["a_tmem" if a_in_tmem else "a"] = a(w, one)
            w.cta.engine.issue(Mma(w, i, shapes[bits], where))
        return after

    return step


class Commit(Operation):
    def __init__(self, warp, barriers: list):
        super().__init__(warp)
        self.barriers = tuple(barriers)
        self.channel = ("tcgen05", warp)
        self.track(self.channel)

    def run(self) -> None:
        for barrier in self.barriers:
            if barrier.cta is not self.warp.cta:
                barrier.cta.check_alive()
            barrier.arrive(1, self.clock)


def _commit(i: Instr):
    address, after = access.address_scalar(i.args[0]), i.pc + 1
    multicast = access.scalar(i.args[1], "u16") if "multicast::cluster" in i.parts else None

    def step(w, mask):
        for one in tmem_moves.single_lanes(mask):
            at = address(w, one)
            if multicast is None:
                barriers = [w.cta.mbarrier(at, w)]
            else:
                chosen = multicast(w, one) & 0xFFFF
                ranks = [r for r in range(len(w.cta.cluster.ctas)) if chosen >> r & 1]
                barriers = [w.cta.mbarrier(r << 24 | at & 0xFFFFFF, w) for r in ranks]
            w.cta.engine.issue(Commit(w, barriers))
        return after

    return step


# --- cp -------------------------------------------------------------------------------------------------
_CP = {"128x256b": (128, 32), "128x128b": (128, 16), "64x128b": (64, 16), "32x128b": (32, 16)}


class Copy(Operation):
    def __init__(self, warp, i: Instr, column: int, bits: int):
        super().__init__(warp)
        self.rows, width = _CP[next(p for p in i.parts if p in _CP)]
        self.cross = any(p.endswith("02_13") for p in i.parts)
        self.column, self.columns = column & 0xFFFF, width // 4
        self.ctas = pair_of(warp.cta) if paired(i) else [warp.cta]
        self.chunks = descriptors.chunks(descriptors.blackwell(bits), self.rows, width, 0, False)
        self.channel = ("tcgen05", warp)
        self.track(self.channel)
        for cta in self.ctas:
            cta.tmem.check(self.column, self.columns)
            if warp.cta.order is not None:
                warp.cta.order.async_access(cta.shadow, descriptors.cells(self.chunks, GRANULE), self, write=False)
                cells = cta.tmem.cells(0, 128, self.column, self.columns)
                warp.cta.order.async_access(cta.tmem.shadow, cells, self, write=True)

    def run(self) -> None:
        for cta in self.ctas:
            raw = descriptors.fetch(cta.shared, self.chunks)
            words = np.ascontiguousarray(raw).view(np.uint32)
            quarters = words.reshape(-1, 32, self.columns)
            if self.rows == 64:
                order = [0, 1, 0, 1] if self.cross else [0, 0, 1, 1]
            else:
                order = [0] * 4 if self.rows == 32 else [0, 1, 2, 3]
            cta.tmem.data[:, self.column : self.column + self.columns] = np.concatenate([quarters[q] for q in order])


def _cp(i: Instr):
    if any("x16" in p or p.startswith(("b8x", "b6", "b4")) for p in i.parts[2:]) or not any(p in _CP for p in i.parts):
        raise UnknownInstruction(i.op)
    column, bits, after = access.address_scalar(i.args[0]), access.scalar(i.args[1], "b64"), i.pc + 1

    def step(w, mask):
        for one in tmem_moves.single_lanes(mask):
            w.cta.engine.issue(Copy(w, i, column(w, one), bits(w, one)))
        return after

    return step
