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
    k_new: torch.Tensor | None
    v_new: torch.Tensor | None

    @property
    def capacity(self) -> int:
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])


def _index(name: str, value: int, count: int) -> int:
    if not 0 <= value < count:
        raise ValueError(f"{name} must be 0 to {count - 1}, got {value}")
    return value


def _homes(cache: Cache, row: int, length: int) -> list[int]:
    """The pages that hold the first keys of a row of q; its one cache row where there are no pages."""
    if cache.page_table is None:
        return [row if cache.batch_idx is None else _index("cache_batch_idx", int(cache.batch_idx[row]), len(cache.k))]
    used: list[int] = cache.page_table[row, : -(-length // cache.k.shape[1])].tolist()
    return [_index("page_table", page, len(cache.k)) for page in used]


def _append(cache: Cache, lengths: list[int]) -> list[int]:
    """New keys go behind each row's; -> the lengths they make. Nothing is written where one of them has no place."""
    if cache.k_new is None or cache.v_new is None:
        return lengths
    made = [min(length + cache.k_new.shape[1], cache.capacity) for length in lengths]
    homes = [_homes(cache, row, length) for row, length in enumerate(made)]
    _refuse_collisions(cache, homes, lengths, made)
    for row, (first, last) in enumerate(zip(lengths, made, strict=True)):
        for position in range(first, last):
            index, place = divmod(position, cache.k.shape[1])
            cache.k[homes[row][index], place] = cache.k_new[row, position - first]
            cache.v[homes[row][index], place] = cache.v_new[row, position - first]
    return made


def _refuse_collisions(cache: Cache, homes: list[list[int]], lengths: list[int], made: list[int]) -> None:
    """ValueError where two rows would write to one place: which of them is kept would be left to chance."""
    writers: dict[tuple[int, int], int] = {}
    for row, (first, last) in enumerate(zip(lengths, made, strict=True)):
        for position in range(first, last):
            index, place = divmod(position, cache.k.shape[1])
            other = writers.setdefault((homes[row][index], place), row)
            if other != row:
                where = f"{'cache row' if cache.page_table is None else 'page'} {homes[row][index]}"
                raise ValueError(f"k_new: rows {other} and {row} would both be written to place {place} of {where}")


def _rows_of(cache: Cache, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v), (1, length, heads_kv, dim) each, of one row of q."""
    homes = _homes(cache, row, length)
    if cache.page_table is None:
        return cache.k[homes[0], None, :length], cache.v[homes[0], None, :length]
    k, v = (x[homes].flatten(0, 1)[None, :length] for x in (cache.k, cache.v))
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
    lengths: list[int] = cache.seqlens.tolist()
    for length in lengths:
        if not 0 <= length <= cache.capacity:
            raise ValueError(f"cache_seqlens must be 0 to the {cache.capacity} keys that the cache holds, got {length}")
    for row, length in enumerate(_append(cache, lengths)):
        k, v = _rows_of(cache, row, length)
        geometry = Geometry(plan.mask, plan.tile, q.shape[1], length, bounds)
        one = slice(row, row + 1)
        forward(geometry, (q[one], k, v), out[one], None if lse is None else lse[one], scale, softcap)
