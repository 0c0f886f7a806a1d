"""What the Blackwell kernels can do: one sentence per limit, with the number. Not yet run on silicon."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import Problem

from ..common.support import refuse_call

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
    return refuse_call(problem, FEATURES)
