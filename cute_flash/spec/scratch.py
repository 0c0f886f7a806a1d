"""How much global memory a kernel wants beside its operands: from sizes on the host."""

from dataclasses import dataclass

SHARED_ALIGN = 32  # elements: 128 bytes
SHARED_TILES = 128  # key tiles of all query heads: up to here every head of a group has two shares of its own, else all


@dataclass(frozen=True)
class TableRule:
    """int32 elements for a forward of packed sequences: so many a sequence, and so many besides."""

    words_per_sequence: int
    words: int

    def elements(self, sequences: int) -> int:
        return self.words_per_sequence * sequences + self.words


@dataclass(frozen=True)
class ScratchRule:
    """float32 elements for a call: so many a query row, rows counted in whole tiles, and so many a tile; after them, at
    a multiple of SHARED_ALIGN, so many for each share of a tile of tile_n keys of a head of K and V but one, and words.

    Of packed sequences, every sequence and what follows the last have a tile more, and a table comes before them all.
    """

    tile_m: int
    floats_per_row: int
    floats_per_tile: int = 0
    table: TableRule | None = None
    table_align: int = 1  # elements
    tile_n: int = 0
    floats_per_share: int = 0
    words_per_key_tile: int = 0

    def elements(
        self, batch: int, heads_q: int, seqlen_q: int, sequences: int = 0, heads_kv: int = 0, seqlen_k: int = 0
    ) -> int:
        tiles, before = -(-seqlen_q // self.tile_m), 0
        if self.table is not None:
            tiles += sequences + 1
            before = -(-self.table.elements(sequences) // self.table_align) * self.table_align
        rows = before + batch * heads_q * tiles * (self.tile_m * self.floats_per_row + self.floats_per_tile)
        if not self.floats_per_share:
            return rows
        key_tiles = -(-seqlen_k // self.tile_n)
        shares = 2 * heads_q // heads_kv if batch * heads_q * key_tiles <= SHARED_TILES else 2
        each = (shares - 1) * self.floats_per_share + self.words_per_key_tile
        return -(-rows // SHARED_ALIGN) * SHARED_ALIGN + batch * heads_kv * key_tiles * each
