"""What the Blackwell kernels can do: nothing yet, and they say so."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import Problem

CAPABILITIES = ((10, 0), (10, 3))


def native(device: Device) -> bool:
    return device.capability in CAPABILITIES


def refuse(problem: Problem) -> tuple[str, ...]:
    device = problem.device
    if device.capability is None:
        return (f"runs on compute capability 10.0 and 10.3, the tensors are on {device.type}",)
    if not native(device):
        major, minor = device.capability
        return (f"runs on compute capability 10.0 and 10.3 (tcgen05 and tensor memory), this GPU has {major}.{minor}",)
    return (f"not built yet: the Blackwell {problem.direction} kernels do not exist",)
