"""One query row over a key-value cache, beside SDPA's kernels: `python -m perf.decode --points 1x8192,16x8192`.

32 query heads, 8 of keys, head dim 128, bfloat16; every row has the whole cache. GB/s counts K and V once. Printed, not
recorded.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_flash
from cute_flash import kvcache
from cute_flash.arch.triton import tiles
from cute_flash.spec.plan import Plan

from .replay import Contest, Run

HEADS_Q, HEADS_KV, DIM = 32, 8, 128
POINTS = ",".join(f"{b}x{s}" for b in (1, 4, 16, 64) for s in (1024, 8192, 32768, 131072) if b * s <= 64 * 32768)


def _sdpa(kind: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def run() -> torch.Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)

    return run


def _paged(x: torch.Tensor, page_size: int, table: torch.Tensor) -> torch.Tensor:
    """The same keys in pages, where the table says."""
    pages = x.new_empty(table.numel(), page_size, HEADS_KV, DIM)
    pages[table.flatten().long()] = x.reshape(-1, page_size, HEADS_KV, DIM)
    return pages


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int = 0, **options: object) -> Run:
    batch, seqlen = k.shape[:2]
    tables = {"cache_seqlens": torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")}
    if page_size:
        pages = batch * seqlen // page_size
        tables["page_table"] = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
        k, v = (_paged(x, page_size, tables["page_table"]) for x in (k, v))
    return functools.partial(cute_flash.attention_kvcache, q, k, v, **tables, **options)


def _tiled(words: str, make: Callable[[], Run]) -> Run:
    """Ours with another tile of the Triton kernel: KEYSxWARPSxSTAGES."""
    tile_n, warps, stages = (int(word) for word in words.split("x"))
    planned = tiles.for_cache

    def for_cache(plan: Plan, few_rows: int) -> Plan:
        plan = planned(plan, few_rows)
        return replace(plan, tile=replace(plan.tile, tile_n=tile_n, warps=warps, stages=stages))

    def run() -> torch.Tensor:
        with mock.patch.object(tiles, "for_cache", for_cache), mock.patch.object(kvcache, "_warm", {}):
            return made()

    made = make()
    return run


def contestants(
    batch: int, seqlen: int, others: Sequence[str] = (), splits: Sequence[int] = ()
) -> dict[str, Callable[[], Run]]:
    torch.manual_seed(0)
    q = torch.randn(batch, 1, HEADS_Q, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch, seqlen, HEADS_KV, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return {
        "ours": lambda: _ours(q, k, v),
        "ours-page64": lambda: _ours(q, k, v, 64),
        "ours-page16": lambda: _ours(q, k, v, 16),
        "ours-invariant": lambda: _ours(q, k, v, batch_invariant=True),
        **{f"ours-splits{n}": functools.partial(_ours, q, k, v, num_splits=n) for n in splits},
        "triton": lambda: _ours(q, k, v, backend="triton"),
        **{
            f"triton-{words}": functools.partial(_tiled, words, lambda: _ours(q, k, v, backend="triton"))
            for words in others
        },
        "cudnn": lambda: _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v),
        "fa2": lambda: _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--points", default=POINTS, metavar="BATCHxSEQLEN,...")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each point")
    parser.add_argument("--splits", default="", metavar="N,...", help="ours with so many shares, beside it")
    parser.add_argument("--tiles", default="", metavar="KEYSxWARPSxSTAGES,...", help="other tiles of the Triton kernel")
    args = parser.parse_args(argv)
    for point in args.points.split(","):
        batch, seqlen = (int(part) for part in point.split("x"))
        others, splits = ([word for word in words.split(",") if word] for words in (args.tiles, args.splits))
        contest = Contest(contestants(batch, seqlen, others, [int(n) for n in splits]))
        bytes_moved = 2 * batch * seqlen * HEADS_KV * DIM * 2
        rows = [(name, f"{t:.1f}", f"{bytes_moved / t / 1e3:.0f}") for name, t in contest.medians(args.seconds).items()]
        print(f"B={batch} S={seqlen}", "; ".join(f"{n} {t} us {r} GB/s" for n, t, r in rows), flush=True)
        for name, reason in contest.out.items():
            print(f"  {name}: {reason}", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
