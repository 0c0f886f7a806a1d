"""A rank of a cold start: a process of its own that calls attention once a kind, and prints what came of it.

    python -m tests.cold_start SECONDS [host]      # the time to begin at, so that all ranks meet an empty cache

With `host`, tests/host_dsl.py stands in for the kernels of a GPU: really compiled, exported and loaded, on the CPU.
Prints one line of JSON: how often this process compiled and loaded, and a hash of everything it computed.
"""

import contextlib
import hashlib
import json
import sys
import time
from pathlib import Path

import torch

from .conftest import ROOT  # makes cute_flash importable without an installation, too

KINDS = ({"causal": False}, {"causal": True})  # a kernel each


def main(begin: float, host: bool) -> None:
    import cute_flash.arch as arch
    from cute_flash import attention
    from cute_flash.runtime import compiler

    if host:
        from .fakes import HostDslBackend

        arch.BACKENDS = (HostDslBackend(),)
    device = "cpu" if host else "cuda"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, 4, 64, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    time.sleep(max(0.0, begin - time.time()))
    digest = hashlib.sha256()
    for kind in KINDS:
        for tensor in attention(q, k, v, return_lse=True, **kind):
            digest.update(tensor.float().cpu().numpy().tobytes())
    print(json.dumps({"compiles": compiler.stats.compiles, "loads": compiler.stats.disk, "hash": digest.hexdigest()}))


def together(count: int, environment: dict[str, str], *words: str) -> list[dict]:
    """What `count` ranks print that are started side by side."""
    import subprocess

    begin = str(time.time() + 0.5 * count)  # imports take a core a few seconds; a late rank meets a cache being filled
    command = [sys.executable, "-m", "tests.cold_start", begin, *words]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    said = []
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.kill)
        for rank in ranks:
            out, error = rank.communicate(timeout=300)
            assert rank.returncode == 0, error[-2000:]
            said.append(json.loads(out.splitlines()[-1]))
    return said


def check(said: list[dict], cache: Path) -> None:
    """Each kernel was compiled once among all ranks and loaded by the others, and all computed the same bits."""
    kernels = len(list(cache.glob("*.so")))
    assert kernels >= len(KINDS)
    assert sum(one["compiles"] for one in said) == kernels
    assert sum(one["loads"] for one in said) == kernels * (len(said) - 1)
    assert len({one["hash"] for one in said}) == 1


if __name__ == "__main__":
    main(float(sys.argv[1]), "host" in sys.argv[2:])
