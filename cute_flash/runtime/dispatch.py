"""Which backend runs a problem: ask each in turn, best first, and keep every refusal."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import cute_flash.arch as arch

from ..spec import device as device_facts
from ..spec import settings
from ..spec.backend import Backend
from ..spec.errors import FallbackWarning, StrictFallbackError, UnsupportedError, lay_out
from ..spec.plan import Plan
from ..spec.problem import Problem
from . import emulation, report, toolchain

CAPABILITY_MIN = (8, 0)
REFERENCE = "reference"


@dataclass(frozen=True)
class Decision:
    """What runs, and why each better backend does not. str() is the walk, one line per fact."""

    problem: Problem
    backend: Backend
    plan: Plan
    refusals: Mapping[str, tuple[str, ...]]  # of the backends asked before, in order
    fallback: bool = False  # one of them is made for this device
    copies: tuple[str, ...] = ()  # inputs the backend cannot read as they lie
    sharing: tuple[str, ...] = ()  # plans that run instead where query rows are few; `explain` alone fills it in
    backward: "Decision | None" = field(default=None, compare=False)

    @property
    def sentence(self) -> str:
        """Why a more general backend runs; empty where it is no fallback."""
        if not self.fallback:
            return ""
        headline = f"the {self.problem.direction} on {self.problem.device} falls back to {self.backend.name}:"
        return lay_out(headline, self.refusals)

    @property
    def caveat(self) -> str:
        return self.backend.caveat(self.problem.device)

    def lines(self, origin: str = "") -> list[str]:
        """The walk, forward only. `origin` says where the kernel came from."""
        origin = f" ({origin})" if origin else ""
        mark = " [fallback]" if self.fallback else ""
        lines = [str(self.problem), f"  runs: {self.plan}{mark}{origin}"]
        lines += [f"  {self.backend.name}: {self.caveat}"] if self.caveat else []
        lines += [f"  {sentence}" for sentence in self.sharing + self.copies]
        return lay_out("\n".join(lines), self.refusals).splitlines()

    def facts(self) -> dict[str, Any]:
        """The walk as plain values, for JSON."""
        return {
            "problem": str(self.problem),
            "backend": self.backend.name,
            "plan": str(self.plan),
            "fallback": self.fallback,
            "refusals": {name: list(sentences) for name, sentences in self.refusals.items()},
            "copies": list(self.copies),
            "sharing": list(self.sharing),
            "caveat": self.caveat,
            "backward": self.backward.facts() if self.backward else None,
        }

    def __str__(self) -> str:
        walk = self.lines() + (self.backward.lines() if self.backward else [])
        return "\n".join(walk)


_broken: dict[str, str] = {}  # toolchain module -> what its import raised


def backend_names() -> tuple[str, ...]:
    return tuple(backend.name for backend in arch.BACKENDS)


def mark_broken(module: str, error: Exception) -> None:
    """A toolchain that is installed but does not import: its backends refuse from now on, naming the error."""
    _broken[module] = f"{type(error).__name__}: {error}"


def forget_broken() -> None:
    """For tests: every toolchain is whole again."""
    _broken.clear()


def _toolchain_refusals(backend: Backend) -> tuple[str, ...]:
    modules = toolchain.modules(backend)
    outdated = tuple(filter(None, map(toolchain.outdated, modules)))
    if outdated:
        return outdated  # why an import fails, where it does
    reasons = {module: _broken.get(module) or toolchain.missing(module) for module in modules}
    return tuple(f"`import {module}` fails: {reason}" for module, reason in reasons.items() if reason)


def _refusals(backend: Backend, problem: Problem) -> tuple[str, ...]:
    if emulation.is_emulated(problem.device) and not backend.exports:
        # The emulator runs CuTe-DSL kernels; whoever else is asked sees the tensors where they are.
        problem = replace(problem, device=device_facts.describe(torch.device("cpu")))
    return tuple(backend.refuse(problem)) or _toolchain_refusals(backend)


def _decide(problem: Problem, backend: Backend, refused: Sequence[tuple[Backend, tuple[str, ...]]]) -> Decision:
    return Decision(
        problem=problem,
        backend=backend,
        plan=backend.plan(problem),
        refusals={other.name: sentences for other, sentences in refused},
        fallback=any(other.native(problem.device) for other, _ in refused),
        copies=problem.unaligned if backend.row_alignment else (),
    )


def _forced(problem: Problem, name: str) -> Decision:
    backend = next(backend for backend in arch.BACKENDS if backend.name == name)
    sentences = _refusals(backend, problem)
    if sentences:
        raise UnsupportedError(lay_out(f"backend {name!r} was asked for and cannot run {problem}:", {name: sentences}))
    return _decide(problem, backend, ())


def choose(problem: Problem, forced: str | None = None) -> Decision:
    """The first backend that takes the problem. `forced` (else CUTE_FLASH_BACKEND) names the only one to ask."""
    forced = forced or settings.current.backend
    if forced:
        return _forced(problem, forced)
    capability = problem.device.capability
    if capability is not None and capability < CAPABILITY_MIN:
        raise UnsupportedError(
            f"compute capability {capability[0]}.{capability[1]} ({problem.device.name}) is below the minimum of 8.0; "
            f"backend={REFERENCE!r} runs plain PyTorch there"
        )
    refused: list[tuple[Backend, tuple[str, ...]]] = []
    for backend in arch.BACKENDS:
        sentences = _refusals(backend, problem)
        if sentences:
            refused.append((backend, sentences))
            continue
        decision = _decide(problem, backend, refused)
        if decision.fallback and settings.current.strict:
            raise StrictFallbackError(f"CUTE_FLASH_STRICT=1 and {decision.sentence}")
        return decision
    every = {backend.name: sentences for backend, sentences in refused}
    raise UnsupportedError(lay_out(f"no backend can run {problem}:", every))


def warn_fallback(decision: Decision) -> None:
    """Said aloud once per distinct decision, whatever the log settings."""
    if decision.fallback and report.first_time(f"fallback: {decision.plan} {decision.sentence}"):
        warnings.warn(decision.sentence, FallbackWarning, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """stacklevel, counted from warn_fallback, of the first frame outside this package and torch: the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("cute_flash.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def announce(decision: Decision, origin: str) -> None:
    """The warning a fallback owes, and the walk where CUTE_FLASH_LOG asks for it."""
    warn_fallback(decision)
    if "dispatch" not in settings.current.log:
        return
    fresh = report.first_time(f"decision: {decision}")
    for copy in decision.copies:
        report.first_time(f"dispatch: {copy}")  # the walk says it; the launch that copies need not repeat it
    if fresh:
        report.write("dispatch", "\n".join(decision.lines(origin)))
