"""cp.async: per-thread copies, their mbarrier arrival, and the group waits that bulk stores share with them."""

from __future__ import annotations

import numpy as np

from . import access
from .copies import groups_of
from .engine import Operation
from .memory import SHARED_WINDOW
from .order import GRANULE
from .ptx import Instr


def commit(i: Instr, family: str):
    after = i.pc + 1

    def step(w, mask):
        for lane in access.lanes_of(mask):
            groups_of(w, family).commit(int(lane))
        return after

    return step


def wait(i: Instr, family: str):
    keep = access.scalar(i.args[0]) if i.args else (lambda w, mask: 0)
    after, reading = i.pc + 1, "read" in i.parts

    def step(w, mask):
        groups, n = groups_of(w, family), keep(w, mask)
        for lane in access.lanes_of(mask):
            for group in groups.older_than(int(lane), n):
                for op in group:
                    if reading:
                        op.read()
                    elif not op.done:
                        w.cta.engine.finish(op)
                    op.waited = True
                    if w.cta.order is not None:
                        w.cta.order.learn(w, op.actor, op.epoch)
            groups.forget(int(lane))
        return after

    return step


class ThreadCopy(Operation):
    """cp.async: per-thread copies of one warp instruction."""

    def __init__(self, warp, addresses: np.ndarray, sources: np.ndarray, sizes: np.ndarray, nbytes: int):
        super().__init__(warp)
        self.addresses, self.sources, self.sizes, self.nbytes = addresses, sources, sizes, nbytes
        self.track(("cp.async", warp))
        if warp.cta.order is not None:
            cells = (addresses // GRANULE)[:, None] + np.arange((nbytes + GRANULE - 1) // GRANULE)
            warp.cta.order.async_access(warp.cta.shadow, cells.ravel(), self, write=True)

    def run(self) -> None:
        counters = self.warp.cta.launch.counters
        counters.shared_written += self.nbytes * len(self.addresses)
        counters.l2_read += int(self.sizes.sum())
        shared, host = self.warp.cta.shared, self.warp.cta.host
        shared.check(self.addresses, self.nbytes)
        for address, source, size in zip(self.addresses, self.sources, self.sizes, strict=False):
            shared.data[address : address + self.nbytes] = 0
            if size:
                shared.data[address : address + size] = host.bytes_at(int(source), int(size))


def copy(i: Instr):
    to, source, nbytes, after = access.address(i.args[0]), access.address(i.args[1]), i.args[2].value, i.pc + 1
    limited = access.row(i.args[3], "u32") if len(i.args) > 3 and "cache_hint" not in i.op else None

    def step(w, mask):
        addresses = access.pick(to(w), mask)
        addresses = np.where(addresses >= SHARED_WINDOW, addresses - SHARED_WINDOW, addresses) & 0xFFFFFF
        sizes = access.pick(limited(w), mask).astype(np.int64) if limited else np.full(len(addresses), nbytes)
        op = ThreadCopy(w, addresses, access.pick(source(w), mask), sizes, nbytes)
        for lane in access.lanes_of(mask):
            groups_of(w, "cp.async").add(int(lane), op)
        w.cta.engine.issue(op)
        return after

    return step


class CopyArrival(Operation):
    """cp.async.mbarrier.arrive: arrives when the cp.asyncs before it are complete."""

    def __init__(self, warp, barrier, lanes: int):
        super().__init__(warp)
        self.barriers, self.lanes = (barrier,), lanes
        self.earlier = [op for op in warp.cta.engine.pending if isinstance(op, ThreadCopy) and op.warp is warp]
        self.track(("cp.async", warp))

    def ready(self) -> bool:
        return all(op.done for op in self.earlier)

    def run(self) -> None:
        self.barriers[0].arrive(self.lanes, self.clock)


def arrive(i: Instr):
    address, after = access.address(i.args[0]), i.pc + 1
    increments = "noinc" not in i.parts

    def step(w, mask):
        active = access.pick(address(w), mask)
        for where, lanes in zip(*np.unique(active, return_counts=True), strict=False):
            barrier = w.cta.mbarrier(int(where), w)
            if increments:
                barrier.pending += int(lanes)
            w.cta.engine.issue(CopyArrival(w, barrier, int(lanes)))
        return after

    return step
