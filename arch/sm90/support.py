"""What the Hopper kernels can do: one sentence per limit, with the number."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import BACKWARD, DENSE, FORWARD, PACKED, Problem

from ..common.support import refuse_call

CAPABILITY = (9, 0)
FEATURES = frozenset({"softcap"})  # options beyond the plain call that are served
FORMS = {FORWARD: (DENSE, PACKED), BACKWARD: (DENSE,)}


def native(device: Device) -> bool:
    return device.capability == CAPABILITY


def refuse(problem: Problem) -> tuple[str, ...]:
    device = problem.device
    if device.capability is None:
        return (f"runs on compute capability 9.0, the tensors are on {device.type}",)
    if not native(device):
        major, minor = device.capability
        return (f"runs on compute capability 9.0 (wgmma), this GPU has {major}.{minor}",)
    return refuse_call(problem, FEATURES, forms=FORMS[problem.direction])
