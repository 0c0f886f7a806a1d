"""What the reference can do: any device and floating dtype, and the options that have a meaning here."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import Problem

DTYPES = ("bfloat16", "float16", "float32", "float64")
HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 256
FEATURES = frozenset({"softcap"})  # options beyond the plain call that are served


def native(device: Device) -> bool:
    """Made for every device but a CUDA GPU, where it is the last resort."""
    return device.type != "cuda"


def refuse(problem: Problem) -> tuple[str, ...]:
    reasons = []
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}")
    for name, value in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX:
            reasons.append(f"{name}={value} is outside {HEAD_DIM_MIN}..{HEAD_DIM_MAX}")
    reasons += [f"{name}= is not built yet" for name in sorted(problem.features - FEATURES)]
    return tuple(reasons)
