"""Our Hopper forward in the emulator: tile edges, masks, grouped heads, unequal lengths; every schedule and mode."""

import functools

import pytest
import torch

from cute_flash.emulator import emulate

from .. import oracle

WIDTHS = {False: [(64, 64), (128, 128), (80, 80)], True: [(64, 64), (128, 128), (192, 128)]}
DIMS = [(dims, causal) for causal, widths in WIDTHS.items() for dims in widths]
LENGTHS = [(1, 300), (63, 65), (127, 129), (200, 50), (129, 256), (256, 192)]  # seqlen_q, seqlen_k
GROUPS = [(2, 1), (1, 1), (3, 1), (1, 1), (1, 1), (1, 1)]  # heads_q, heads_kv of each pair of lengths
SCHEDULES = [("round_robin", 0), ("random", 1), ("priority", 2)]
MODES = ["eager", "late"]


@functools.lru_cache(None)
def compiled(dims: tuple, causal: bool, options: str = ""):
    from cute_flash.arch.sm90.backend import BACKEND
    from cute_flash.spec.device import ARCHES, imagined
    from cute_flash.spec.mask import CAUSAL, FULL
    from cute_flash.spec.problem import FORWARD, Problem

    problem = Problem(
        direction=FORWARD,
        device=imagined(ARCHES["sm_90a"], "emulated"),
        dtype="bfloat16",
        head_dim=dims[0],
        head_dim_v=dims[1],
        heads_q=1,
        heads_kv=1,
        mask=CAUSAL if causal else FULL,
        lse=True,
    )
    with emulate("sm_90a"):
        return BACKEND.build(BACKEND.plan(problem), options)


def tensors(dims: tuple, lengths: tuple, heads: tuple):
    q = torch.randn(1, lengths[0], heads[0], dims[0]).bfloat16()
    k = torch.randn(1, lengths[1], heads[1], dims[0]).bfloat16()
    v = torch.randn(1, lengths[1], heads[1], dims[1]).bfloat16()
    out = torch.full((1, lengths[0], heads[0], dims[1]), float("nan")).bfloat16()
    lse = torch.full((1, heads[0], lengths[0]), float("nan"))
    return q, k, v, out, lse


def check(dims, causal, lengths, heads):
    q, k, v, out, lse = tensors(dims, lengths, heads)
    kernel = compiled(dims, causal)
    kernel(q, k, v, out, lse, dims[0] ** -0.5)
    right = oracle.forward(q, k, v, causal=causal)
    assert oracle.relative_error(out, right.out) < 4e-3
    assert oracle.lse_excess(lse, right.lse) <= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheduler, seed", SCHEDULES)
@pytest.mark.parametrize("shape", range(len(LENGTHS)))
@pytest.mark.parametrize("dims, causal", DIMS)
def test_right_under_every_schedule(dims, causal, shape, scheduler, seed, mode):
    with emulate("sm_90a", mode=mode, scheduler=scheduler, seed=seed, strict_exit=True):
        check(dims, causal, LENGTHS[shape], GROUPS[shape])


def test_speed():
    """Forward, d = 128, causal, 512 tokens, one head: at most 4 s of processor time once compiled."""
    import time

    kernel = compiled((128, 128), True)
    q, k, v, out, lse = tensors((128, 128), (512, 512), (1, 1))
    with emulate("sm_90a", seed=1):
        kernel(q, k, v, out, lse, 128**-0.5)
        start = time.process_time()
        kernel(q, k, v, out, lse, 128**-0.5)
        assert time.process_time() - start < 4
