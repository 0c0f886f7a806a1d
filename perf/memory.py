"""Peak memory over the sequence length: `python -m perf.memory --out perf/results/memory.csv`, on a GPU.

Bytes that a call takes beyond its inputs, at the most, by torch's allocator: outputs, gradients and workspace. The
standard forward (`softmax(q k^T) v` in torch) stops where its scores would pass STANDARD_BYTES.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LENGTHS = tuple(2**power for power in range(10, 18))  # 1k to 128k
BATCH, HEADS, HEAD_DIM = 1, 16, 128
STANDARD_BYTES = 2**33  # of S alone; it holds two to four of that size
PASSES = ("fwd", "fwd+bwd")
COLUMNS = ("gpu", "uuid", "date", "commit", "torch", "dsl", "contestant", "pass", "d", "B", "H", "S", "peak_bytes")


def cases() -> list[tuple[str, str, int]]:
    """(contestant, pass, seqlen) of each measurement."""
    every = itertools.product(("ours", "standard"), PASSES, LENGTHS)
    return [case for case in every if case[0] == "ours" or BATCH * HEADS * case[2] ** 2 * 2 <= STANDARD_BYTES]


def peak(step: Callable[[], Any], device: Any) -> int:
    """Bytes allocated at most beyond what was there before."""
    import torch

    gc.collect()  # what is freed on the way would hide what is taken
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = step()
    torch.cuda.synchronize(device)
    del result
    return int(torch.cuda.max_memory_allocated(device) - before)


def standard(q: Any, k: Any, v: Any) -> Any:
    """softmax(q k^T) v of (batch, seqlen, heads, dim) tensors, with scores in memory."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.transpose(-1, -2) * HEAD_DIM**-0.5, -1) @ v).transpose(1, 2)


def measure(name: str, direction: str, seqlen: int, device: Any) -> int:
    import torch

    import cute_flash

    attend = cute_flash.attention if name == "ours" else standard
    grad = direction != "fwd"
    q, k, v, dout = (torch.randn(BATCH, seqlen, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(4))
    for leaf in (q, k, v):
        leaf.requires_grad_(grad)

    def step() -> Any:
        out = attend(q, k, v)
        return (out, torch.autograd.grad(out, (q, k, v), dout)) if grad else out

    step()  # compiled, and what stays for good is there already
    return peak(step, device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the CSV, written anew")
    parser.add_argument("--commit", default="", help="commit of the code where there is no git")
    args = parser.parse_args(argv)
    import torch

    from . import machine

    device = torch.device("cuda", 0)
    facts = machine.facts(device, args.commit or machine.commit_here())
    shared = {name: facts[name] for name in COLUMNS[:6]} | {"d": HEAD_DIM, "B": BATCH, "H": HEADS}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name, direction, seqlen in cases():
            used = measure(name, direction, seqlen, device)
            row = {"contestant": name, "pass": direction, "S": seqlen, "peak_bytes": used}
            writer.writerow(shared | row)
            print(f"{name:9}{direction:9}{seqlen:8}{used / 2**20:12.1f} MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
