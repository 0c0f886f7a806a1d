"""Processes of their own on one GPU: a cold start compiles once a key, and all compute the same."""

import os
import subprocess
import sys

import pytest

from tests import cold_start
from tests.conftest import ROOT


def test_a_cold_start_of_eight_processes_compiles_once_a_key(tmp_path):
    said = cold_start.together(8, {**os.environ, "CUTE_FLASH_CACHE_DIR": str(tmp_path)})
    cold_start.check(said, tmp_path)


# The first call of a process is the warm-up of the compiler's CUDA graph: whatever it leaves behind on the GPU lies in
# the graph's pool, and the compiler refuses a pool with tensors that it does not know.
FIRST_CALL = """
import sys
import tests.conftest  # makes cute_flash importable without an installation, too
import torch
import cute_flash

CALLS = {
    "dense": lambda q, k, v: cute_flash.attention(q[None], k[None], v[None], causal=True, deterministic=True),
    "packed": lambda q, k, v: cute_flash.attention_varlen(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, deterministic=True
    ),
    "cache": lambda q, k, v: cute_flash.attention_kvcache(
        q[:2, None], k[:600].view(2, 300, 2, 64), v[:600].view(2, 300, 2, 64), cache_seqlens=starts[1:3]
    ),
}
starts = torch.tensor([0, 37, 300, 700], dtype=torch.int32, device="cuda")
call, grad = CALLS[sys.argv[1]], sys.argv[1] != "cache"
compiled = torch.compile(lambda *qkv: call(*qkv) * 2, fullgraph=True, mode="reduce-overhead")
for seed in range(4):
    torch.manual_seed(seed)
    qkv = [torch.randn(700, n, 64, device="cuda").bfloat16().requires_grad_(grad) for n in (8, 2, 2)]
    results = []
    for attend in (compiled, lambda *qkv: call(*qkv) * 2):
        torch.compiler.cudagraph_mark_step_begin()
        out = attend(*qkv)
        grads = torch.autograd.grad(out, qkv, torch.ones_like(out)) if grad else ()
        results.append([x.clone() for x in (out.detach(), *grads)])
    assert all(torch.equal(a, b) for a, b in zip(*results)), seed
"""


@pytest.mark.parametrize("what", ["dense", "packed", "cache"])
def test_a_first_call_that_becomes_a_cuda_graph(what):
    command = [sys.executable, "-c", FIRST_CALL, what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
