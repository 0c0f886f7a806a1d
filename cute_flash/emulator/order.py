"""Happens-before: vector clocks over warps and asynchronous channels, and a shadow of shared memory and TMEM.

Every warp is an actor. Every stream of asynchronous operations that completes in order (all TMA loads of one
mbarrier, the wgmmas of one warpgroup, the bulk stores of one warp ...) is a channel, an actor too. Barriers,
mbarriers and waits hand clocks over. Two accesses to one granule, at least one a write, are a race when neither's
clock knows the other: that is found however the schedule of this run happened to go.
"""

from __future__ import annotations

import numpy as np

from .errors import Race

GRANULE = 4  # bytes of shared memory per shadow cell
_START = 64


class Clock:
    """An immutable vector clock."""

    __slots__ = ("ticks",)

    def __init__(self, ticks: np.ndarray):
        self.ticks = ticks

    def joined(self, other: Clock) -> Clock:
        a, b = self.ticks, other.ticks
        if len(a) < len(b):
            a, b = b, a
        out = a.copy()
        np.maximum(out[: len(b)], b, out=out[: len(b)])
        return Clock(out)

    def knows(self, actor: int, epoch: int) -> bool:
        return actor < len(self.ticks) and self.ticks[actor] >= epoch

    def with_tick(self, actor: int, epoch: int) -> Clock:
        out = np.zeros(max(len(self.ticks), 2 * actor + 2 if actor >= len(self.ticks) else 0), np.int32)
        out[: len(self.ticks)] = self.ticks
        out[actor] = max(out[actor], epoch)
        return Clock(out)


class Shadow:
    """Last writer and set of readers since, per granule."""

    def __init__(self, cells: int, name: str):
        self.name = name
        self.writer = np.zeros(cells, np.int32)
        self.readers = np.zeros(cells, np.int32)


class Event:
    """An access: who, when, how."""

    __slots__ = ("actor", "asynchronous", "epoch", "fences", "instr", "warp", "write")

    def __init__(self, actor, epoch, instr, warp, write, asynchronous, fences):
        self.actor, self.epoch, self.instr, self.warp = actor, epoch, instr, warp
        self.write, self.asynchronous, self.fences = write, asynchronous, fences

    def describe(self) -> str:
        verb = "write" if self.write else "read"
        how = "asynchronous " if self.asynchronous else ""
        return f"{how}{verb} by {self.warp.describe()}\n      {self.instr.where()}"


