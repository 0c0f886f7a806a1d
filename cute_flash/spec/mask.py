"""Which keys a query row may see: presence of each bound is static, its value is a run-time operand.

Causal is aligned bottom-right: row i sees keys j <= i + seqlen_k - seqlen_q. A window (left, right) is inclusive around
that diagonal. Windows are described here but no backend serves them yet.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mask:
    left: bool = False  # keys more than `left` before the diagonal are hidden
    right: bool = False  # keys more than `right` after the diagonal are hidden; causal is right = 0
    causal: bool = False  # right bound present and known to be 0

    def __post_init__(self) -> None:
        if self.causal and not self.right:
            raise ValueError("Mask(causal=True) has a right bound: pass right=True")

    def __str__(self) -> str:
        if self.causal and not self.left:
            return "causal"
        return "window" if self.left or self.right else "full"

    def dense(
        self,
        seqlen_q: int,
        seqlen_k: int,
        left: int | None = None,
        right: int | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The meaning of the mask: bool (seqlen_q, seqlen_k), True where row i may see key j."""
        diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
        keys = torch.arange(seqlen_k, device=device)[None, :]
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        if self.right:
            visible &= keys <= diagonal + (0 if self.causal or right is None else right)
        if self.left and left is not None:
            visible &= keys >= diagonal - left
        return visible

    def key_range(self, row_start: int, row_end: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Keys [first, last) that at least one of the query rows [row_start, row_end) sees (causal and full only)."""
        if not self.causal:
            return 0, seqlen_k
        return 0, max(0, min(seqlen_k, row_end + seqlen_k - seqlen_q))


FULL = Mask()
CAUSAL = Mask(right=True, causal=True)
