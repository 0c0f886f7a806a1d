"""Mutation score of forward kernels: `python -m tests.emulator.mutation ours|fa4 sm_90a|sm_100a [causal]`, d = 128.

Drops each synchronisation of the kernel in turn; the problem wraps every ring and rescales on every tile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch

from cute_flash.emulator import emulate
from cute_flash.emulator.host import RUNTIME
from cute_flash.emulator.mutate import Report, find_sites, score
from tests import oracle
from tests.emulator.foreign import fa4_forward
from tests.emulator.test_forward_sm90 import compiled, tensors

DIM = 128
RUNS = [{"mode": "late", "scheduler": "priority", "seed": 1}, {"mode": "random", "scheduler": "random", "seed": 2}]
STEPS = 400_000


def inputs() -> tuple:
    """Scores that grow along the keys, so that every tile has to rescale."""
    torch.manual_seed(0)
    q, k, v, out, lse = tensors((DIM, DIM), (256, 768), (1, 1))
    return q, k * torch.linspace(0.2, 4, k.shape[1])[None, :, None, None].bfloat16(), v, out, lse


def run(kernel: Callable, arch: str, causal: bool, edit=None) -> Iterator[tuple]:
    """-> for every way of running it: whether the result is right, and the counters."""
    q, k, v, out, lse = inputs()
    right = oracle.forward(q, k, v, causal=causal)
    for knobs in RUNS:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        with emulate(arch, edit=edit, max_steps=STEPS, strict_exit=True, **knobs) as emulation:
            kernel(q, k, v, out, lse, DIM**-0.5)
        good = oracle.relative_error(out, right.out) < 6e-3 and oracle.lse_excess(lse, right.lse) <= 1
        yield good, emulation.counters


def mutation_score(kernel: Callable, arch: str, causal: bool, kinds=None) -> Report:
    unharmed = list(run(kernel, arch, causal))
    if not all(good for good, _ in unharmed):
        raise RuntimeError("the kernel is wrong before anything is dropped")
    sites = find_sites(RUNTIME.ptx_by_cubin[RUNTIME.kernels[-1][0]], kinds)
    attempt = lambda edit: all(good for good, _ in run(kernel, arch, causal, edit))  # noqa: E731
    return score(sites, attempt, [c for _, c in unharmed])


def main(whose: str, arch: str, causal: bool) -> None:
    start = time.time()
    if whose == "fa4":
        with emulate(arch):
            kernel = fa4_forward(arch, DIM, causal)
    else:
        kernel = compiled((DIM, DIM), causal)
    print(mutation_score(kernel, arch, causal))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "causal" in sys.argv)
