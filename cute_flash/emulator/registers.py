"""The register file of one warp: rows of 32 lanes, with a view per type so that generated code never casts."""

from __future__ import annotations

import numpy as np

# Quiet NaNs as f32, f64, f16 and bf16, and far outside any address or index: whatever reads them, shows.
POISON16, POISON32, POISON64 = 0x7FDE, 0x7FDE7FDE, 0x7FDE7FDE7FDE7FDE
LANES = 32


class Registers:
    """Views by letter: see emit.VIEWS. X, V, W and Q rows hold 64 elements, two per lane."""

    __slots__ = ("D", "E", "F", "G", "H", "I", "L", "P", "Q", "R", "S", "V", "W", "X", "_arrays")

    def __init__(self, counts: dict):
        pred = np.empty((counts["P"], LANES), np.bool_)
        half = np.empty((counts["H"], LANES), np.uint16)
        word = np.empty((counts["R"], LANES), np.uint32)
        double = np.empty((counts["D"], LANES), np.uint64)
        quad = np.empty((counts["Q"], 2 * LANES), np.uint64)
        self._arrays = {"P": pred, "H": half, "R": word, "D": double, "Q": quad}
        self.poison()
        self.P = list(pred)
        self.H, self.I, self.E = list(half), list(half.view(np.int16)), list(half.view(np.float16))
        self.R, self.S, self.F = list(word), list(word.view(np.int32)), list(word.view(np.float32))
        self.X = list(word.view(np.float16))
        self.D, self.L, self.G = list(double), list(double.view(np.int64)), list(double.view(np.float64))
        self.V, self.W = list(double.view(np.float32)), list(double.view(np.uint32))
        self.Q = list(quad)

    def poison(self) -> None:
        for cls, value in (("P", False), ("H", POISON16), ("R", POISON32), ("D", POISON64), ("Q", POISON64)):
            self._arrays[cls].fill(value)
        self._arrays["P"][:, 1::2] = True

    def matrix(self, cls: str = "R") -> np.ndarray:
        """All registers of a class as one array (count, 32)."""
        return self._arrays[cls]


class RegisterPool:
    """The registers of a CTA. Its warps start with all of them, alike; setmaxnreg only moves them."""

    FILE = 65_536  # 32-bit registers of an SM, compute capabilities 9.0 to 10.3

    def __init__(self, threads: int):
        self.at_launch = min(255, self.FILE // threads) // 8 * 8  # ptxas: as many as let the CTA start
        self.free = 0
