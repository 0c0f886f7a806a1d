"""What the GPU at hand can run, and the yardsticks on it. Importing this skips a test module where there is no GPU."""

import functools
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import cute_flash
from tests import cases, oracle
from tests.cases import Case, Inputs
from tests.runner import HALF_ULP, Runner

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, none is available here", allow_module_level=True)

DEVICE = torch.device("cuda", torch.cuda.current_device())
CAPABILITY = torch.cuda.get_device_capability(DEVICE)


def _serves(name: str, gradients: bool = False) -> bool:
    q = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=gradients)
    try:
        cute_flash.explain(q, q, q, backend=name)
    except cute_flash.UnsupportedError:
        return False
    return True


BACKENDS = tuple(name for name in ("sm100", "sm90", "triton", "reference") if _serves(name))
SPECIAL = tuple(name for name in BACKENDS if name.startswith("sm"))  # made for this GPU alone: tested on every shape
# Gradients: this GPU's own backward by name, so that no fallback passes for it. Where it has none, None lets the
# dispatcher choose, which pairs its own forward with whatever backward there is.
OWN = tuple(name for name in SPECIAL if _serves(name, gradients=True)) or ((None,) if SPECIAL else ())
GRADIENT_BACKENDS = (*OWN, "triton", "reference")


def runner(backend: str | None, dtype: torch.dtype = torch.bfloat16) -> Runner:
    return Runner(DEVICE, dtype, backend)


# ------------------------------------------------------------------------------------------------------ yardsticks


def _sdpa_flash(q, k, v, causal: bool, scale: float | None) -> torch.Tensor:
    """PyTorch's flash kernel on our layout; RuntimeError where it cannot serve."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lengths = q.shape[2], k.shape[2]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces every reason it cannot serve, and rows without keys
        if causal and lengths[0] != lengths[1]:
            bias = causal_lower_right(*lengths)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@dataclass(frozen=True)
class Judged:
    """A case with its float64 answer and the error of the kernel ours must not lag behind."""

    inputs: Inputs
    exact: tuple[torch.Tensor, ...]  # (out, lse) or (dq, dk, dv)
    yardstick: str
    errors: tuple[float, ...]  # of the yardstick, for each tensor but LSE


def _options(case: Case) -> dict:
    return case.options


def _errors(values, exact) -> tuple[float, ...]:
    return tuple(oracle.relative_error(value, reference) for value, reference in zip(values, exact, strict=False))


def _sane(case: Case, errors: tuple[float, ...]) -> bool:
    """A yardstick that is wrong (another mask, NaN) must not let everything pass: rounding is a few half ulps."""
    return all(error <= 4 * HALF_ULP[case.torch_dtype] for error in errors)


@functools.lru_cache(maxsize=1)
def judge_forward(case: Case) -> Judged:
    inputs = cases.make_inputs(case, DEVICE)
    exact = oracle.forward(*inputs.qkv, **_options(case))
    name, errors = "flash", (float("inf"),)
    try:
        packed = [x.contiguous() for x in inputs.qkv]
        errors = _errors([_sdpa_flash(*packed, case.causal, case.scale)], exact)
    except RuntimeError:
        pass
    if not _sane(case, errors):
        name, errors = "plain", _errors([oracle.plain_16bit(*inputs.qkv, **_options(case)).out], exact)
    return Judged(inputs, exact, name, errors)


@functools.lru_cache(maxsize=1)
def judge_backward(case: Case) -> Judged:
    inputs = cases.make_inputs(case, DEVICE)
    exact = oracle.backward(*inputs.qkv, inputs.dout, **_options(case))
    name, errors = "flash", (float("inf"),)
    try:
        leaves = [x.detach().contiguous().requires_grad_() for x in inputs.qkv]
        out = _sdpa_flash(*leaves, case.causal, case.scale)
        errors = _errors(torch.autograd.grad(out, leaves, inputs.dout), exact)
    except RuntimeError:
        pass
    if not _sane(case, errors):
        plain = oracle.plain_16bit_backward(*inputs.qkv, inputs.dout, **_options(case))
        name, errors = "plain", _errors(plain, exact)
    return Judged(inputs, exact, name, errors)
