"""Few query rows over a key-value cache, dense or paged: its meaning, in plain PyTorch.

Lengths and tables are read on the host. On a GPU that waits for the device, which no other backend does. Keys are never
shared out: each row is attended by itself, so its result depends on no other.
"""

from typing import NamedTuple

import torch

from cute_flash.spec.mask import Bounds
from cute_flash.spec.plan import Plan

from .forward import forward
from .tiles import Geometry


class Cache(NamedTuple):
    """As the contract has it, see spec/backend.py."""

    k: torch.Tensor
    v: torch.Tensor
    seqlens: torch.Tensor
    page_table: torch.Tensor | None
    batch_idx: torch.Tensor | None


def _index(name: str, value: int, count: int) -> int:
    if not 0 <= value < count:
        raise ValueError(f"{name} must be 0 to {count - 1}, got {value}")
    return value


def _rows_of(cache: Cache, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v), (1, length, heads_kv, dim) each, of one row of q."""
    if cache.page_table is None:
        index = row if cache.batch_idx is None else _index("cache_batch_idx", int(cache.batch_idx[row]), len(cache.k))
        return cache.k[index : index + 1, :length], cache.v[index : index + 1, :length]
    page_size = cache.k.shape[1]
    used: list[int] = cache.page_table[row, : -(-length // page_size)].tolist()
    pages = [_index("page_table", page, len(cache.k)) for page in used]
    k, v = (x[pages].flatten(0, 1)[None, :length] for x in (cache.k, cache.v))
    return k, v


def forward_cache(
    plan: Plan,
    q: torch.Tensor,
    cache: Cache,
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    numbers: tuple[float, Bounds, float],
) -> None:
    """Writes the outputs (out, lse or None) of q (batch, seqlen_q, heads_q, head_dim); numbers are the scale, the
    bounds and the softcap. ValueError for lengths that the cache does not hold, and for pages and rows that it does not
    have."""
    out, lse = outputs
    scale, bounds, softcap = numbers
    assert plan.tile is not None  # plan() always sets one
    capacity = cache.k.shape[1] * (1 if cache.page_table is None else cache.page_table.shape[1])
    for row, length in enumerate(cache.seqlens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(f"cache_seqlens must be 0 to the {capacity} keys that the cache holds, got {length}")
        k, v = _rows_of(cache, row, length)
        geometry = Geometry(plan.mask, plan.tile, q.shape[1], length, bounds)
        one = slice(row, row + 1)
        forward(geometry, (q[one], k, v), out[one], None if lse is None else lse[one], scale, softcap)
