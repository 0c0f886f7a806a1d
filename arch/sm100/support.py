"""What the Blackwell kernels can do: one sentence per limit, with the number. Not yet run on silicon."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import BACKWARD, Problem

from ..common.support import refuse_call
from .tiles import BACKWARD_WIDTH

CAPABILITIES = ((10, 0), (10, 3))
FEATURES = frozenset({"softcap"})  # options beyond the plain call that are served


def native(device: Device) -> bool:
    return device.capability in CAPABILITIES


def refuse(problem: Problem) -> tuple[str, ...]:
    device = problem.device
    if device.capability is None:
        return (f"runs on compute capability 10.0 and 10.3, the tensors are on {device.type}",)
    if not native(device):
        major, minor = device.capability
        return (f"runs on compute capability 10.0 and 10.3 (tcgen05 and tensor memory), this GPU has {major}.{minor}",)
    if problem.direction == BACKWARD:
        return (*refuse_call(problem, FEATURES), *_too_wide(problem))
    return refuse_call(problem, FEATURES)


def _too_wide(problem: Problem) -> tuple[str, ...]:
    """Of the backward."""
    named = (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v))
    return tuple(
        f"backward of {name}={value} is not built yet: at most {BACKWARD_WIDTH}"
        for name, value in named
        if value > BACKWARD_WIDTH
    )
