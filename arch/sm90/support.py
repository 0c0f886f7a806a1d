"""What the Hopper kernels can do: one sentence per limit, with the number."""

from cute_flash.spec.device import Device
from cute_flash.spec.problem import BACKWARD, CACHE, DENSE, FORWARD, PACKED, Problem

from ..common.support import refuse_call
from . import tiles
from .cached.tiles import TILE_N, page_fits

CAPABILITY = (9, 0)
FEATURES = frozenset({"softcap"})  # options beyond the plain call that are served
FORMS = {FORWARD: (DENSE, PACKED, CACHE), BACKWARD: (DENSE, PACKED)}


def native(device: Device) -> bool:
    return device.capability == CAPABILITY


def refuse(problem: Problem) -> tuple[str, ...]:
    device = problem.device
    if device.capability is None:
        return (f"runs on compute capability 9.0, the tensors are on {device.type}",)
    if not native(device):
        major, minor = device.capability
        return (f"runs on compute capability 9.0 (wgmma), this GPU has {major}.{minor}",)
    reasons = refuse_call(problem, FEATURES, forms=FORMS[problem.direction])
    if problem.form == CACHE:
        reasons += _refuse_cache(problem)
    if problem.form == PACKED and problem.direction == BACKWARD and not tiles.packed_backward(problem):
        dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
        built = "up to head dim 128, and for 129 to 192 with a head_dim_v of 65 to 192"
        reasons += (f"the backward of packed sequences is built {built}, not for {dims}",)
    return reasons


def _refuse_cache(problem: Problem) -> tuple[str, ...]:
    """What TMA cannot read as it lies; a cache is never copied."""
    reasons = list(problem.unaligned)
    for name, value in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if value % 8:
            reasons.append(f"{name}={value} of a cache is not a multiple of 8")
    if not page_fits(problem.page_size):
        reasons.append(f"page_size={problem.page_size} neither divides {TILE_N} nor is a multiple of it")
    return tuple(reasons)
