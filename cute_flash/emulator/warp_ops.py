"""Exchange between the lanes of a warp: shuffles, votes, elections, reductions; and cluster address arithmetic."""

from __future__ import annotations

import numpy as np

from . import access
from .effects import effect
from .emit import CLASS_BITS
from .errors import UnknownInstruction
from .memory import SHARED_WINDOW
from .ptx import Imm, Instr, Kernel, Pair
from .registers import LANES

_LANE = np.arange(LANES)


def member_lanes(w, mask, get_mask) -> np.ndarray:
    """The member mask of the executing lanes as booleans."""
    bits = int(get_mask(w)[access.first(mask)]) & 0xFFFFFFFF
    return (bits >> _LANE) & 1 == 1


def collective(i: Instr, mask_arg, body):
    """A step that first gathers all live lanes of the member mask; body(w, mask, members) does the work."""
    get_mask, after = access.row(mask_arg, "u32"), i.pc + 1
    constant = isinstance(mask_arg, Imm) and mask_arg.value & 0xFFFFFFFF == 0xFFFFFFFF

    def step(w, mask):
        if constant and mask is True:
            body(w, mask, None)
            return after
        members = member_lanes(w, mask, get_mask)
        if not w.converged(mask, members):
            return w.wait_for_lanes()
        body(w, mask, members)
        return after

    return step


@effect("shfl", visible=False)
def shuffle(i: Instr, kernel: Kernel):
    mode = i.parts[2]
    target = i.args[0]
    put = access.setter(target.first if isinstance(target, Pair) else target, "b32")
    put_valid = access.setter(target.second, "pred") if isinstance(target, Pair) else None
    source, b, c = access.row(i.args[1], "b32"), access.row(i.args[2], "u32"), access.row(i.args[3], "u32")
    fixed = _lanes_from(mode, i.args[2], i.args[3])

    def body(w, mask, members):
        if fixed is not None:
            lanes, valid = fixed
        else:
            lanes, valid = _sources(mode, b(w).astype(np.int64), c(w).astype(np.int64))
        put(w, source(w)[lanes], mask)
        if put_valid:
            put_valid(w, valid, mask)

    return collective(i, i.args[4], body)


def _lanes_from(mode: str, b, c):
    if isinstance(b, Imm) and isinstance(c, Imm):
        return _sources(mode, np.full(LANES, b.value), np.full(LANES, c.value))
    return None


def _sources(mode: str, b: np.ndarray, c: np.ndarray):
    """Source lane of each lane, and whether it was in range."""
    clamp, segment = c & 31, (c >> 8) & 31
    b = b & 31
    high = (_LANE & segment) | (clamp & ~segment & 31)
    low = _LANE & segment
    if mode == "up":
        j = _LANE - b
        valid = j >= high
    elif mode == "down":
        j = _LANE + b
        valid = j <= high
    elif mode == "bfly":
        j = _LANE ^ b
        valid = j <= high
    elif mode == "idx":
        j = low | (b & ~segment & 31)
        valid = j <= high
    else:
        raise UnknownInstruction(f"shfl.{mode}")
    return np.where(valid, j, _LANE) & 31, valid


@effect("vote", visible=False)
def vote(i: Instr, kernel: Kernel):
    mode = i.parts[2]
    put = access.setter(i.args[0], "b32" if mode == "ballot" else "pred")
    source = access.row(i.args[1], "pred")

    def body(w, mask, members):
        active = w.fragment.lanes() & (w.fragment.lanes() if members is None else members)
        values = source(w) & active
        if mode == "ballot":
            result = int((values.astype(np.uint64) << _LANE.astype(np.uint64)).sum())
        elif mode == "any":
            result = bool(values.any())
        elif mode == "all":
            result = bool(values[active].all())
        else:
            result = bool(values[active].all()) or not values.any()
        put(w, np.full(LANES, result), mask)

    return collective(i, i.args[2], body)


