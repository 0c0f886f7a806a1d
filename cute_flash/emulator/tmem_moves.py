"""tcgen05.ld and tcgen05.st: TMEM to registers and back, by the warp that owns the lane quarter."""

from __future__ import annotations

import functools
import re

import numpy as np

from . import access
from .engine import Operation
from .errors import IllegalInstruction, UnknownInstruction
from .ptx import Imm, Instr, Vec
from .registers import LANES

_LANE = np.arange(LANES)


def single_lanes(mask) -> list:
    """One single-lane mask per active lane."""
    if mask is not True and mask.sum() == 1:
        return [mask]
    found = []
    for lane in access.lanes_of(mask):
        one = np.zeros(LANES, np.bool_)
        one[lane] = True
        found.append(one)
    return found


@functools.lru_cache(None)
def layout(shape: str, registers: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i in lane l, as two (registers, 32) arrays."""
    i, lane = np.arange(registers)[:, None], _LANE[None, :]
    if shape == "32x32b":
        row, column = lane + 0 * i, i + 0 * lane
    elif shape == "16x256b":
        row, column = lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
    elif shape == "16x128b":
        row, column = lane // 4 + 8 * (i % 2), 4 * (i // 2) + lane % 4
    elif shape == "16x64b":
        row, column = lane // 4 + 8 * (lane % 2) + 0 * i, 2 * i + lane // 2 % 2
    elif shape == "16x32bx2":
        row, column = lane % 16 + 0 * i, i + split * (lane // 16)
    else:
        raise UnknownInstruction(f"TMEM shape {shape}")
    return row, column


class Form:
    """Shape, registers and address of one ld or st."""

    def __init__(self, i: Instr, registers, address, split):
        self.shape = next(p for p in i.parts if re.fullmatch(r"\d+x\d+b(x2)?", p))
        items = registers.items if isinstance(registers, Vec) else (registers,)
        self.index = np.array([r.index for r in items])
        self.packed = any(p.endswith("::16b") for p in i.parts)
        if "red" in i.parts or (self.packed and self.shape != "32x32b"):
            raise UnknownInstruction(i.op)
        offset = split.value if isinstance(split, Imm) else 0
        self.rows, self.columns = layout(self.shape, len(items) * (2 if self.packed else 1), offset)
        self.low, self.width = int(self.columns.min()), int(self.columns.max()) + 1
        self.address = access.address_scalar(address)

    def place(self, w, mask) -> tuple[int, int]:
        """First lane and column; checks that the warp may reach them."""
        where = self.address(w, mask) & 0xFFFFFFFF
        lane, column = where >> 16, where & 0xFFFF
        quarter = 32 * (w.index % 4)
        highest = lane + int(self.rows.max())
        if lane < quarter or highest >= quarter + 32:
            raise w.fail(
                IllegalInstruction,
                f"warp {w.index} reaches TMEM lanes {quarter}..{quarter + 31} only, not {lane}..{highest}",
            )
        w.cta.tmem.check(column + self.low, self.width - self.low)
        return lane, column

    def cells(self, w, lane: int, column: int) -> np.ndarray:
        return w.cta.tmem.cells(lane, int(self.rows.max()) + 1, column, self.width)


def load(i: Instr):
    split = i.args[2] if len(i.args) > 2 else None
    form, after = Form(i, i.args[0], i.args[1], split), i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        lane, column = form.place(w, mask)
        order = w.cta.order
        if order is not None:
            event = order.event(w.actor, order.epochs[w.actor], w.instr(), w, False, False)
            order.access(w.cta.tmem.shadow, form.cells(w, lane, column), event, w.clock)
        values = w.cta.tmem.data[form.rows + lane, form.columns + column]
        if form.packed:
            values = (values[0::2] & np.uint32(0xFFFF)) | (values[1::2] << np.uint32(16))
        w.registers.matrix()[form.index] = values
        w.cta.launch.counters.tmem_read += form.rows.size * 4
        return after

    return step


class Store(Operation):
    """Takes effect before the warp's wait::st at the latest."""

    def __init__(self, warp, form: Form, lane: int, column: int, values: np.ndarray):
        super().__init__(warp)
        self.form, self.lane, self.column, self.values = form, lane, column, values
        self.channel = ("tmem store", warp)
        self.track(self.channel)
        if warp.cta.order is not None:
            warp.cta.order.async_access(warp.cta.tmem.shadow, form.cells(warp, lane, column), self, write=True)

    def run(self) -> None:
        form = self.form
        self.warp.cta.tmem.data[form.rows + self.lane, form.columns + self.column] = self.values
        self.warp.cta.launch.counters.tmem_written += form.rows.size * 4


def store(i: Instr):
    split = i.args[1] if len(i.args) > 2 else None
    form, after = Form(i, i.args[-1], i.args[0], split), i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        lane, column = form.place(w, mask)
        values = w.registers.matrix()[form.index]
        if form.packed:
            values = np.stack([values & np.uint32(0xFFFF), values >> np.uint32(16)], axis=1).reshape(-1, LANES)
        op = Store(w, form, lane, column, values)
        w.state.setdefault("tmem stores", []).append(op)
        w.cta.engine.issue(op)
        return after

    return step


def wait_load(i: Instr):
    """Loads are complete when they return: the destination registers are scoreboarded in hardware."""
    after = i.pc + 1
    return lambda w, mask: after


def wait_store(i: Instr):
    after = i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        for op in w.state.pop("tmem stores", []):
            if not op.done:
                w.cta.engine.finish(op)
            if w.cta.order is not None:
                w.cta.order.learn(w, op.actor, op.epoch)
        return after

    return step
