"""Asynchronous copies as operations in flight, and the groups that some of them complete in."""

from __future__ import annotations

import numpy as np

from . import tensormap
from .engine import Operation
from .errors import Race
from .order import GRANULE

_FULL = 0xFFFFFFFF


def cells(offset: int, nbytes: int) -> slice:
    return slice(offset // GRANULE, (offset + nbytes + GRANULE - 1) // GRANULE)


def place(shared, offset: int, rows: np.ndarray, swizzle: str) -> None:
    """Put box rows into shared memory at `offset`, packed and swizzled."""
    data = rows.reshape(-1)
    shared.check(np.array([offset]), len(data))
    if swizzle == "0" or len(data) % 16:
        shared.data[offset : offset + len(data)] = data
        return
    where = tensormap.swizzled_chunks(offset // 16 + np.arange(len(data) // 16), swizzle)
    shared.data.reshape(-1, 16)[where] = data.reshape(-1, 16)


def fetch(shared, offset: int, nbytes: int, swizzle: str) -> np.ndarray:
    shared.check(np.array([offset]), nbytes)
    if swizzle == "0" or nbytes % 16:
        return shared.data[offset : offset + nbytes].copy()
    where = tensormap.swizzled_chunks(offset // 16 + np.arange(nbytes // 16), swizzle)
    return shared.data.reshape(-1, 16)[where].reshape(-1)


class Load(Operation):
    """A copy into shared memory that completes on an mbarrier, in one CTA or in several."""

    def __init__(self, warp, targets: list, nbytes: int, load, swizzle: str = "0"):
        super().__init__(warp)
        self.targets, self.nbytes, self.load, self.swizzle = targets, nbytes, load, swizzle
        self.barriers = tuple(barrier for _, _, barrier in targets)
        self.track(("load", self.barriers[0]))
        check_acquired(self)
        order = warp.cta.order
        for cta, offset, barrier in targets:
            cta.shared.check(np.array([offset]), nbytes)
            if order is not None:
                barrier.check_shown(warp)
                order.async_access(cta.shadow, cells(offset, nbytes), self, write=True)

    def run(self) -> None:
        rows = self.load()
        counters = self.warp.cta.launch.counters
        counters.l2_read += self.nbytes
        for cta, offset, barrier in self.targets:
            cta.check_alive()
            counters.shared_written += self.nbytes
            place(cta.shared, offset, rows, self.swizzle)
            barrier.complete(self.nbytes, self.clock)


class Store(Operation):
    """A copy or reduction out of shared memory, part of a bulk group. It reads first; what it read arrives later."""

    def __init__(self, warp, cta, offset: int, nbytes: int, send, swizzle: str = "0"):
        super().__init__(warp)
        self.cta, self.offset, self.nbytes, self.send, self.swizzle = cta, offset, nbytes, send, swizzle
        self.data: np.ndarray | None = None
        cta.shared.check(np.array([offset]), nbytes)
        self.track(("bulk", warp))
        check_acquired(self)
        if warp.cta.order is not None:
            warp.cta.order.async_access(cta.shadow, cells(offset, nbytes), self, write=False)

    def read(self) -> None:
        """All that a wait with .read asks for."""
        if self.data is None:
            self.warp.cta.launch.counters.shared_read += self.nbytes
            self.data = fetch(self.cta.shared, self.offset, self.nbytes, self.swizzle)

    def run(self) -> None:
        self.read()
        self.warp.cta.launch.counters.l2_written += self.nbytes
        self.send(self.data)


class RemoteStore(Operation):
    """st.async: a few words into a CTA of the cluster, completing on an mbarrier there."""

    def __init__(self, warp, address: int, values: np.ndarray, barrier: int, nbytes: int):
        super().__init__(warp)
        self.target = warp.cta.peer(address >> 24 & 0xFF, warp)
        self.offset, self.values, self.nbytes = address & 0xFFFFFF, values, nbytes
        self.barriers = (warp.cta.mbarrier(barrier, warp),)
        self.track(("load", self.barriers[0]))
        if warp.cta.order is not None:
            warp.cta.order.async_access(self.target.shadow, cells(self.offset, nbytes), self, write=True)

    def run(self) -> None:
        self.target.shared.data[self.offset : self.offset + self.nbytes] = np.ascontiguousarray(self.values).view(
            np.uint8
        )
        self.barriers[0].complete(self.nbytes, self.clock)


class CancelResponse(Operation):
    """clusterlaunchcontrol.try_cancel: takes the next cluster off the grid, for one CTA or all of the cluster."""

    def __init__(self, warp, address: int, barrier: int, everywhere: bool):
        super().__init__(warp)
        cluster = warp.cta.cluster
        targets = cluster.ctas if everywhere else [warp.cta.peer(address >> 24, warp)]
        self.targets = [
            (cta, address & 0xFFFFFF, cta.mbarrier((cta.rank << 24) | barrier & 0xFFFFFF)) for cta in targets
        ]
        self.barriers = tuple(barrier for _, _, barrier in self.targets)
        self.track(("load", self.barriers[0]))
        if warp.cta.order is not None:
            for cta, offset, _ in self.targets:
                warp.cta.order.async_access(cta.shadow, cells(offset, 16), self, write=True)

    def run(self) -> None:
        first = self.warp.cta.launch.next_cluster()
        words = np.array([1, *first] if first else [0, _FULL, _FULL, _FULL], np.uint32)
        for cta, offset, barrier in self.targets:
            cta.shared.data[offset : offset + 16] = words.view(np.uint8)
            barrier.complete(16, self.clock)


class Groups:
    """Bulk or cp.async groups of the lanes of a warp; the lanes of one instruction share a list per lane."""

    def __init__(self):
        self.open: dict[int, list] = {}
        self.closed: dict[int, list] = {}

    def add(self, lane: int, op: Operation) -> None:
        self.open.setdefault(lane, []).append(op)

    def commit(self, lane: int) -> None:
        self.closed.setdefault(lane, []).append(self.open.pop(lane, []))

    def older_than(self, lane: int, keep: int) -> list:
        groups = self.closed.get(lane, [])
        return groups[: len(groups) - keep] if keep else list(groups)

    def unread(self) -> bool:
        """Does a group, open or not, still need shared memory?"""
        closed = (group for groups in self.closed.values() for group in groups)
        return any(self.open.values()) or any(not op.waited for group in closed for op in group)

    def forget(self, lane: int) -> None:
        """Groups before the first that is not complete: no wait finds anything to do there."""
        groups = self.closed.get(lane, [])
        done = 0
        while done < len(groups) and all(op.done and op.waited for op in groups[done]):
            done += 1
        del groups[:done]


def check_acquired(op: Operation) -> None:
    """What other CTAs wrote to global memory is the async proxy's to read, or to write over, after a proxy fence only
    (PTX, "Async proxy")."""
    seen = op.warp.acquired
    if op.warp.cta.order is not None and seen is not None:
        raise Race(
            f"missing proxy fence in {op.warp.describe()}: no fence.proxy.async between\n    {seen.where()}"
            f"\n  and the bulk copy\n    {op.instr.where() if op.instr else ''}"
        )


def groups_of(w, family: str) -> Groups:
    return w.state.setdefault(family, Groups())
