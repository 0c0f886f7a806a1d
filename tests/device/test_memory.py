"""Memory is linear in the sequence, forward and backward."""

import gc

import pytest
import torch

from tests.device.gpu import BACKENDS, DEVICE, GRADIENT_BACKENDS, runner

LENGTHS = (1024, 4096, 16384, 65536, 131072)
HEADS, HEAD_DIM = 2, 64
TILE_M = 192  # the largest query tile
PARTIALS = 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count * TILE_M * (HEAD_DIM + 1) * 4


def peak(step) -> int:
    """Bytes allocated at most beyond what was there before."""
    gc.collect()  # what is freed on the way would hide what is taken
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = step()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def inputs(seqlen: int, head_dim: int = HEAD_DIM) -> list[torch.Tensor]:
    return [torch.randn(1, seqlen, HEADS, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_forward(backend):
    run, measured = runner(backend), []
    for seqlen in LENGTHS:
        q, k, v, _ = inputs(seqlen)
        run(q, k, v)
        measured.append(peak(lambda q=q, k=k, v=v: run(q, k, v)))
    for seqlen, used in zip(LENGTHS, measured, strict=True):
        # The output and nothing else, but for the allocator's rounding to 2 MB blocks, and where short sequences leave
        # the GPU idle: float32 partial outputs of two waves of CTAs, a bound that no length exceeds.
        assert used <= seqlen * HEADS * HEAD_DIM * 2 + 2**21 + PARTIALS
    assert measured[-1] <= LENGTHS[-1] * HEADS * HEAD_DIM * 2 + 2**21  # long ones need none


@pytest.mark.parametrize("backend", [name for name in GRADIENT_BACKENDS if name != "reference"], ids=str)
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 192, 256])  # each with a Hopper backward of its own
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_forward_and_backward(backend, head_dim, deterministic):
    run, measured = runner(backend), []
    for seqlen in LENGTHS:
        q, k, v, dout = inputs(seqlen, head_dim)

        def step(given=(q, k, v, dout)):
            return run.gradients(*given, deterministic=deterministic)

        step()
        measured.append(peak(step))
    per_token = [used / seqlen for used, seqlen in zip(measured, LENGTHS, strict=True)]
    # out, dq, dk, dv in 16 bits, a float32 dq, LSE and delta: 1.6 kB a token at 64. Twice that leaves room for padding.
    assert per_token[-1] <= 2 * HEADS * (4 * head_dim * 2 + head_dim * 4 + 8)
    assert per_token[-1] <= 1.1 * per_token[2]  # no growth beyond the linear
