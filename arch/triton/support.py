"""What the Triton kernels can do: one sentence per limit, with the number."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import CACHE, DENSE, PACKED, Problem

from ..common.support import refuse_call

CAPABILITY_MIN = (8, 0)
CAPABILITIES_WITH_OWN_BACKEND = ((9, 0), (10, 0), (10, 3))  # sm90 and sm100 are made for these
TRIED_ON = (9, 0)
DTYPES = ("bfloat16", "float16", "float32")
FEATURES = frozenset({"softcap"})  # options beyond the plain call that are served
FORMS = (DENSE, PACKED, CACHE)


def native(device: Device) -> bool:
    capability = device.capability
    if capability is None or capability < CAPABILITY_MIN:
        return False
    return capability not in CAPABILITIES_WITH_OWN_BACKEND


def caveat(device: Device) -> str:
    return "" if device.capability == TRIED_ON else "run on Hopper only so far: for other GPUs compiled and interpreted"


def refuse(problem: Problem) -> tuple[str, ...]:
    capability = problem.device.capability
    if capability is None:
        return (f"runs on CUDA GPUs of compute capability 8.0 and above, the tensors are on {problem.device.type}",)
    if capability < CAPABILITY_MIN:
        major, minor = capability
        return (f"runs on compute capability 8.0 and above, this GPU has {major}.{minor}",)
    return refuse_call(problem, FEATURES, DTYPES, FORMS)
