"""The Blackwell forward is as exact as the Hopper one: both emulated on the same inputs, against float64.

Every run: one shape a head dim, masks in turn. Both write the same kind of row into --emulator-csv's file.
"""

import pytest

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import ALLOWED_RATIO
from .hopper import Schedule, attend, turn

LATE = Schedule("late", "random", 1)
DIMS = ((40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def shape(index: int, dims: tuple[int, int], **fields) -> Case:
    """2**15 output elements and more, so that two equally good kernels differ by under 5%; keys end inside a tile."""
    rows = 512 if dims[1] < 64 else 257
    return Case(1, rows, 300, 2, 1, *dims, causal=bool(index + turn() & 1), **fields)


CASES = [
    *(shape(index, dims) for index, dims in enumerate(DIMS)),
    *(shape(index, dims, dtype="float16") for index, dims in enumerate(((64, 64), (128, 128)))),
    shape(0, (128, 128), values="outliers"),
    shape(1, (64, 64), values="falling"),  # every tile raises the maxima
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_the_hopper_kernels(case: Case, poisoned_empty, record_property):
    inputs = make_inputs(case)
    exact = oracle.forward(*inputs.qkv, **case.options)
    errors = {}
    for arch in ("sm_90a", "sm_100a"):
        answer = attend(inputs, case.causal, 1, arch=arch, long=True, **LATE.knobs)
        errors[arch] = oracle.relative_error(answer.out, exact.out)
        assert oracle.lse_excess(answer.lse, exact.lse) <= 1, arch  # 1e-3
    record_property("beside hopper", (str(case), errors["sm_100a"] / errors["sm_90a"]))
    assert errors["sm_100a"] <= ALLOWED_RATIO * errors["sm_90a"], errors
