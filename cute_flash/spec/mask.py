"""Which keys a query row may see: presence of each bound is static, its value is a run-time operand.

Causal is aligned bottom-right: row i sees keys j <= i + seqlen_k - seqlen_q. A window (left, right) is inclusive around
that diagonal.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Bounds(NamedTuple):
    """The values of a window's bounds in one call; one that the Mask does not have is 0 and means nothing."""

    left: int = 0
    right: int = 0


UNUSED = Bounds()


@dataclass(frozen=True)
class Mask:
    left: bool = False  # keys more than `left` before the diagonal are hidden
    right: bool = False  # keys more than `right` after the diagonal are hidden; causal is right = 0
    causal: bool = False  # right bound present and known to be 0

    def __post_init__(self) -> None:
        if self.causal and not self.right:
            raise ValueError("Mask(causal=True) has a right bound: pass right=True")

    @property
    def windowed(self) -> bool:
        """Does a bound arrive at run time? (The right one of a causal mask does not: it is 0.)"""
        return self.left or (self.right and not self.causal)

    def __str__(self) -> str:
        if not self.windowed:
            return "causal" if self.causal else "full"
        right = "0" if self.causal else "right" if self.right else "None"
        return f"window({'left' if self.left else 'None'},{right})"

    def dense(
        self, seqlen_q: int, seqlen_k: int, bounds: Bounds = UNUSED, device: torch.device | None = None
    ) -> torch.Tensor:
        """The meaning of the mask: bool (seqlen_q, seqlen_k), True where row i may see key j."""
        diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
        keys = torch.arange(seqlen_k, device=device)[None, :]
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        if self.right:
            visible &= keys <= diagonal + (0 if self.causal else bounds.right)
        if self.left:
            visible &= keys >= diagonal - bounds.left
        return visible

    def key_range(
        self, rows: tuple[int, int], seqlen_q: int, seqlen_k: int, bounds: Bounds = UNUSED
    ) -> tuple[int, int]:
        """Keys [first, last) that at least one of the query rows [start, end) sees; first = last where none does."""
        start, end = rows
        diagonal = seqlen_k - seqlen_q
        first, last = 0, seqlen_k
        if self.right:
            last = max(0, min(seqlen_k, end + diagonal + (0 if self.causal else bounds.right)))
        if self.left:
            first = min(last, max(0, start + diagonal - bounds.left))
        return first, last

    def sees_all(self, rows: tuple[int, int], keys: tuple[int, int], diagonal: int, bounds: Bounds = UNUSED) -> bool:
        """Does every query row of [start, end) see every key of [start, end)? diagonal = seqlen_k - seqlen_q."""
        after = self.right and keys[1] - 1 > rows[0] + diagonal + (0 if self.causal else bounds.right)
        before = self.left and keys[0] < rows[1] - 1 + diagonal - bounds.left
        return not after and not before


FULL = Mask()
CAUSAL = Mask(right=True, causal=True)
