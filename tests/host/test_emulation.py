"""attention() through the emulator: CPU tensors, a GPU's kernels, the same dispatcher."""

import pytest
import torch

import cute_flash
from cute_flash import FallbackWarning, UnsupportedError, attention, emulate, explain
from cute_flash.runtime import compiler
from cute_flash.spec import settings

from .. import oracle

pytestmark = pytest.mark.usefixtures("office")


def qkv(head_dim=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return tuple(torch.randn(1, 40, heads, head_dim, dtype=dtype) for heads in (2, 1, 1))


def test_cpu_tensors_are_dispatched_as_the_emulated_gpu_and_only_inside():
    q, k, v = qkv()
    with settings.override(emulate="sm_90a"):
        decision = explain(q, k, v)
        assert decision.backend.name == "sm90" and decision.problem.device.name == "emulated 9.0"
    assert explain(q, k, v).backend.name == "reference"
    with settings.override(emulate="sm_100a"):
        assert explain(q, k, v).problem.device.capability == (10, 0)


def test_only_cute_kernels_are_emulated_and_the_others_see_the_cpu():
    q, k, v = qkv(dtype=torch.float32)
    with settings.override(emulate="sm_90a"):
        decision = explain(q, k, v)
        assert decision.backend.name == "reference" and decision.fallback
        assert "the tensors are on cpu" in decision.refusals["triton"][0]
        with pytest.raises(UnsupportedError, match="the tensors are on cpu"):
            explain(q, k, v, backend="triton")


def test_the_hopper_kernel_gives_the_right_numbers_on_the_cpu(capfd):
    q, k, v = qkv()
    right = oracle.forward(q, k, v)
    with emulate("sm_90a") as emulation:
        out, lse = attention(q, k, v, return_lse=True)
        assert emulation.launches
        again = attention(q[:, :17], k[:, :23], v[:, :23], return_lse=True)
        odd = torch.cat([q.flatten()[:1], q.flatten()])[1:].view_as(q)
        assert torch.equal(attention(odd, k, v, return_lse=True)[0], out)
    assert compiler.stats.compiles == 1 and compiler.stats.disk == 0
    assert not settings.current.cache_dir.exists()  # an emulated kernel is never kept for a GPU to find
    assert oracle.relative_error(out, right.out) < 4e-3 and oracle.lse_excess(lse, right.lse) <= 1
    short = oracle.forward(q[:, :17], k[:, :23], v[:, :23])
    assert oracle.relative_error(again[0], short.out) < 4e-3
    assert attention(q, k, v, backend="reference").shape == q.shape


def test_gradients_of_an_emulated_forward_say_where_they_come_from():
    q, k, v = (t.requires_grad_() for t in qkv())
    with emulate("sm_90a"):
        decision = explain(q, k, v)
        if decision.backward.backend.name == "sm90":
            pytest.skip("the Hopper backward exists: nothing falls back")
        with pytest.warns(FallbackWarning, match="the backward on emulated 9.0") as caught:
            attention(q, k, v).sum().backward()
    assert [w.filename for w in caught if w.category is FallbackWarning] == [__file__]
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_the_window_has_the_emulator():
    assert cute_flash.emulate is emulate
    with pytest.raises(ValueError, match="sm_80"), emulate("sm_80"):
        pass
