"""Keys shared among CTAs where scores are huge: the parts of a row are weighed as exactly as one CTA weighs its keys.

Scores are integers that float32 holds, and scale is ln 2: in base 2 they are multiplied by exactly 1, so that nothing
but the merging can round. The emulator does not fuse multiply and subtract; times 1 that makes no difference.
"""

import math

import pytest
import torch

from .. import oracle
from ..cases import Inputs
from .hopper import attend, way_of_today

DIM = 64  # tiles of 192 query rows (Blackwell 128) and 128 keys
TOLERANCE = 4e-3  # P and the output are rounded to bfloat16, 2^-9 each
SCALE = math.log(2.0)


def shifted(level: int, seqlen_q: int, seqlen_k: int) -> Inputs:
    """Scores level - 3 .. level + 3."""
    generator = torch.Generator().manual_seed(abs(level) + 1)
    q, k = torch.zeros(1, seqlen_q, 1, DIM), torch.zeros(1, seqlen_k, 1, DIM)
    q[..., 0], k[..., 0] = 1.0, torch.randint(-3, 4, (1, seqlen_k, 1), generator=generator).float()
    q[..., 1], k[..., 1] = 1024.0, level / 1024
    v = torch.randn(1, seqlen_k, 1, DIM, generator=generator)
    return Inputs(*(x.bfloat16() for x in (q, k, v, v)))


def check(inputs: Inputs, causal: bool, splits: int, arch: str = "sm_90a") -> torch.Tensor:
    """The LSE, once it and the output are right."""
    answer = attend(inputs, causal, splits, scale=SCALE, arch=arch)
    assert len(answer.kernels) == (1 if splits == 1 else 2)
    exact = oracle.forward(*inputs.qkv, causal=causal, scale=SCALE)
    assert oracle.relative_error(answer.out, exact.out) < TOLERANCE
    assert oracle.lse_excess(answer.lse, exact.lse) <= 1
    return answer.lse


def rotated(levels):
    """Every level with one number of splits a day; the rest is slow."""
    for at, level in enumerate(levels):
        for way, splits in enumerate((1, 2, 3)):
            marks = [] if way_of_today(at, 1, 3) == way else [pytest.mark.slow]
            yield pytest.param(level, splits, id=f"{level}-{splits}", marks=marks)


@pytest.mark.parametrize("level, splits", rotated((0, 2**17, -(2**17), 2**20, -(2**20), 2**23)))
def test_a_row_of_huge_scores_is_weighed_right(level, splits, poisoned_empty):
    check(shifted(level, 33, 300), False, splits)


@pytest.mark.parametrize("level, splits", rotated((0, -(2**20), 2**23)))
def test_blackwell_weighs_it_right_too(level, splits, poisoned_empty):
    """It keeps maxima that are up to 2^8 too low: a split hands on the one that its sum is relative to."""
    check(shifted(level, 33, 300), False, splits, "sm_100a")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("level", [-(2**20), 2**23], ids=str)
def test_rows_that_one_split_or_none_has_keys_for(level, arch, poisoned_empty):
    """Causal, two splits: rows below 60 see no key, those below 188 only keys of the first tile."""
    lse = check(shifted(level, 200, 140), True, 2, arch)
    assert (lse[0, 0] == -math.inf).sum() == 60
