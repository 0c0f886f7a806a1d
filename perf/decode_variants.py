"""Variants of the Hopper kernel over caches, beside cuDNN in one process: `python -m perf.decode_variants`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import cutlass.cute as cute
import torch
from cutlass import Int32

from cute_flash import kvcache
from cute_flash.arch.sm90 import backend
from cute_flash.arch.sm90.cached import cluster
from cute_flash.arch.sm90.cached.shares import Shares
from cute_flash.arch.sm90.decode import DecodeSm90
from cute_flash.runtime import compiler
from cute_flash.spec import settings

from . import decode, serving
from .serving import Entrant, Run

POINTS = "1x1024,1x8192,4x1024,4x8192,1x32768,16x1024,16x8192"


def _relaxed() -> None:
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """One CTA a cluster; the second kernel's scratch is there."""
    alone = mock.patch.object(DecodeSm90, "together", lambda self, splits, keys: Int32(1))
    with alone, mock.patch.object(backend, "cluster_max", lambda count: 1):
        yield


PATCHES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "late": lambda: mock.patch.object(Shares, "early", False),
    "apart": _apart,
    "relaxed": lambda: mock.patch.object(cluster, "depart", _relaxed),
}
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "ours": ((), {}),
    "late": (("late",), {}),
    "relaxed": (("relaxed",), {}),
    "apart": (("apart",), {}),
    "apart-late": (("apart", "late"), {}),
    **{f"splits{n}": ((), {"num_splits": n}) for n in (1, 2, 4, 8, 16, 32)},
}
_kernels: dict[tuple[str, ...], tuple[dict, dict]] = {}


@contextlib.contextmanager
def _as(patches: tuple[str, ...]) -> Iterator[None]:
    memory, warm = _kernels.setdefault(patches, ({}, {}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compiler, "_memory", memory))
        stack.enter_context(mock.patch.object(kvcache, "_warm", warm))
        for name in patches:
            stack.enter_context(PATCHES[name]())
        yield


class Operands(decode.Operands):
    def variant(self, patches: tuple[str, ...], options: dict[str, object], page_size: int = 0) -> Run:
        run = self.ours(page_size, backend="sm90", **options)

        def patched() -> tuple[torch.Tensor, ...]:
            with _as(patches):
                return run()

        return patched

    def entrants(self) -> Mapping[str, Entrant]:
        found = {
            name: Entrant(functools.partial(self.variant, *variant), "", ours=True)
            for name, variant in VARIANTS.items()
        }
        found["page16"] = Entrant(functools.partial(self.variant, (), {}, 16), "", ours=True)
        found["page16-late"] = Entrant(functools.partial(self.variant, ("late",), {}, 16), "", ours=True)
        return found | {name: entrant for name, entrant in super().entrants().items() if name in ("cudnn", "read")}


def main(argv: Sequence[str] | None = None) -> int:
    args = serving.parser("decode_variants", __doc__.splitlines()[0], POINTS).parse_args(argv)
    with settings.override(cache_dir=None), mock.patch.object(decode, "Operands", Operands):
        serving.race(args, (decode.question(point) for point in args.points.split(",")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
