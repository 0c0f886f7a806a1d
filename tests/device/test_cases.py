"""The known cases on the GPU with every backend, and those that need a GPU's memory, or two GPUs."""

import pytest
import torch

import cute_flash
from tests import oracle
from tests.device.gpu import BACKENDS, DEVICE, runner
from tests.known_cases import CASES
from tests.runner import HALF_ULP, Runner

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16_TOO = (1, 4, 10, 13, 40)  # masks, scales and LSE, where float16's narrow range could show


def runs():
    for number in CASES:
        for dtype in HALVES:
            if dtype == "bfloat16" or number in FLOAT16_TOO:
                for backend in BACKENDS:
                    name = f"case{number:02d}-{CASES[number].__name__}-{dtype}-{backend}"
                    yield pytest.param(number, dtype, backend, id=name)


@pytest.mark.parametrize(("number", "dtype", "backend"), list(runs()))
def test_case(number, dtype, backend):
    CASES[number](runner(backend, HALVES[dtype]))


# --------------------------------------------------------------- more than 2^31 elements; the slow reference sits out

FAST = [name for name in BACKENDS if name != "reference"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)


def check_spots(got, inputs, expected_of) -> None:
    """The first, the middle and the last element of a huge batch."""
    batch = inputs[0].shape[0]
    for at in (0, batch // 2, batch - 1):
        spot = slice(at, at + 1)
        for value, exact in zip(got, expected_of(*(x[spot] for x in inputs)), strict=True):
            # P, dS and the result are each rounded once to bf16.
            assert oracle.relative_error(value[spot], exact) <= 3 * HALF_ULP[torch.bfloat16]


@pytest.fixture
def empty_cache():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("batch", "seqlen_q", "heads"), [(8300, 1, 16), (400, 10496, 4)], ids=str)
def test_case36_scratch_above_2_31_elements(batch, seqlen_q, heads, empty_cache):
    q, dout = normal(batch, seqlen_q, heads, 128), normal(batch, seqlen_q, heads, 128, seed=1)
    k, v = normal(batch, 128, heads, 128, seed=2), normal(batch, 128, heads, 128, seed=3)
    (out, _), grads = runner(None).gradients(q, k, v, dout)
    check_spots([out], [q, k, v], lambda *x: [oracle.forward(*x).out])
    check_spots(grads, [q, k, v, dout], oracle.backward)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_batch_beyond_a_grid_axis(dims, deterministic, empty_cache):
    """More sequences than a grid has along y or z, each far shorter than a tile."""
    batch = 65536 + 3
    q, k = (normal(batch, length, 1, dims[0], seed=length) for length in (5, 7))
    v, dout = (normal(batch, length, 1, dims[1], seed=9 + length) for length in (7, 5))
    (out, _), grads = runner(None).gradients(q, k, v, dout, causal=True, deterministic=deterministic)
    exact = [oracle.forward(q, k, v, causal=True).out, *oracle.backward(q, k, v, dout, causal=True)]
    for value, right in zip([out, *grads], exact, strict=True):
        assert oracle.relative_error(value, right) <= 3 * HALF_ULP[torch.bfloat16]  # P, dS, and the result


@pytest.mark.parametrize("backend", FAST)
def test_case38_keys_above_2_31_elements(backend, empty_cache):
    batch, seqlen = 704, 24000
    k, v = (normal(seqlen, batch, 128, seed=s).permute(1, 0, 2)[:, :, None, :] for s in (1, 2))
    q = normal(batch, 4, 1, 128)
    out = runner(backend)(q, k, v)
    check_spots([out], [q, k, v], lambda *x: [oracle.forward(*x).out])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("stride", [2**31, 2**30, 2**30 - 8], ids=str)
def test_case39_huge_batch_stride(backend, stride, empty_cache):
    buffer = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device=DEVICE)
    k = buffer.as_strided((2, 128, 1, 64), (stride, 64, 64, 1))
    k.copy_(normal(2, 128, 1, 64, seed=1))
    q, v = normal(2, 100, 1, 64), normal(2, 128, 1, 64, seed=2)
    for views in ((q, k, v), (q, v, k)):
        runner(backend).check(*views)


# ------------------------------------------------------------------------------------------------------ two GPUs

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@pytest.mark.parametrize("backend", BACKENDS)
def test_case55_second_gpu(backend):
    assert torch.cuda.current_device() == 0
    for index in (1, 0, 1):
        device = torch.device("cuda", index)
        tensors = [normal(2, 200, 4, 64, seed=s).to(device) for s in range(4)]
        here = Runner(device, torch.bfloat16, backend)
        here.check_gradients(*tensors, causal=True)
        assert torch.cuda.current_device() == 0


@two_gpus
def test_case55_mixed_devices():
    q = normal(1, 16, 1, 64)
    with pytest.raises(ValueError, match="one device"):
        cute_flash.attention(q, q.to("cuda:1"), q)


def test_mixed_devices():
    q = normal(1, 16, 1, 64)
    with pytest.raises(ValueError, match="one device"):
        cute_flash.attention(q, q.cpu(), q)
