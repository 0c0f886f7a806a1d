"""mbarriers, named barriers and the cluster barrier, each also a place where happens-before is handed over."""

from __future__ import annotations

from .errors import IllegalInstruction, Race


class MBarrier:
    """Expected count, pending count, transaction count, phase. `clock` gathers what the current phase has been told."""

    def __init__(self, cta, offset: int, count: int):
        self.cta, self.offset = cta, offset
        self.count = self.pending = count
        self.author = None  # the warp that initialised it, until its fence shows the barrier to asynchronous copies
        self.tx = 0
        self.phase = 0
        self.clock = None  # joined by arrivals of the running phase
        self.released = None  # everything known at the last completed phase

    def name(self) -> str:
        return f"mbarrier at {self.offset:#x} of CTA {self.cta.coords}"

    def check_shown(self, warp) -> None:
        if self.author is not None:
            raise warp.fail(
                Race,
                f"{self.name()} was initialised by warp {self.author.index} and no fence.mbarrier_init or "
                "fence.proxy.async followed there: a copy may complete on it before it exists",
            )

    def arrive(self, count: int, clock=None) -> None:
        if count > self.pending:
            raise IllegalInstruction(
                f"{count} arrivals on {self.name()} with {self.pending} of {self.count} pending in phase {self.phase}"
            )
        self.pending -= count
        self._join(clock)
        self.settle()

    def drop(self, count: int, clock=None) -> None:
        self.count -= count
        self.arrive(count, clock)

    def expect(self, nbytes: int) -> None:
        self.tx += nbytes

    def complete(self, nbytes: int, clock=None) -> None:
        self.tx -= nbytes
        self._join(clock)
        self.settle()

    def _join(self, clock) -> None:
        if clock is not None:
            self.clock = clock if self.clock is None else self.clock.joined(clock)

    def settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            if self.clock is not None:
                self.released = self.clock if self.released is None else self.released.joined(self.clock)
                self.clock = None

    def passed(self, parity: int) -> bool:
        return (self.phase & 1) != (parity & 1)

    def state(self) -> str:
        if self.tx < 0:
            return (
                f"phase {self.phase}, {self.pending} of {self.count} arrivals missing"
                f" and {-self.tx} more bytes arrived than expected"
            )
        return f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.tx} bytes missing"


class MBarrierWait:
    def __init__(self, barrier: MBarrier, parity: int):
        self.barrier, self.parity = barrier, parity

    def ready(self) -> bool:
        return self.barrier.passed(self.parity)

    def describe(self) -> str:
        return f"waits for parity {self.parity} of {self.barrier.name()} ({self.barrier.state()})"


class NamedBarrier:
    """bar.sync and bar.arrive of one id. The count is in threads; None means every live thread of the CTA."""

    def __init__(self, cta, number: int):
        self.cta, self.number = cta, number
        self.generation = 0
        self.arrived = 0
        self.expected: int | None = None
        self.open = False
        self.clock = None
        self.released = None
        self.members: list[str] = []

    def arrive(self, warp, expected: int | None, clock=None) -> int:
        """Count a warp in; returns the generation it belongs to."""
        if not self.open:
            self.open, self.expected, self.arrived, self.members = True, expected, 0, []
        elif expected != self.expected:
            raise IllegalInstruction(
                f"barrier {self.number}: warp {warp.index} says {expected} threads, others said {self.expected}"
            )
        generation = self.generation
        self.arrived += 32
        self.members.append(str(warp.index))
        if clock is not None:
            self.clock = clock if self.clock is None else self.clock.joined(clock)
        self.settle()
        return generation

    def settle(self) -> None:
        if not self.open:
            return
        need = self.expected if self.expected is not None else 32 * self.cta.live_warps()
        if self.arrived > need:
            raise IllegalInstruction(
                f"barrier {self.number} expects {need} threads, but {self.arrived} arrived"
                f" (warps {', '.join(self.members)})"
            )
        if self.arrived == need:
            self.generation += 1
            self.open = False
            if self.clock is not None:
                self.released = self.clock if self.released is None else self.released.joined(self.clock)
                self.clock = None


class NamedBarrierWait:
    def __init__(self, barrier: NamedBarrier, generation: int):
        self.barrier, self.generation = barrier, generation

    def ready(self) -> bool:
        return self.barrier.generation > self.generation

    def describe(self) -> str:
        b = self.barrier
        need = b.expected if b.expected is not None else "all live"
        arrived = f"{b.arrived} of {need} threads, warps {', '.join(b.members)}"
        return f"waits at named barrier {b.number} (generation {self.generation}; {arrived})"


class ClusterBarrier:
    """barrier.cluster: a thread's n-th arrival counts towards phase n, its n-th wait waits for phase n."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.arrivals: dict = {}
        self.waits: dict = {}
        self.clocks: list = []

    def arrive(self, warp, clock=None) -> None:
        index = self.arrivals.get(warp, 0)
        self.arrivals[warp] = index + 1
        while len(self.clocks) <= index:
            self.clocks.append(None)
        if clock is not None:
            held = self.clocks[index]
            self.clocks[index] = clock if held is None else held.joined(clock)

    def completed(self) -> int:
        live = [w for cta in self.cluster.ctas for w in cta.warps if not w.done]
        return min((self.arrivals.get(w, 0) for w in live), default=1 << 30)


class ClusterWait:
    def __init__(self, barrier: ClusterBarrier, phase: int):
        self.barrier, self.phase = barrier, phase

    def ready(self) -> bool:
        return self.barrier.completed() >= self.phase

    def describe(self) -> str:
        return f"waits for phase {self.phase} of the cluster barrier ({self.barrier.completed()} complete)"
