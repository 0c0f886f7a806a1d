"""What the Hopper kernels can do: one sentence per limit, with the number."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import BACKWARD, Problem

from ..common.support import refuse_call
from .tiles import BACKWARD_WIDTH

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
    return refuse_call(problem, FEATURES) or _refuse_backward(problem)


def _refuse_backward(problem: Problem) -> tuple[str, ...]:
    if problem.direction != BACKWARD:
        return ()
    named = (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v))
    wide = [f"{name}={value} is above {BACKWARD_WIDTH}" for name, value in named if value > BACKWARD_WIDTH]
    reasons = [f"not built yet: the backward where {' and '.join(wide)}"] if wide else []
    reasons += ["not built yet: a deterministic backward"] if problem.deterministic else []
    return tuple(reasons)