@effect("elect", visible=False)
def elect(i: Instr, kernel: Kernel):
    target = i.args[0]
    put_lane = access.setter(target.first, "b32") if isinstance(target, Pair) else None
    put_pred = access.setter(target.second if isinstance(target, Pair) else target, "pred")

    def body(w, mask, members):
        leader = access.first(mask) if members is None else int(np.argmax(members & w.fragment.lanes()))
        if put_lane:
            put_lane(w, np.full(LANES, leader, np.uint32), mask)
        put_pred(w, leader == _LANE, mask)

    return collective(i, i.args[1], body)


@effect("redux", visible=False)
def redux(i: Instr, kernel: Kernel):
    op, kind = i.parts[2], i.parts[-1]
    put, source = access.setter(i.args[0], kind), access.row(i.args[1], kind)
    absolute, propagate = "abs" in i.parts, "NaN" in i.parts
    table = {
        "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        "min": np.minimum if propagate else np.fmin, "max": np.maximum if propagate else np.fmax,
    }  # fmt: skip
    reduce = table[op].reduce

    def body(w, mask, members):
        values = source(w) if members is None else source(w)[members & w.fragment.lanes()]
        if absolute:
            values = np.abs(values)
        with np.errstate(over="ignore"):
            put(w, np.full(LANES, reduce(values, dtype=values.dtype)), mask)

    return collective(i, i.args[2], body)


@effect("match", visible=False)
def match(i: Instr, kernel: Kernel):
    every = i.parts[1] == "all"
    target = i.args[0]
    put = access.setter(target.first if isinstance(target, Pair) else target, "b32")
    put_pred = access.setter(target.second, "pred") if isinstance(target, Pair) else None
    source = access.row(i.args[1], i.parts[-1])

    def body(w, mask, members):
        active = w.fragment.lanes() if members is None else members & w.fragment.lanes()
        values = source(w)
        same = (values[:, None] == values[None, :]) & active[None, :]
        words = (same.astype(np.uint64) << _LANE.astype(np.uint64)[None, :]).sum(axis=1).astype(np.uint32)
        if every:
            agree = bool((values[active] == values[active][0]).all())
            words = np.full(LANES, words[np.argmax(active)] if agree else 0, np.uint32)
            if put_pred:
                put_pred(w, np.full(LANES, agree), mask)
        put(w, words, mask)

    return collective(i, i.args[2], body)


@effect("activemask", visible=False)
def activemask(i: Instr, kernel: Kernel):
    put, after = access.setter(i.args[0], "b32"), i.pc + 1

    def step(w, mask):
        bits = int((w.fragment.lanes().astype(np.uint64) << _LANE.astype(np.uint64)).sum())
        put(w, np.full(LANES, bits, np.uint32), mask)
        return after

    return step


@effect("mapa", visible=False)
def mapa(i: Instr, kernel: Kernel):
    """The address of the same variable in another CTA of the cluster; a rank that does not exist shows when it is
    used."""
    kind = f"u{CLASS_BITS[i.args[0].cls]}"
    put, source, rank, after = (
        access.setter(i.args[0], kind),
        access.row(i.args[1], kind),
        access.row(i.args[2], "u32"),
        i.pc + 1,
    )

    def step(w, mask):
        base = source(w).astype(np.int64)
        window = base & SHARED_WINDOW
        put(w, window | (base & 0xFFFFFF) | (rank(w).astype(np.int64) << 24), mask)
        return after

    return step


@effect("getctarank", visible=False)
def getctarank(i: Instr, kernel: Kernel):
    source = access.row(i.args[1], f"u{CLASS_BITS[i.args[1].cls]}")
    put, after = access.setter(i.args[0], "u32"), i.pc + 1

    def step(w, mask):
        put(w, (source(w).astype(np.int64) & 0xFFFFFFFF) >> 24, mask)
        return after

    return step


@effect("isspacep", visible=False)
def isspacep(i: Instr, kernel: Kernel):
    source, put, after = access.row(i.args[1], "u64"), access.setter(i.args[0], "pred"), i.pc + 1
    shared = i.parts[1].startswith("shared")

    def step(w, mask):
        inside = source(w) >= np.uint64(SHARED_WINDOW)
        put(w, inside if shared else ~inside, mask)
        return after

    return step
