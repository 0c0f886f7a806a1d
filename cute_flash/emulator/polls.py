"""Warps that poll global memory with loads that acquire: they wait like those at an mbarrier, so that asynchronous
operations may be late beside them, and what never comes is a deadlock."""

from __future__ import annotations

import numpy as np

PATIENCE = 1000  # looks in vain while nobody else can do anything: a bounded poll may take as many


class MemoryWait:
    """Until memory holds something else; the machine lets it look again where nothing else can happen."""

    def __init__(self, warp, where: np.ndarray, seen: np.ndarray, times: int):
        self.host, self.where, self.seen = warp.cta.host, where.copy(), seen
        self.times = times  # looks in vain so far

    def ready(self) -> bool:
        count = self.seen.shape[1] if self.seen.ndim > 1 else 1
        return not np.array_equal(self.host.load(self.where, self.seen.itemsize, count), self.seen)

    def describe(self) -> str:
        return f"polls global address {int(self.where[0]):#x}, which holds {self.seen.ravel()[0]}"


def wait_for_change(w, pc: int, where: np.ndarray, found: np.ndarray) -> bool:
    """Blocks a load that did nothing but find the same again since the warp's last visible effect, which it was; once
    each time."""
    look, key = w.state.get("look"), (pc, where.tobytes(), found.tobytes())
    times = 0
    if look is not None and look[:2] == (key, w.effects):
        waited, times = look[2:]
        if not waited:
            w.state["look"] = key, w.effects, True, times + 1
            w.fragment.wait = MemoryWait(w, where, found, times + 1)
            return True
    w.state["look"] = key, w.effects + 1, False, times
    return False