class Order:
    """Clocks and events of one cluster."""

    def __init__(self, check_proxy: bool = True):
        self.check_proxy = check_proxy
        self.actors: dict = {}
        self.epochs: list[int] = []
        self.events: list = [None]
        self._event_ids: dict = {}
        self.reader_sets: list[tuple] = [()]
        self._reader_ids: dict = {(): 0}
        self.fences: dict = {}  # actor -> number of proxy fences so far
        self.fence_clock: dict = {}  # actor -> clock at its last proxy fence

    # --- clocks --------------------------------------------------------------------------------------
    def actor(self, key) -> int:
        if key not in self.actors:
            self.actors[key] = len(self.epochs)
            self.epochs.append(1)
        return self.actors[key]

    def join_warp(self, warp) -> None:
        warp.actor = self.actor(("warp", warp))
        ticks = np.zeros(max(_START, warp.actor + 1), np.int32)
        ticks[warp.actor] = 1
        warp.clock = Clock(ticks)

    def release(self, warp) -> Clock:
        """What the warp knows, to hand on; later accesses of the warp are not covered by it."""
        clock = warp.clock
        self.epochs[warp.actor] += 1
        warp.clock = clock.with_tick(warp.actor, self.epochs[warp.actor])
        return clock

    def acquire(self, warp, clock: Clock) -> bool:
        """-> whether the warp learnt anything: a wait that never teaches anything can be dropped unnoticed."""
        before, warp.clock = warp.clock, warp.clock.joined(clock)
        known = before.ticks
        return len(known) != len(warp.clock.ticks) or bool((known != warp.clock.ticks).any())

    def begin(self, warp, channel) -> tuple[int, int, Clock]:
        """An operation joins a channel: -> actor, epoch, and the clock it acts with."""
        actor = self.actor(channel)
        self.epochs[actor] += 1
        epoch = self.epochs[actor]
        return actor, epoch, warp.clock.with_tick(actor, epoch)

    def learn(self, warp, actor: int, epoch: int) -> None:
        """The warp has waited for the operations of a channel up to an epoch."""
        warp.clock = warp.clock.with_tick(actor, epoch)

    def proxy_fence(self, warp) -> None:
        self.fences[warp.actor] = self.fences.get(warp.actor, 0) + 1
        self.fence_clock[warp.actor] = warp.clock

    # --- accesses ------------------------------------------------------------------------------------
    def event(self, actor: int, epoch: int, instr, warp, write: bool, asynchronous: bool) -> int:
        fences = 0 if asynchronous else self.fences.get(actor, 0)
        key = (actor, epoch, instr.pc if instr else -1, write, asynchronous, fences)
        found = self._event_ids.get(key)
        if found is None:
            found = self._event_ids[key] = len(self.events)
            self.events.append(Event(actor, epoch, instr, warp, write, asynchronous, fences))
        return found

    def shared_access(self, warp, cta, offsets: np.ndarray, nbytes: int, write: bool) -> None:
        """A generic access of the running instruction: rows of `nbytes` at byte offsets."""
        cells = offsets // GRANULE
        count = (nbytes + GRANULE - 1) // GRANULE
        if count > 1:
            cells = (cells[:, None] + np.arange(count)).ravel()
        event = self.event(warp.actor, self.epochs[warp.actor], warp.instr(), warp, write, False)
        self.access(cta.shadow, cells, event, warp.clock)

    def async_access(self, shadow: Shadow, cells, op, write: bool) -> None:
        """An access of an asynchronous operation, made with the clock of its issue."""
        event = self.event(op.actor, op.epoch, op.instr, op.warp, write, True)
        self.access(shadow, cells, event, op.clock)

    def access(self, shadow: Shadow, cells, event_id: int, clock: Clock) -> None:
        event = self.events[event_id]
        held = shadow.writer[cells]
        for one in _distinct(held):
            if one:
                self._against_write(shadow, cells, held, one, event, clock)
        if event.write:
            read_by = shadow.readers[cells]
            for one in _distinct(read_by):
                self._against_readers(shadow, cells, read_by, one, event, clock)
            shadow.writer[cells] = event_id
            shadow.readers[cells] = 0
            return
        read_by = shadow.readers[cells]
        for one in _distinct(read_by):
            merged = self._with_reader(int(one), event_id)
            if merged == one:
                continue
            if len(read_by) and (read_by == one).all():
                shadow.readers[cells] = merged
            else:
                chosen = np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells
                shadow.readers[chosen[read_by == one]] = merged

    def _with_reader(self, held: int, event_id: int) -> int:
        actor = self.events[event_id].actor
        members = self.reader_sets[held]
        if event_id in members:
            return held
        merged = tuple(sorted([m for m in members if self.events[m].actor != actor] + [event_id]))
        found = self._reader_ids.get(merged)
        if found is None:
            found = self._reader_ids[merged] = len(self.reader_sets)
            self.reader_sets.append(merged)
        return found

    def _against_write(self, shadow, cells, held, one, event: Event, clock: Clock) -> None:
        earlier = self.events[one]
        if not clock.knows(earlier.actor, earlier.epoch):
            self._report(shadow, cells, held == one, earlier, event)
        if self.check_proxy and event.asynchronous and not event.write and not earlier.asynchronous:
            self._proxy(shadow, cells, held == one, earlier, event)

    def _proxy(self, shadow, cells, where, earlier: Event, event: Event) -> None:
        """Generic writes reach the async proxy only through a fence: the writer's after the write, or the issuer's."""
        if shadow.name.startswith("TMEM") or self.fences.get(earlier.actor, 0) > earlier.fences:
            return
        seen = self.fence_clock.get(event.warp.actor)
        if seen is not None and event.warp.actor != earlier.actor and seen.knows(earlier.actor, earlier.epoch):
            return
        raise Race(
            f"missing proxy fence at {_place(shadow, cells, where)}: no fence.proxy.async between"
            f"\n    {earlier.describe()}"
            f"\n  and\n    {event.describe()}"
        )

    def _against_readers(self, shadow, cells, read_by, one, event: Event, clock: Clock) -> None:
        for member in self.reader_sets[one]:
            earlier = self.events[member]
            if not clock.knows(earlier.actor, earlier.epoch):
                self._report(shadow, cells, read_by == one, earlier, event)

    def _report(self, shadow, cells, where, earlier: Event, event: Event) -> None:
        raise Race(
            f"race at {_place(shadow, cells, where)}: nothing orders the\n    {earlier.describe()}"
            f"\n  before the\n    {event.describe()}"
        )


def _distinct(values: np.ndarray):
    """Unique values; nearly always one."""
    if len(values) == 0:
        return ()
    head = values[0]
    return (head,) if (values == head).all() else np.unique(values)


def _place(shadow: Shadow, cells, where: np.ndarray) -> str:
    index = np.arange(cells.start, cells.stop) if isinstance(cells, slice) else np.asarray(cells)
    hit = index[where]
    if shadow.name.startswith("TMEM"):
        return f"{shadow.name}, columns {int((hit % 512).min())}..{int((hit % 512).max())}"
    return f"{shadow.name} bytes {int(hit.min()) * GRANULE:#x}..{(int(hit.max()) + 1) * GRANULE:#x}"
