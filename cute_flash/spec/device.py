"""The only file that asks torch.cuda about the hardware."""

import functools
import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    type: str  # "cuda" or "cpu" (other torch device types pass through by name)
    index: int
    name: str
    capability: tuple[int, int] | None  # None off CUDA
    sm_count: int  # streaming multiprocessors; 0 off CUDA

    def __str__(self) -> str:
        if self.capability is None:
            return self.type
        return f"{self.name} (cuda:{self.index}, capability {self.capability[0]}.{self.capability[1]})"


# Compile targets and the compute capability each is for.
ARCHES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
# SMs of the part most people have of it; the tile order depends on it, results do not.
_SM_COUNTS = {(9, 0): 132, (10, 0): 148, (10, 3): 148}


def imagined(capability: tuple[int, int], word: str) -> Device:
    """A GPU that is not here: `word` ("emulated", "simulated") tells it from a real one."""
    name = f"{word} {capability[0]}.{capability[1]}"
    return Device("cuda", 0, name, capability, _SM_COUNTS.get(capability, 108))


def capability_of(arch: str) -> tuple[int, int]:
    """Of "9.0", of a compile target such as "sm_90a", or of a backend named after one, "sm90". ValueError for anything
    else, TypeError for no text."""
    if not isinstance(arch, str):
        raise TypeError(f"arch={arch!r} must be text, such as '9.0'")
    found = re.fullmatch(r"(\d+)\.(\d+)|sm_?(\d+)(\d)a?", arch, re.ASCII)
    if found is None:
        raise ValueError(
            f"{arch!r} is neither a compute capability MAJOR.MINOR (9.0) nor a compile target (sm_90a); H100 and H200 "
            "are 9.0, B200 10.0, B300 10.3"
        )
    major, minor = (part for part in found.groups() if part is not None)
    return int(major), int(minor)


def first() -> Device:
    """This machine's first GPU, else its CPU."""
    return describe(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


@functools.lru_cache(maxsize=64)
def _describe_cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return Device("cuda", index, properties.name, capability, properties.multi_processor_count)


def describe(device: torch.device) -> Device:
    """Facts of a torch device. CUDA's are asked once per index and kept."""
    if device.type != "cuda":
        return Device(device.type, device.index or 0, device.type, None, 0)
    return _describe_cuda(torch.cuda.current_device() if device.index is None else device.index)


def version_facts() -> dict[str, str]:
    """torch and CUDA versions, for `doctor`."""
    return {"torch": torch.__version__, "cuda": torch.version.cuda or "none: this torch knows no NVIDIA GPU"}
