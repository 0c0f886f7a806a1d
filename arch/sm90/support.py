"""What the Hopper kernels can do: one sentence per limit, with the number."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import BACKWARD, DENSE, PACKED, Problem

from ..common.support import refuse_call
from .tiles import FUSED_WIDTH, fused_backward

CAPABILITY = (9, 0)
FEATURES = frozenset({"softcap"})  # options beyond the plain call that are served


def native(device: Device) -> bool:
    return device.capability == CAPABILITY


def refuse(problem: Problem) -> tuple[str, ...]:
    device = problem.device
    if device.capability is None:
        return (f"runs on compute capability 9.0, the tensors are on {device.type}",)
    if not native(device):
        major, minor = device.capability
        return (f"runs on compute capability 9.0 (wgmma), this GPU has {major}.{minor}",)
    reasons = refuse_call(problem, FEATURES, forms=(DENSE, PACKED))
    if problem.form == PACKED and problem.direction == BACKWARD:
        if problem.deterministic:
            reasons += ("the backward of packed sequences is not repeatable yet (deterministic=True)",)
        if not fused_backward(problem.head_dim, problem.head_dim_v):
            dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
            reasons += (f"the backward of packed sequences is built up to head dim {FUSED_WIDTH}, not for {dims}",)
    return reasons
