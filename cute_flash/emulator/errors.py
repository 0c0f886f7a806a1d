"""What the emulator raises: every report names the PTX line and, with line info, the Python line."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """Base of everything the emulator finds wrong with a program."""


class Unavailable(EmulatorError):
    """This machine lacks what the emulator stands on: Linux, gcc or CuTe-DSL."""


class UnknownInstruction(EmulatorError):
    """An instruction, or a form of one, that the emulator does not model."""


class BadAccess(EmulatorError):
    """An address outside mapped memory, misaligned, or of the wrong space."""


class IllegalInstruction(EmulatorError):
    """A modelled instruction used against its rules (wrong warp, wrong count, freed TMEM ...)."""


class Race(EmulatorError):
    """Two accesses to the same bytes, at least one a write, that no synchronisation orders."""


class Deadlock(EmulatorError):
    """No warp can run and no operation is in flight."""


class StepLimit(EmulatorError):
    """A launch took more steps than `max_steps` allows: it polls for ever, or is long."""
