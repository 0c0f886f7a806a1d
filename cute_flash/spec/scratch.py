"""How much global memory a kernel wants beside its operands: from sizes on the host."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScratchRule:
    """float32 elements for a call: so many a query row, rows counted in whole tiles, and so many a tile; and so many
    counters for a launch."""

    tile_m: int
    floats_per_row: int
    floats_per_tile: int = 0
    counters: int = 0

    def elements(self, batch: int, heads_q: int, seqlen_q: int) -> int:
        tiles = batch * heads_q * -(-seqlen_q // self.tile_m)
        return tiles * (self.tile_m * self.floats_per_row + self.floats_per_tile)


@dataclass(frozen=True)
class TableRule:
    """int32 elements for a forward of packed sequences: so many a sequence, and so many besides."""

    words_per_sequence: int
    words: int

    def elements(self, sequences: int) -> int:
        return self.words_per_sequence * sequences + self.words
