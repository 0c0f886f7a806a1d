"""Sharded tensors: what docs/pytorch.md says of DTensor and FSDP2, in one process (a mesh of one)."""

import pytest
import torch
import torch.distributed as dist

from cute_flash import attention

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

pytestmark = pytest.mark.usefixtures("office")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_heads_go_through_local_map(mesh):
    heads = [Shard(2)]
    q, k, v = (torch.randn(2, 9, 4, 16, requires_grad=True) for _ in range(3))
    sharded = [distribute_tensor(x.detach(), mesh, heads).requires_grad_() for x in (q, k, v)]
    with pytest.raises(TypeError, match=r"q is a DTensor.*local_map"):
        attention(*sharded)
    for name, mixed in (("k", (q, sharded[1], v)), ("v", (q, k, sharded[2]))):
        attention(q, k, v)
        with pytest.raises(TypeError, match=rf"{name} is a DTensor.*local_map"):
            attention(*mixed)
    out = local_map(attention, out_placements=heads, in_placements=(heads,) * 3)(*sharded)
    assert isinstance(out, DTensor) and torch.equal(out.to_local(), attention(q, k, v))
    grads = torch.autograd.grad(out.to_local().sum(), sharded)
    expected = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert all(torch.equal(a.to_local(), b) for a, b in zip(grads, expected, strict=True))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x):
        return attention(self.project(x), x, x, causal=True)


def test_fully_shard_changes_nothing(mesh):
    torch.manual_seed(0)
    plain, sharded, x = Block(), Block(), torch.randn(2, 9, 4, 16)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh)
    outs = [block(x) for block in (plain, sharded)]
    assert torch.equal(*outs)
    for out in outs:
        out.sum().backward()
    assert torch.equal(plain.project.weight.grad, sharded.project.weight.grad.to_local())
