"""The inputs whose outputs an H200 recorded, through the emulator: the same kernels, the same numbers.

Every run: a sixth of the cases, rotating by day. scripts/test --all: all of them.
"""

import pytest

from .. import golden, oracle
from ..cases import Case, exact_inputs, golden_cases
from .hopper import attend, turn

TURNS = 6


def cases():
    for index, case in enumerate(golden_cases()):
        due = (index + turn()) % TURNS == 0
        yield pytest.param(case, id=str(case), marks=[] if due else [pytest.mark.slow])


@pytest.mark.parametrize("case", cases())
def test_agrees_with_the_gpu(case: Case, poisoned_empty, record_property):
    """Keys are shared among CTAs as the front door decides, on the GPU and here: both have 132 SMs."""
    recorded, inputs = golden.load()[1][case], exact_inputs(case)
    assert golden.checksum(inputs) == recorded.checksum
    answer = attend(inputs, case.causal, None)
    apart = golden.ulps_apart(answer.out, recorded.out)
    record_property("ulps", apart)
    assert apart <= golden.ULPS
    assert oracle.lse_excess(answer.lse, recorded.lse.double()) <= 1
