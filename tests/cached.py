"""Key-value caches for every test: dense, with chosen rows, or paged; NaN wherever no row may look."""

import math
from dataclasses import dataclass, fields

import torch

from tests import oracle


@dataclass(frozen=True)
class CacheCase:
    lens: tuple[int, ...]
    seqlen_q: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    capacity: int = 100  # keys a row may have; of a paged cache rounded up to whole pages
    page_size: int = 0
    chosen: bool = False  # cache_batch_idx: rows in another order, some of no use
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dtype: str = "float64"

    def __str__(self) -> str:
        words = ["+".join(map(str, self.lens)), f"q{self.seqlen_q}", f"h{self.heads_q}x{self.heads_kv}"]
        words += [f"d{self.head_dim}v{self.head_dim_v}", f"c{self.capacity}", self.dtype]
        words += [f"page{self.page_size}"] if self.page_size else []
        words += ["chosen"] if self.chosen else []
        words += ["causal"] if self.causal else []
        words += ["window" + "x".join(map(str, self.window))] if self.window else []
        words += [f"softcap{self.softcap}"] if self.softcap else []
        return "-".join(words)

    @property
    def options(self) -> dict:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor  # the caches
    v: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None

    def to(self, device: torch.device) -> "Inputs":
        moved = (getattr(self, field.name) for field in fields(self))
        return Inputs(*(x if x is None else x.to(device) for x in moved))

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def tables(self) -> dict:
        return {
            "cache_seqlens": self.cache_seqlens,
            "page_table": self.page_table,
            "cache_batch_idx": self.cache_batch_idx,
        }

    def place_of(self, row: int, position: int) -> tuple[int, int]:
        """Where a row's key lies in k and v."""
        if self.page_table is not None:
            page, place = divmod(position, self.k.shape[1])
            return int(self.page_table[row, page]), place
        return row if self.cache_batch_idx is None else int(self.cache_batch_idx[row]), position

    def keys_of(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) (1, length, heads_kv, dim) of one row, gathered."""
        if self.page_table is None:
            index = row if self.cache_batch_idx is None else int(self.cache_batch_idx[row])
            return self.k[index, None, :length], self.v[index, None, :length]
        pages = self.page_table[row, : -(-length // self.k.shape[1])].long()
        return self.k[pages].flatten(0, 1)[None, :length], self.v[pages].flatten(0, 1)[None, :length]


def make_inputs(case: CacheCase, seed: int = 0) -> Inputs:
    """Pages in random order, the last of a row partly filled; unused entries of the table point at a page of NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype, batch = getattr(torch, case.dtype), len(case.lens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = randn(batch, case.seqlen_q, case.heads_q, case.head_dim)
    lens = torch.tensor(case.lens, dtype=torch.int32)
    if not case.page_size:
        rows = torch.randperm(2 * batch, generator=generator)[:batch] if case.chosen else torch.arange(batch)
        k, v = (
            torch.full((2 * batch if case.chosen else batch, case.capacity, case.heads_kv, dim), math.nan, dtype=dtype)
            for dim in (case.head_dim, case.head_dim_v)
        )
        for row, length in zip(rows.tolist(), case.lens, strict=True):
            for x in (k, v):
                x[row, :length] = randn(length, case.heads_kv, x.shape[-1])
        return Inputs(q, k, v, lens, None, rows.int() if case.chosen else None)
    pages_a_row = -(-case.capacity // case.page_size)
    used = [-(-length // case.page_size) for length in case.lens]
    order = (torch.randperm(sum(used), generator=generator) + 1).tolist()
    table = torch.zeros(batch, pages_a_row, dtype=torch.int32)
    k, v = (
        torch.full((sum(used) + 1, case.page_size, case.heads_kv, dim), math.nan, dtype=dtype)
        for dim in (case.head_dim, case.head_dim_v)
    )
    for row, (length, count) in enumerate(zip(case.lens, used, strict=True)):
        for i in range(count):
            page, filled = order.pop(), min(case.page_size, length - i * case.page_size)
            table[row, i] = page
            for x in (k, v):
                x[page, :filled] = randn(filled, case.heads_kv, x.shape[-1])
    return Inputs(q, k, v, lens, table, None)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=9.0), other.nan_to_num(nan=9.0))


def taken_out(inputs, count: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """((k_new, v_new), the lengths before): each row's last keys leave the cache, NaN where they were."""
    shape = (len(inputs.cache_seqlens), count, inputs.k.shape[2])
    new = tuple(torch.empty(*shape, x.shape[-1], dtype=x.dtype) for x in (inputs.k, inputs.v))
    for row, length in enumerate(inputs.cache_seqlens.tolist()):
        for i in range(count):
            place = inputs.place_of(row, length - count + i)
            for x, taken in zip((inputs.k, inputs.v), new, strict=True):
                taken[row, i] = x[place]
                x[place] = math.nan
    return new, inputs.cache_seqlens - count


def exact(case: CacheCase, inputs: Inputs, attention=oracle.forward) -> oracle.Attention:
    """float64, each row by itself on its own keys."""
    found = []
    for row, length in enumerate(inputs.cache_seqlens.tolist()):
        found.append(attention(inputs.q[row, None], *inputs.keys_of(row, length), **case.options))
    return oracle.Attention(torch.cat([f.out for f in found]), torch.cat([f.lse for f in found]))


PAGE_SIZES = (1, 16, 64, 128, 256)


def lens_of(page: int) -> tuple[int, ...]:
    """0, 1, and around a page's edge."""
    return (0, 1, max(page - 1, 0), page, page + 1, 2 * page + 3)


def cases(**others) -> list[CacheCase]:
    found = [CacheCase((0, 1, 63, 64, 65, 100, 7), seqlen_q=n, causal=n > 1, **others) for n in (1, 2, 5, 16)]
    found += [CacheCase((33, 0, 100), chosen=True, **others), CacheCase((100,) * 3, seqlen_q=3, **others)]
    for page in PAGE_SIZES:
        found.append(CacheCase(lens_of(page), page_size=page, capacity=2 * page + 9, **others))
        found.append(CacheCase(lens_of(page), seqlen_q=4, causal=True, page_size=page, capacity=2 * page + 3, **others))
    for window in ((10, None), (0, 0), (7, 3), (None, 2)):
        found.append(CacheCase((0, 3, 50, 100), seqlen_q=4, window=window, causal=window[1] is None, **others))
        found.append(CacheCase((0, 3, 50, 100), window=window, page_size=16, softcap=1.5, **others))
    return found
