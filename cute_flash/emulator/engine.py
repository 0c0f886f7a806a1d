"""Asynchronous operations and when they take effect.

eager: at issue. late: only when a warp waits for them or nothing else can run. random: some at issue, the rest at
random moments. Whatever the mode, operations of one channel keep their order, as the hardware does.
"""

from __future__ import annotations

from .errors import EmulatorError

MODES = ("eager", "late", "random")
STARVED = 20_000  # visible effects without one operation done, while warps poll


class Operation:
    """Something in flight. `channel` orders it among its like; `barriers` are the mbarriers its completion signals."""

    channel: tuple | None = None
    barriers: tuple = ()

    def __init__(self, warp):
        self.warp = warp
        self.instr = warp.instr()
        self.done = self.waited = False  # waited: some lane knows that shared memory is free again
        self.actor = self.epoch = 0
        self.clock = None

    def track(self, channel) -> None:
        """Give the operation its place in the happens-before order."""
        order = self.warp.cta.order
        if order is not None:
            self.actor, self.epoch, self.clock = order.begin(self.warp, channel)

    def ready(self) -> bool:
        return True

    def run(self) -> None:
        raise NotImplementedError

    def describe(self) -> str:
        return f"in flight, from {self.warp.describe()}\n      {self.instr.where() if self.instr else ''}"


class Engine:
    def __init__(self, mode: str, rng):
        self.mode, self.rng = mode, rng
        self.pending: list[Operation] = []

    def issue(self, op: Operation) -> None:
        self.pending.append(op)
        if self.mode == "eager":
            self.settle()
        elif self.at_once() and self._eligible(op):
            self.execute(op)

    def at_once(self) -> bool:
        """Does what begins now take effect now?"""
        return self.mode == "eager" or (self.mode == "random" and self.rng.random() < 0.3)

    def settle(self) -> None:
        """Run whatever can run (eager)."""
        again = True
        while again:
            again = False
            for op in list(self.pending):
                if not op.done and self._eligible(op):
                    self.execute(op)
                    again = True

    def _eligible(self, op: Operation) -> bool:
        if not op.ready():
            return False
        if op.channel is None:
            return True
        for other in self.pending:
            if other is op:
                return True
            if other.channel == op.channel:
                return False
        return True

    def execute(self, op: Operation) -> None:
        self.pending.remove(op)
        op.done = True
        try:
            op.run()
        except EmulatorError as error:
            if "PTX line" in str(error):
                raise
            raise type(error)(f"{op.warp.describe()}: {error}\n  {op.instr.where() if op.instr else ''}") from None

    def finish(self, op: Operation) -> None:
        """Run an operation a warp waits for, after its predecessors in the channel."""
        for other in list(self.pending):
            if other is op:
                break
            if other.channel is not None and other.channel == op.channel:
                self.execute(other)
        if not op.done:
            self.execute(op)

    def tick(self) -> None:
        """Between turns of the scheduler."""
        if self.mode == "random" and self.pending and self.rng.random() < 0.25:
            self.advance(set())
        elif self.mode == "eager" and self.pending:
            self.settle()

    def advance(self, awaited: set) -> bool:
        """Run one operation: one that signals an awaited mbarrier if there is any, else the oldest, or any in random
        mode."""
        able = [op for op in self.pending if self._eligible(op)]
        if not able:
            return False
        wanted = [op for op in able if awaited.intersection(op.barriers)]
        pool = wanted or able
        self.execute(pool[self.rng.randrange(len(pool))] if self.mode == "random" else pool[0])
        return True
