"""The known cases on CPU tensors, through the front door and the reference; and those that need no kernel at all."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_flash
from cute_flash.arch import BACKENDS
from cute_flash.arch.reference import forward as reference_forward
from cute_flash.spec.device import Device
from tests import oracle
from tests.cases import OWN_KERNELS
from tests.known_cases import CASES
from tests.runner import Runner

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Each case in one dtype keeps the suite short; those about rounding, masks and gradients also run in the others.
THOROUGH = (1, 4, 9, 10, 13, 23, 40)
RUNS = [(n, d) for n in CASES for d in DTYPES if d == "float32" or n in THOROUGH]


@pytest.mark.parametrize(("number", "dtype"), RUNS, ids=[f"case{n:02d}-{CASES[n].__name__}-{d}" for n, d in RUNS])
def test_case(number, dtype):
    CASES[number](Runner(torch.device("cpu"), DTYPES[dtype]))


def test_case47_meta_tensors_agree_with_real_ones():
    """Shapes, dtypes and strides of real outputs and gradients, and of those a graph is planned with."""
    words = (True, None, None, None, None, False, None)  # causal and nothing else
    for batch, heads_kv, head_dim_v in ((1, 4, 16), (2, 2, 24), (1, 1, 8)):
        q, k, v = torch.randn(batch, 5, 4, 16), torch.randn(batch, 7, heads_kv, 16), torch.randn(batch, 7, heads_kv, 1)
        v = v.expand(-1, -1, -1, head_dim_v)
        mode = FakeTensorMode()
        planned = cute_flash.attention(*(mode.from_tensor(x) for x in (q, k, v)), return_lse=True)
        out, lse = cute_flash.attention(q, k, v, return_lse=True)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((batch, 5, 4, head_dim_v), q.dtype, True)
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((batch, 4, 5), torch.float32, True)
        for real, fake in zip((out, lse), planned, strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        operands = torch.randn_like(out), None, q, k, v, out, lse
        for operator, inputs in (("attention", (q, k, v, True)), ("attention_backward", operands)):
            torch.library.opcheck(getattr(torch.ops.cute_flash, operator), (*inputs, *words))


CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_case58_capability_table(capability):
    """wgmma only on 9.0, tcgen05 only on 10.0 and 10.3; everything else is Triton's."""
    device = Device("cuda", 0, "simulated", capability, 132)
    special = {backend.name for backend in BACKENDS if backend.name in ("sm90", "sm100") and backend.native(device)}
    assert special == {OWN_KERNELS[capability]} if capability in OWN_KERNELS else not special


def test_case59_out_of_memory_is_no_reason_to_fall_back(monkeypatch):
    q = torch.randn(1, 9, 2, 16)
    before = str(cute_flash.explain(q, q, q))

    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("simulated")

    with monkeypatch.context() as patch:
        patch.setattr(reference_forward, "online_softmax", exhausted)
        with pytest.raises(torch.OutOfMemoryError, match="simulated"):
            cute_flash.attention(q, q, q)
    assert str(cute_flash.explain(q, q, q)) == before
    assert oracle.relative_error(cute_flash.attention(q, q, q), oracle.forward(q, q, q).out) < 1e-5  # float32, 40 ulps


def test_case59_a_named_backend_is_used_or_raises():
    q = torch.randn(1, 9, 2, 16)
    for name in ("sm90", "sm100"):
        with pytest.raises(cute_flash.UnsupportedError, match=name):
            cute_flash.attention(q, q, q, backend=name)


def test_every_host_case_has_a_test():
    """36, 38, 39, 54 and 55 need a GPU; 48 is about torch.compile, below; the rest are above."""
    named = {47, 48, 58, 59}
    known = {1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 19, 20, 22, 23, 26, 27, 29, 32, 33, 34, 36, 38, 39, 40, 41}
    known |= {43, 44, 47, 48, 51, 52, 54, 55, 56, 58, 59, 60}
    assert set(CASES) | named == known - {36, 38, 39, 54, 55}


@pytest.mark.slow
def test_case48_compiled_with_graph_breaks():
    """fullgraph waits for the torch.library ops; with graph breaks allowed the numbers are eager's."""
    compiled = torch.compile(cute_flash.attention, backend="eager", dynamic=True)
    for seqlen in (128, 192, 333):
        q = torch.randn(1, seqlen, 2, 16, requires_grad=True)
        out = compiled(q, q, q, causal=True, return_lse=True)
        plain = cute_flash.attention(q, q, q, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(out, plain, strict=True))
        assert math.isfinite(torch.autograd.grad(out[0].sum(), q)[0].sum().item())
