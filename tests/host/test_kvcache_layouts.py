"""attention_kvcache and how caches lie: who runs is decided for each call."""

import warnings

import pytest
import torch

import cute_flash
from cute_flash import attention_kvcache
from cute_flash.arch.sm90.backend import BACKEND as sm90
from cute_flash.arch.triton.backend import BACKEND as triton
from cute_flash.runtime import toolchain
from cute_flash.spec import settings
from tests.cached import CacheCase, make_inputs

pytestmark = pytest.mark.usefixtures("office")


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, two bytes past a multiple of 16."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("order", ["bad good bad bad good", "good bad bad good"])
def test_a_cache_that_lies_badly_sends_no_other_away(monkeypatch, simulated, order, compiled):
    """What runs follows from how the cache of the call lies, not from how that of the first of the kind lay. Nor is a
    kernel looked for at every call."""
    ran, built = [], []

    def kernel(name):
        def run(q, k, *others):
            if name == "sm90" and k.data_ptr() % 16:
                raise ValueError("k is not aligned")
            ran.append(name)

        return run

    def build(plan):
        built.append(plan.backend)
        return kernel(plan.backend)

    simulated((9, 0))
    monkeypatch.setattr(toolchain, "modules", lambda backend: ())
    for backend in (sm90, triton):
        monkeypatch.setattr(backend, "build", build)
    inputs = make_inputs(CacheCase((5, 7), dtype="bfloat16"))
    lying = {"good": inputs.k, "bad": shifted(inputs.k)}
    run = torch.compile(attention_kvcache, backend="eager", fullgraph=True) if compiled else attention_kvcache
    with settings.override(cache_dir=None), warnings.catch_warnings():
        warnings.simplefilter("ignore", cute_flash.FallbackWarning)
        made = [run(inputs.q, lying[each], inputs.v, **inputs.tables) for each in order.split()]
    assert ran == ["sm90" if each == "good" else "triton" for each in order.split()]
    assert sorted(built) == ["sm90", "triton"] and len(made) == len(ran)
