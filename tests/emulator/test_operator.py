"""A graph of torch.compile whose operator runs a GPU's own kernel, emulated: the path that eager calls do not take."""

import pytest
import torch

import cute_flash
from tests import oracle
from tests.runner import TWICE_ROUNDED


@pytest.mark.parametrize(("arch", "backend"), [("sm_90a", "sm90"), ("sm_100a", "sm100")])
def test_a_graph_runs_the_kernel_of_the_architecture(arch, backend):
    """Two lengths, one graph; the same PTX as in eager mode, so the same bits."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: cute_flash.attention(q, k, v, causal=True, return_lse=True, backend=backend),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    with torch.no_grad(), cute_flash.emulate(arch) as emulation:
        for seqlen in (70, 130):
            q, k, v = (torch.randn(1, seqlen, heads, 64).bfloat16() for heads in (4, 2, 2))
            launched = len(emulation.launches)
            out, lse = compiled(q, k, v)
            assert len(emulation.launches) > launched
            exact = oracle.forward(q, k, v, causal=True)
            assert oracle.relative_error(out, exact.out) < TWICE_ROUNDED and oracle.lse_excess(lse, exact.lse) <= 1
            eager = cute_flash.attention(q, k, v, causal=True, return_lse=True, backend=backend)
            assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
