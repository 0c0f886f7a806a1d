"""What the reference can do: any device and floating dtype, and the options that have a meaning here."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import CACHE, DENSE, PACKED, Problem

from ..common.support import refuse_call

DTYPES = ("bfloat16", "float16", "float32", "float64")
FEATURES = frozenset({"softcap"})  # options beyond the plain call that are served
FORMS = (DENSE, PACKED, CACHE)


def native(device: Device) -> bool:
    """Made for every device but a CUDA GPU, where it is the last resort."""
    return device.type != "cuda"


def refuse(problem: Problem) -> tuple[str, ...]:
    return refuse_call(problem, FEATURES, DTYPES, FORMS)
