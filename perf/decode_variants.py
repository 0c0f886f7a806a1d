"""Variants of the Hopper kernel over caches, beside cuDNN in one process: `python -m perf.decode_variants`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from cutlass import Int32, Int64

from cute_flash.arch.sm90 import backend
from cute_flash.arch.sm90 import decode as kernels
from cute_flash.arch.sm90.backend import BACKEND
from cute_flash.arch.sm90.cached import tiles as cached_tiles
from cute_flash.arch.sm90.cached.load import EVICT_FIRST, EVICT_NORMAL
from cute_flash.arch.sm90.cached.shares import Shares
from cute_flash.arch.sm90.decode import DecodeSm90
from cute_flash.runtime import caches, dispatch, request
from cute_flash.spec import settings

from . import decode, serving
from .decode import DIM, HEADS_KV, HEADS_Q
from .serving import Entrant, Run

POINTS = "1x1024,1x8192,4x1024,4x8192,1x32768,16x1024,64x1024"
HOPPER_TILE = cached_tiles.cache_tile


def _stages(count: int) -> contextlib.AbstractContextManager:
    """Of the ring; the tile is asked for where a Plan is made."""
    return mock.patch.object(backend, "cache_tile", lambda *args: replace(HOPPER_TILE(*args), stages=count))


def _policy(policy: int) -> contextlib.AbstractContextManager:
    return mock.patch.object(kernels, "policy_of", lambda kv_bytes: Int64(policy))


PATCHES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "late": lambda: mock.patch.object(Shares, "early", False),
    "two": lambda: _stages(2),
    "normal": lambda: _policy(EVICT_NORMAL),
    "first": lambda: _policy(EVICT_FIRST),
    "regs": lambda: mock.patch.object(DecodeSm90, "min_blocks", 1),
    "apart": lambda: mock.patch.object(Shares, "fused", lambda *args: Int32(0)),
}
SPLITS = (1, 2, 4, 8, 16, 32)
_kernels: dict[tuple[str, ...], tuple[Any, Any]] = {}


def kernel_of(q: torch.Tensor, cache: caches.Cache, patches: tuple[str, ...]) -> tuple[Any, Any]:
    """(Plan, compiled function)"""
    if patches not in _kernels:
        with contextlib.ExitStack() as stack:
            for name in patches:
                stack.enter_context(PATCHES[name]())
            options = request.check_options(
                {"causal": False, "window": None, "scale": None, "softcap": None, "return_lse": False,
                 "backend": "sm90", "deterministic": False}, {}, dispatch.backend_names(), "attention_kvcache",
            )  # fmt: skip
            plan = caches.decide(q, cache, options, None).plan
            _kernels[patches] = plan, BACKEND.build(plan)
    return _kernels[patches]


class Operands(decode.Operands):
    def variant(self, splits: int, *patches: str) -> Run:
        q, k, v = self.qkv
        plan, kernel = kernel_of(q, caches.Cache(k, v, self.lengths), patches)
        out = torch.empty_like(q)
        memory = torch.empty(splits * self.batch * HEADS_Q * (plan.head_dim_v + 2), device="cuda")
        counters = torch.zeros(self.batch * HEADS_KV, dtype=torch.int32, device="cuda")

        def run() -> tuple[torch.Tensor, ...]:
            kernel(q, k, v, out, None, self.lengths, None, None, None, None, splits, 0, DIM**-0.5, memory, counters)
            return (out,)

        return run

    def entrants(self) -> Mapping[str, Entrant]:
        found = {"ours": Entrant(self.ours, "", ours=True)}
        cases = [(n,) for n in SPLITS] + [(n, "two") for n in SPLITS]
        cases += [(n, "late") for n in (8, 16)] + [(n, "normal") for n in (1, 8, 16)] + [(1, "first")]
        cases += [(n, "apart") for n in SPLITS[1:]] + [(n, "apart", "regs") for n in SPLITS[1:]]
        cases += [(n, "regs") for n in SPLITS]
        most = 2112 // (self.batch * HEADS_KV)  # eight for each two CTAs that an SM has
        for n, *patches in cases:
            if n == 1 or (n <= most and self.seqlen >= 64 * n):
                name = "-".join([f"splits{n}", *patches])
                found[name] = Entrant(functools.partial(self.variant, n, *patches), "", ours=True)
        return found | {name: entrant for name, entrant in super().entrants().items() if name in ("cudnn", "read")}


def main(argv: Sequence[str] | None = None) -> int:
    args = serving.parser("decode_variants", __doc__.splitlines()[0], POINTS).parse_args(argv)
    with settings.override(cache_dir=None), mock.patch.object(decode, "Operands", Operands):
        serving.race(args, (decode.question(point) for point in args.points.split(",")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
