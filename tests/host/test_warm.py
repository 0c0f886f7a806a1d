"""The warm call: what it allocates, what it leaves out, and that it refuses what the first call of a kind refuses."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_flash import UnsupportedError, api, attention
from cute_flash.spec.problem import Problem

from ..fakes import FakeBackend, HostDslBackend

pytestmark = pytest.mark.usefixtures("office")


def qkv(requires_grad):
    shapes = (2, 37, 4, 24), (2, 53, 2, 24), (2, 53, 2, 24)
    return tuple(torch.randn(shape, dtype=torch.bfloat16).requires_grad_(requires_grad) for shape in shapes)


class Operations(TorchDispatchMode):
    """Names of the torch operations run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strided", [False, True])
def test_a_warm_call_allocates_its_outputs_and_makes_no_problem(backends, monkeypatch, strided):
    backends(FakeBackend("sm90"))
    q, k, v = qkv(False)
    if strided:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    needy = q.detach().requires_grad_()
    bounded = {"window": (3, 5), "softcap": 9.0}
    calls = [
        ((q, k, v), {}), ((q, k, v), {"return_lse": True}), ((needy, k, v), {"scale": 0.5}), ((q, k, v), bounded)
    ]  # fmt: skip
    for inputs, options in calls:
        attention(*inputs, **options)
    monkeypatch.setattr(Problem, "__init__", None)
    monkeypatch.setattr(api, "_modes", lambda: 0)  # or the mode that counts would be shown the operator alone
    calls.append(((q, k, v), {"window": [700, 1], "softcap": 2}))  # other values are as warm
    for (inputs, options), count in zip(calls, (1, 2, 2, 1, 1), strict=True):
        with Operations() as operations:
            attention(*inputs, **options)
        assert [name for name in operations.names if name not in ("detach", "alias")] == ["new_empty"] * count


@pytest.mark.parametrize("kernel", ["checks nothing", "checks its operands"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_warm_call_refuses_what_a_cold_one_refuses(backends, kernel, grad):
    if kernel == "checks its operands":
        pytest.importorskip("cutlass")
        backends(HostDslBackend())
    else:
        backends(FakeBackend("sm90"))
    q, k, v = qkv(grad)
    attention(q, k, v)
    meta = torch.empty(k.shape, dtype=k.dtype, device="meta")
    for wrong in ((q, k.half(), v), (q, k, v.float()), (q.half(), k, v)):
        with pytest.raises(TypeError, match="q, k and v must have one dtype, got q torch"):
            attention(*wrong)
    for wrong in ((q, meta, v), (q, k, meta), (meta, k, v)):
        with pytest.raises(ValueError, match="q, k and v must be on one device, got q "):
            attention(*wrong)
    shapes = {
        "one batch size": (q, k[:1], v[:1]), "one seqlen": (q, k, v[:, 1:]), "one head count": (q, k, v[:, :, :1]),
        "one head_dim": (q, k[..., 1:], v), "a multiple of": (q[:, :, :3], k, v),
    }  # fmt: skip
    for rule, wrong in shapes.items():
        with pytest.raises(ValueError, match=rule):
            attention(*wrong)
    with pytest.raises(TypeError, match="k must be a torch"):
        attention(q, k.detach().float().numpy(), v)
    attention(q, k, v)


# What hashes and compares equal to a flag finds the warm call of that flag; what is falsy passes for False in an `or`.
LIKE_A_FLAG = (1.0, 0.0, np.True_, np.float32(1), Decimal(1), 1 + 0j, None, "", [], ())


@pytest.mark.parametrize("name", ["causal", "return_lse", "deterministic"])
@pytest.mark.parametrize("value", LIKE_A_FLAG, ids=repr)
def test_a_flag_stays_true_or_false_once_a_call_is_warm(backends, name, value):
    backends(FakeBackend("sm90"))
    inputs = qkv(False)
    for flag in (False, True):
        attention(*inputs, **{name: flag})
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got "):
        attention(*inputs, **{name: value})
    for integer in (0, 1):  # taken by the first call of a kind, so by every other
        attention(*inputs, **{name: integer})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_a_lazy_sign_never_reaches_a_warm_kernel(backends, dtype, which):
    """torch._neg_view gives one to any dtype; a kernel reads the memory, which has the other sign."""
    seen = []
    backends(FakeBackend("sm90", kernel=lambda *operands: seen.append([x.is_neg() for x in operands[:3]])))
    inputs = [t.to(dtype) for t in qkv(False)]
    attention(*inputs)
    inputs[which] = torch._neg_view(inputs[which])
    assert inputs[which].is_neg()
    attention(*inputs)
    assert seen == [[False] * 3] * 2


def test_a_warm_call_under_a_transform_is_refused_by_plain_torch_code_too():
    """Of the backends, `reference` would compute something under vmap."""
    inputs = tuple(t.float() for t in qkv(False))
    attention(*inputs)
    with pytest.raises(UnsupportedError, match=r"torch\.func transforms"):
        torch.vmap(attention)(*(t[None] for t in inputs))
