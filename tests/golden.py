"""Outputs that a real GPU gave for small seeded inputs, stored so that an emulated kernel can be held against them.

The inputs are rebuilt from the case's name (`cases.exact_inputs`); their checksum is stored to prove it.
"""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.cases import Case, Inputs, golden_cases

FILE = Path(__file__).parent / "golden" / "sm90_forward.npz"
ULPS = 2  # of bf16, at the row's largest |O|: exp2 and the order of sums differ by less than P's rounding


class Golden(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    checksum: int


def checksum(inputs: Inputs) -> int:
    """CRC-32 of the bits of q, k and v."""
    total = 0
    for x in inputs.qkv:
        total = zlib.crc32(x.contiguous().view(torch.int16).numpy().tobytes(), total)
    return total


def save(path: Path, meta: dict[str, Any], outputs: dict[Case, Golden]) -> None:
    arrays: dict[str, Any] = {"meta": np.array(json.dumps(meta))}
    for case, golden in outputs.items():
        arrays[f"{case}/out"] = golden.out.contiguous().view(torch.int16).numpy()  # numpy has no bfloat16
        arrays[f"{case}/lse"] = golden.lse.numpy()
        arrays[f"{case}/checksum"] = np.array(golden.checksum, dtype=np.uint32)
    np.savez_compressed(path, **arrays)


def load(path: Path = FILE) -> tuple[dict[str, Any], dict[Case, Golden]]:
    """Meta data, and the outputs of every golden case that the file holds."""
    with np.load(path) as arrays:
        meta = json.loads(str(arrays["meta"]))
        outputs = {}
        for case in golden_cases():
            if f"{case}/out" in arrays:
                out = torch.from_numpy(arrays[f"{case}/out"]).view(case.torch_dtype)
                lse = torch.from_numpy(arrays[f"{case}/lse"])
                outputs[case] = Golden(out, lse, int(arrays[f"{case}/checksum"]))
    return meta, outputs


def ulps_apart(value: torch.Tensor, golden: torch.Tensor) -> float:
    """Largest difference in units of a bf16 ulp (2^-7 of a binade) at the row's largest |O|. NaN never passes."""
    if not bool(value.isfinite().all()):
        return float("inf")
    largest = golden.double().abs().amax(-1, keepdim=True)
    ulp = torch.exp2(torch.floor(torch.log2(largest.clamp_min(2.0**-100))) - 7)
    return ((value.double() - golden.double()).abs() / ulp).max().item()
