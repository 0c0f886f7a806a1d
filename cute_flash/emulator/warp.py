"""A warp: registers, fragments of diverged lanes, and the loop that steps them."""

from __future__ import annotations

import numpy as np

from .errors import EmulatorError, Race
from .ptx import Instr
from .registers import LANES

BLOCKED, SPLIT, EXITED = -1, -2, -3
ALL, NONE = bytes([1] * LANES), bytes(LANES)


class Fragment:
    """Lanes of one warp at one pc. `wait` says what it is blocked on; `token` is private to the step it is in."""

    __slots__ = ("mask", "pc", "token", "wait")

    def __init__(self, pc: int, mask):
        self.pc, self.mask, self.wait, self.token = pc, mask, None, None

    def lanes(self) -> np.ndarray:
        return np.ones(LANES, np.bool_) if self.mask is True else self.mask


class Warp:
    def __init__(self, cta, index: int, threads: int):
        self.cta, self.index = cta, index
        self.program = cta.program
        self.registers = cta.launch.registers()
        live = np.arange(index * LANES, (index + 1) * LANES) < threads
        self.live = live
        self.full_mask = True if live.all() else live
        self.fragments = [Fragment(0, self.full_mask)]
        self.fragment = self.fragments[0]
        self.done = False
        self.independent = False  # fragments may overtake one that waits on an mbarrier
        self.effects = 0  # visible effects so far
        self.polling = None  # the wait that failed last, with nothing done since
        self.acquired = None  # what last let it see the writes of other CTAs, with no proxy fence since
        self.inflight = 0  # bitmask of 32-bit registers owned by asynchronous operations
        self.unfenced = -1  # those written since the last wgmma.fence; a warp's first wgmma needs one too
        self.wgmma_groups: list = []  # committed batches, oldest first
        self.wgmma_open: list = []
        self.bulk: dict = {}  # lane -> bulk groups
        self.state: dict = {}  # what instruction families keep per warp
        self.hits = [0] * len(self.program.full)
        self.actor = None
        self._specials: dict = {}

    # --- values other than registers ------------------------------------------------------------
    def special(self, name: str, kind: str):
        row = self._specials.get(name)
        if row is None:
            row = self.cta.special(self, name)
            if not name.startswith(("%clock", "%globaltimer")):
                self._specials[name] = row
        return row

    def symbol(self, name: str):
        return self.cta.symbol(self, name)

    def instr(self) -> Instr | None:
        instrs = self.program.kernel.instrs
        return instrs[self.fragment.pc] if self.fragment.pc < len(instrs) else None

    # --- divergence --------------------------------------------------------------------------------
    def diverge(self, mask, taken: np.ndarray, target: int, fallthrough: int) -> int:
        current = self.fragment
        rest = ~taken if mask is True else mask & ~taken
        current.pc, current.mask = fallthrough, rest
        self._join(current)
        other = Fragment(target, taken.copy())
        self.fragments.append(other)
        self._join(other)
        return SPLIT

    def split_at(self, masks_by_pc: dict) -> int:
        """An indirect branch: one fragment per target."""
        self.fragments.remove(self.fragment)
        for pc, mask in masks_by_pc.items():
            fragment = Fragment(pc, mask)
            self.fragments.append(fragment)
            self._join(fragment)
        return SPLIT

    def _join(self, fragment: Fragment) -> None:
        """Merge with a fragment that stands at the same pc."""
        for other in self.fragments:
            if other is not fragment and other.pc == fragment.pc and other.token is None:
                fragment.mask = other.lanes() | fragment.lanes()
                fragment.wait = None
                self.fragments.remove(other)
                if fragment.mask.all():
                    fragment.mask = True
                return

    def leave(self, mask) -> int:
        """Lanes of the running fragment exit."""
        gone = np.ones(LANES, np.bool_) if mask is True else mask
        self.live = self.live & ~gone
        self.full_mask = self.live
        rest = self.fragment.lanes() & ~gone
        for other in self.fragments:
            if other.wait is CONVERGE:  # the lanes it waits for may be the ones that left
                other.wait = None
        if rest.any():
            self.fragment.mask = rest
            self.fragment.pc += 1
        else:
            self.fragments.remove(self.fragment)
        if not self.fragments:
            self.done = True
            self.cta.warp_done(self)
        return EXITED

    def converged(self, mask, wanted: np.ndarray | None = None) -> bool:
        """Whether the running fragment holds all live lanes of a member mask."""
        if mask is True:
            return True
        need = self.live if wanted is None else self.live & wanted
        return not (need & ~mask).any()

    def wait_for_lanes(self) -> int:
        self.fragment.wait = CONVERGE
        return BLOCKED

    # --- running -----------------------------------------------------------------------------------
    def runnable(self) -> bool:
        if self.done:
            return False
        return self._pick() is not None

    def _pick(self) -> Fragment | None:
        if len(self.fragments) == 1:
            fragment = self.fragments[0]
            wait = fragment.wait
            return fragment if wait is None or wait.ready() else None
        for fragment in sorted(self.fragments, key=lambda f: f.pc):
            wait = fragment.wait
            if wait is None or wait.ready():
                return fragment
            if wait is not CONVERGE and not self.independent:
                return None
        return None

    def run(self, quantum: int) -> int:
        """Step until `quantum` visible effects have happened or the warp cannot go on; returns the steps taken."""
        program, hits, fragments = self.program, self.hits, self.fragments
        steps = 0
        while quantum > 0:
            fragment = self._pick()
            if fragment is None:
                break
            self.fragment = fragment
            pc, mask = fragment.pc, fragment.mask
            if self.inflight & program.registers[pc]:
                self._check_inflight(pc)
            step = program.full[pc] if mask is True else program.part[pc]
            after = step(self, mask)
            steps += 1
            if after >= 0:
                hits[pc] += 1
                self.unfenced |= program.writes[pc]
                fragment.pc = after
                fragment.wait = None
                if len(fragments) > 1:
                    self._join(fragment)
                if program.visible[pc]:
                    quantum -= 1
                    self.effects += 1
            elif after == EXITED:
                hits[pc] += 1
                if self.done:
                    break
            elif after == SPLIT:
                hits[pc] += 1
        return steps

    def _check_inflight(self, pc: int) -> None:
        """A register that an unfinished wgmma owns is touched: the wgmma family itself may, nothing else."""
        start, stop = self.program.spans[pc]
        from .emit import operands

        for instr in self.program.kernel.instrs[start:stop]:
            if instr.parts[0] == "wgmma":
                continue
            for reg in operands(instr):
                if reg.cls == "R" and self.inflight >> reg.index & 1:
                    raise Race(
                        f"{self.describe()}: register {reg.name} belongs to a wgmma that has not been waited for"
                        f"\n  {instr.where()}"
                    )

    def describe(self) -> str:
        return f"CTA {self.cta.coords} warp {self.index}"

    def fail(self, kind: type[EmulatorError], message: str) -> EmulatorError:
        instr = self.instr()
        return kind(f"{self.describe()}: {message}\n  {instr.where() if instr else 'past the end'}")

    def standing(self) -> list[str]:
        """One line per fragment for the deadlock report."""
        lines = []
        for fragment in self.fragments:
            instrs = self.program.kernel.instrs
            where = instrs[fragment.pc].where() if fragment.pc < len(instrs) else "past the end"
            lanes = "all lanes" if fragment.mask is True else f"lanes {_ranges(fragment.mask)}"
            reason = fragment.wait.describe() if fragment.wait else "can run"
            lines.append(f"{self.describe()} {lanes}: {reason}\n      {where}")
        return lines


def _ranges(mask: np.ndarray) -> str:
    chosen = np.flatnonzero(mask)
    if len(chosen) == 0:
        return "none"
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


class _Converge:
    """Waits for lanes of the same warp: woken by their arrival at the same pc, which merges the fragments."""

    def ready(self) -> bool:
        return False

    def describe(self) -> str:
        return "waits for other lanes of the warp to arrive here"


CONVERGE = _Converge()
