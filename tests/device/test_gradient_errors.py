"""Errors of dQ, dK and dV on the GPU: at most 1.05x FlashAttention-4's on the same inputs at head dims where it is
right, and 1.05x plain 16-bit attention's at every other multiple of 8.

`--errors-csv perf/results/gradient_errors.csv` keeps them, a row each.
"""

import pytest
import torch

from tests import cases, oracle
from tests.cases import Case
from tests.device.gpu import DEVICE, GRADIENT_BACKENDS, runner
from tests.runner import ALLOWED_RATIO, HALF_ULP

FA4_DIMS = (64, 96, 128, 192, 256)
OTHERS = tuple(d for d in range(8, 257, 8) if d not in FA4_DIMS)
SHORT, LONG = (300, 333), (1200, 1300)  # keys of a short call, for which wide heads have other kernels, and of a long
OWN = GRADIENT_BACKENDS[0]


def shapes(head_dims: tuple[int, ...], group: int) -> list[Case]:
    grid = ((d, lengths, causal) for d in head_dims for lengths in (SHORT, LONG) for causal in cases.MASKS)
    return [cases.shape(lengths, group, (d, d), causal) for d, lengths, causal in grid]


def compare(case: Case, yardstick: str, gradients, record_property) -> None:
    """gradients(inputs) -> the yardstick's, to be held against float64 beside ours."""
    inputs = cases.make_inputs(case, DEVICE)
    exact = oracle.backward(*inputs.qkv, inputs.dout, **case.options)
    _, grads = runner(OWN).gradients(*inputs.qkv, inputs.dout, causal=case.causal)
    ours = [oracle.relative_error(value, right) for value, right in zip(grads, exact, strict=True)]
    theirs = [oracle.relative_error(value, right) for value, right in zip(gradients(inputs), exact, strict=True)]
    row = [torch.cuda.get_device_name(DEVICE), str(case), yardstick, *ours, *theirs]
    record_property("gradient_errors", row)
    # a yardstick that is wrong must not let everything pass: rounding is a few half ulps of what is rounded, and plain
    # attention rounds scores and probabilities too (NVIDIA H200: up to 6.8 half ulps at head dim 8)
    assert all(error <= 8 * HALF_ULP[torch.bfloat16] for error in theirs), f"{yardstick}: {theirs}"
    for name, error, other in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
        assert error <= ALLOWED_RATIO * other, f"{name}: {error:.3e}, {yardstick} has {other:.3e}"


@pytest.mark.parametrize("case", shapes(FA4_DIMS, group=1), ids=str)
def test_no_further_off_than_flash_attention_4(case, record_property):
    flash = pytest.importorskip("flash_attn.cute")

    def gradients(inputs: cases.Inputs) -> tuple[torch.Tensor, ...]:
        leaves = inputs.leaves()
        out, *_ = flash.flash_attn_func(*leaves, causal=case.causal)
        return torch.autograd.grad(out, leaves, inputs.dout)

    compare(case, "fa4", gradients, record_property)


@pytest.mark.parametrize("case", shapes(OTHERS, group=4), ids=str)
def test_no_further_off_than_plain_16_bit_attention(case, record_property):
    def gradients(inputs: cases.Inputs) -> oracle.Gradients:
        return oracle.plain_16bit_backward(*inputs.qkv, inputs.dout, **case.options)

    compare(case, "plain", gradients, record_property)
