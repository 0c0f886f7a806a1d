"""Tensor memory of a CTA: 128 lanes of 512 32-bit columns, and who has allocated which."""

from __future__ import annotations

import numpy as np

from .errors import IllegalInstruction
from .order import Shadow
from .registers import POISON32

LANES, COLUMNS = 128, 512
ROWS_PER_CELL = 16  # a shadow cell is one column of 16 lanes: the finest any shape writes


class Tmem:
    def __init__(self, cta):
        self.cta = cta
        self._data: np.ndarray | None = None
        self.allocated = np.zeros(COLUMNS, np.bool_)
        self.blocks: dict[int, int] = {}
        self.permit = True
        self._shadow: Shadow | None = None

    @property
    def data(self) -> np.ndarray:
        if self._data is None:
            self._data = np.full((LANES, COLUMNS), POISON32, np.uint32)
        return self._data

    @property
    def shadow(self) -> Shadow:
        if self._shadow is None:
            self._shadow = Shadow(LANES // ROWS_PER_CELL * COLUMNS, f"TMEM of CTA {self.cta.coords}")
        return self._shadow

    def allocate(self, columns: int) -> int | None:
        """First free block, or None when it has to wait for a dealloc."""
        for start in range(0, COLUMNS - columns + 1, columns):
            if not self.allocated[start : start + columns].any():
                self.allocated[start : start + columns] = True
                self.blocks[start] = columns
                self.data[:, start : start + columns] = POISON32
                return start
        return None

    def free(self, start: int, columns: int) -> None:
        if self.blocks.get(start) != columns:
            raise IllegalInstruction(
                f"dealloc of {columns} TMEM columns at {start}, which were not allocated so (have {self.blocks})"
            )
        del self.blocks[start]
        self.allocated[start : start + columns] = False

    def check(self, start: int, columns: int) -> None:
        if start < 0 or start + columns > COLUMNS or not self.allocated[start : start + columns].all():
            raise IllegalInstruction(f"TMEM columns {start}..{start + columns - 1} are not allocated")

    def cells(self, lane0: int, lanes: int, start: int, columns: int) -> np.ndarray:
        rows = np.arange(lane0 // ROWS_PER_CELL, (lane0 + lanes + ROWS_PER_CELL - 1) // ROWS_PER_CELL)
        return (rows[:, None] * COLUMNS + np.arange(start, start + columns)).ravel()

    def cta_done(self) -> None:
        if self.blocks:
            raise IllegalInstruction(f"CTA {self.cta.coords} ends with TMEM still allocated: {self.blocks}")
