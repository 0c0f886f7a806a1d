"""Mutation score of our forward kernels: `python -m tests.emulator.mutation sm_90a [head_dim] [causal]`.

Drops each synchronisation of the kernel in turn and runs it on a problem that wraps every ring and takes every branch.
"""

from __future__ import annotations

import sys
import time

import torch

from cute_flash.emulator import emulate
from cute_flash.emulator.host import RUNTIME
from cute_flash.emulator.mutate import Report, find_sites, score
from tests import oracle
from tests.emulator.test_forward_sm90 import compiled, tensors

RUNS = [{"mode": "late", "scheduler": "priority", "seed": 1}, {"mode": "random", "scheduler": "random", "seed": 2}]
STEPS = 400_000


def inputs(head_dim: int):
    """Scores that grow along the keys, so that every tile has to rescale."""
    q, k, v, out, lse = tensors((head_dim, head_dim), (256, 768), (2, 1))
    return q, k * torch.linspace(0.2, 4, k.shape[1])[None, :, None, None].bfloat16(), v, out, lse


def run(kernel, arch: str, head_dim: int, causal: bool, edit=None):
    """-> for every way of running it: whether the result is right, and the counters."""
    torch.manual_seed(0)
    q, k, v, out, lse = inputs(head_dim)
    right = oracle.forward(q, k, v, causal=causal)
    for knobs in RUNS:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        with emulate(arch, edit=edit, max_steps=STEPS, strict_exit=True, **knobs) as emulation:
            kernel(q, k, v, out, lse, head_dim**-0.5)
        good = oracle.relative_error(out, right.out) < 6e-3 and oracle.lse_excess(lse, right.lse) <= 1
        yield good, emulation.counters


def mutation_score(arch: str, head_dim: int, causal: bool, kinds=None) -> Report:
    kernel = compiled((head_dim, head_dim), causal)
    known = set(RUNTIME.ptx_by_cubin)
    unharmed = list(run(kernel, arch, head_dim, causal))
    if not all(good for good, _ in unharmed):
        raise RuntimeError("the kernel is wrong before anything is dropped")
    name = RUNTIME.kernels[-1][0]
    sites = find_sites(RUNTIME.ptx_by_cubin[name if name in known else max(known)], kinds)
    counters = [c for _, c in unharmed]
    return score(sites, lambda edit: all(good for good, _ in run(kernel, arch, head_dim, causal, edit)), counters)


if __name__ == "__main__":
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90a"
    start = time.time()
    print(mutation_score(arch, int(sys.argv[2]) if len(sys.argv) > 2 else 128, "causal" in sys.argv))
    print(f"{time.time() - start:.0f} s")
