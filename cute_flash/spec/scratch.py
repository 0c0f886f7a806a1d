"""How much global memory a kernel wants beside its operands: from sizes on the host."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScratchRule:
    """float32 elements for a call: so many a query row, rows counted in whole tiles."""

    tile_m: int
    floats_per_row: int

    def elements(self, batch: int, heads_q: int, seqlen_q: int) -> int:
        return batch * heads_q * -(-seqlen_q // self.tile_m) * self.tile_m * self.floats_per_row
