"""Kernels launched beside the one before them (programmatic dependent launch, griddepcontrol).

They run one after the other all the same. But what the one before wrote is taken back where such a kernel starts, and
comes when a warp waits for it: at once in eager mode, else, or for some, when nothing else can happen. So whoever looks
before, or was not told by one who waited, finds memory as it was.
"""

from __future__ import annotations

import numpy as np

from .errors import IllegalInstruction
from .memory import HostMemory

WATCHED_BYTES = 1 << 28  # of a call's tensors at most: they are copied at launches that let others start


class Unfinished:
    """What kernels before have still to write, and what a warp waits for."""

    def __init__(self, memory: list[np.ndarray], before: list[np.ndarray]):
        self.landed = self.waited = False
        self.parts = []
        for view, old in zip(memory, before, strict=True):
            at = np.flatnonzero(view != old)
            self.parts.append((view, at, view[at].copy()))
            view[at] = old[at]

    def ready(self) -> bool:
        return self.landed

    def describe(self) -> str:
        return "waits for the kernel before (griddepcontrol.wait)"

    def land(self) -> bool:
        """-> was it still to come?"""
        if self.landed:
            return False
        self.landed = True
        self.write([view for view, _, _ in self.parts])
        return True

    def write(self, memory: list[np.ndarray]) -> None:
        for view, (_, at, values) in zip(memory, self.parts, strict=True):
            view[at] = values


class Succession:
    """The launches of one call."""

    def __init__(self, ranges: list, host: HostMemory):
        self.ranges = ranges
        self.memory = [host.bytes_at(low, high - low) for low, high in _merged(ranges)]
        self.watched = sum(part.size for part in self.memory) <= WATCHED_BYTES
        self.before: list | None = None  # memory before the launches that may be unfinished where the next one starts
        self.start: list = []

    def begin(self, beside: bool, lets_start: bool) -> Unfinished | None:
        """beside: need the launch not wait for the one before? lets_start: may it let the next one start?"""
        ahead = Unfinished(self.memory, self.before) if beside and self.before is not None else None
        self.before = None
        self.start = [part.copy() for part in self.memory] if lets_start and self.watched else []
        return ahead

    def end(self, launch, name: str) -> None:
        """launch: as machine.Launch has it. Who lets the next one start before it has waited itself says nothing of
        those before it."""
        ahead = launch.ahead
        if ahead is not None:
            ahead.land()
            if self.start and not launch.lets_start_early:
                ahead.write(self.start)
        self.before = self.start if self.start and launch.lets_start else None
        if ahead is not None and not ahead.waited:
            raise IllegalInstruction(
                f"{name} was launched beside the kernel before it and never waits for it (griddepcontrol.wait): who "
                "waits for this one would not wait for that one"
            )


def _merged(ranges: list) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        elif high > low:
            found.append((low, high))
    return found
