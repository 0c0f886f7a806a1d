"""How the reference cuts the score matrix, and which keys a tile sees."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cute_flash.spec.mask import UNUSED, Bounds, Mask
from cute_flash.spec.plan import Tile

# Wide enough that a tile pair is one large batched matmul, narrow enough that 32 heads of scores stay near 8 MB.
TILE = Tile(tile_m=256, tile_n=256, stages=1)
# Scores alive at once (64 MB in float32): larger batches are walked in pieces, so memory never grows with batch * N^2.
SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Span:
    """Rows or keys [start, end)."""

    start: int
    end: int


@dataclass(frozen=True)
class Geometry:
    """What decides which tile pairs are visited."""

    mask: Mask
    tile: Tile
    seqlen_q: int
    seqlen_k: int
    bounds: Bounds = UNUSED

    def query_tiles(self) -> Iterator[Span]:
        for start in range(0, self.seqlen_q, self.tile.tile_m):
            yield Span(start, min(start + self.tile.tile_m, self.seqlen_q))

    def key_tiles(self, rows: Span) -> Iterator[Span]:
        """Key tiles that at least one of the rows sees: the fully masked ones are skipped."""
        first, last = self.mask.key_range((rows.start, rows.end), self.seqlen_q, self.seqlen_k, self.bounds)
        for start in range(first, last, self.tile.tile_n):
            yield Span(start, min(start + self.tile.tile_n, last))

    def hidden(self, rows: Span, keys: Span, device: torch.device) -> torch.Tensor | None:
        """Bool (rows, keys), True where masked; None where every row of the tile sees every key of it."""
        diagonal = self.seqlen_k - self.seqlen_q
        mask, bounds = self.mask, self.bounds
        if mask.sees_all((rows.start, rows.end), (keys.start, keys.end), diagonal, bounds):
            return None
        distance = torch.arange(keys.start, keys.end, device=device)[None, :] - diagonal
        distance = distance - torch.arange(rows.start, rows.end, device=device)[:, None]  # key past the row's diagonal
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if mask.right:
            hidden |= distance > (0 if mask.causal else bounds.right)
        if mask.left:
            hidden |= distance < -bounds.left
        return hidden


def batch_pieces(batch: int, heads_q: int, tile: Tile) -> Iterator[slice]:
    """Slices of the batch whose score tiles fit in SCORES_AT_ONCE (one batch element at least)."""
    step = max(1, SCORES_AT_ONCE // (heads_q * tile.tile_m * tile.tile_n))
    for start in range(0, batch, step):
        yield slice(start, min(start + step, batch))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is computed in float32 and rounded once, on the way out."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(batch, seqlen, heads, dim) -> (batch, heads, seqlen, dim), packed and upcast."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).contiguous()


def query_rows(x: torch.Tensor, rows: Span, heads_kv: int, dtype: torch.dtype) -> torch.Tensor:
    """(batch, seqlen_q, heads_q, dim) -> (batch, heads_kv, group * rows, dim): a KV head's queries, as one matrix."""
    tile = x[:, rows.start : rows.end].unflatten(2, (heads_kv, -1))  # (batch, rows, heads_kv, group, dim)
    return tile.permute(0, 2, 3, 1, 4).to(dtype).flatten(2, 3)


def store_query_rows(target: torch.Tensor, rows: Span, value: torch.Tensor) -> None:
    """The way back: round once into (batch, seqlen_q, heads_q, dim)."""
    heads_kv = value.shape[1]
    tile = value.unflatten(2, (-1, rows.end - rows.start)).permute(0, 3, 1, 2, 4)
    target[:, rows.start : rows.end].unflatten(2, (heads_kv, -1)).copy_(tile)


def row_values(x: torch.Tensor, rows: Span, heads_kv: int) -> torch.Tensor:
    """(batch, heads_q, seqlen_q) -> (batch, heads_kv, group * rows, 1), for LSE and its gradient."""
    return x[:, :, rows.start : rows.end].unflatten(1, (heads_kv, -1)).flatten(2, 3)[..., None]
