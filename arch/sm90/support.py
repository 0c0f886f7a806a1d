"""What the Hopper kernels can do: one sentence per limit, with the number."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import BACKWARD, Problem

CAPABILITY = (9, 0)
DTYPES = ("bfloat16", "float16")
HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 256
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
    if problem.direction == BACKWARD:
        return ("not built yet: the Hopper backward kernel does not exist",)
    reasons = []
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}")
    for name, value in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX:
            reasons.append(f"{name}={value} is outside {HEAD_DIM_MIN}..{HEAD_DIM_MAX}")
    reasons += [f"{name}= is not built yet" for name in sorted(problem.features - FEATURES)]
    return tuple(reasons)
