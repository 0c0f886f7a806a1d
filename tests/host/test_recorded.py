"""torch.jit.trace and make_fx write down torch's operators. A kernel is none: what they record must be ours.

The kernel here writes through numpy, as one on a GPU does through a pointer: nothing of it is recorded.
"""

import io
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import cute_flash
from cute_flash.spec.plan import Tile

from ..fakes import FakeBackend

pytestmark = [pytest.mark.usefixtures("office"), pytest.mark.filterwarnings("ignore")]


def copies_q(q, k, v, out, *others):
    out.numpy()[...] = q.numpy()


class Copying(FakeBackend):
    def plan(self, problem):
        return replace(super().plan(problem), form=problem.form, page_size=problem.page_size, tile=Tile(64, 64))


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense(q, k, v):
    return cute_flash.attention(q, k, v, causal=True, window=(3, None))


def packed(q, k, v):
    return cute_flash.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=starts(0, 4), cu_seqlens_k=starts(0, 4))


def cached(q, k, v):
    return cute_flash.attention_kvcache(q, k, v, cache_seqlens=starts(3), causal=True)


def appended(q, k, v):
    k, v = k.clone(), v.clone()
    return cute_flash.attention_kvcache(
        q, k, v, cache_seqlens=starts(3), k_new=k[:, :1].clone(), v_new=v[:, :1].clone()
    )


def qkv(batch=1):
    return tuple(torch.randn(batch, 4, 2, 16) for _ in range(3))


def traced(call, inputs):
    """Saved and loaded."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(call, inputs, check_trace=False), file)
    file.seek(0)
    return torch.jit.load(file)


RECORDERS = {"jit.trace": traced, "make_fx": lambda call, inputs: make_fx(call)(*inputs)}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("call", [dense, packed, cached, appended])
def test_what_is_recorded_runs_the_kernel(backends, call, recorder, warm):
    backends(Copying("sm90", kernel=copies_q))
    if warm:
        call(*qkv())
    recorded, others = RECORDERS[recorder](call, qkv()), qkv()
    assert torch.equal(recorded(*others).view(others[0].shape), others[0])
    assert torch.equal(call(*others).view(others[0].shape), others[0])  # and nothing of the recording stays behind


def test_a_trace_takes_other_sizes_and_has_gradients():
    recorded, others = traced(dense, qkv()), [x.requires_grad_() for x in qkv(3)]
    found, right = (torch.autograd.grad(call(*others).sin().sum(), others) for call in (recorded, dense))
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
