"""The polynomials that stand in for MUFU.EX2: their coefficients, and their error over a dense grid."""

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_flash.arch.common.numeric import EXP2_DEGREE, EXP2_FLOOR, EXP2_POLYNOMIALS, ROUNDER
from scripts import minimax

# rounded up from what python -m scripts.minimax prints
LIMITS = {2: 1.73e-3, 3: 7.6e-5, 4: 2.8e-6, 5: 2.0e-7}
HALF_ULP = {"bfloat16": 2.0**-9, "float16": 2.0**-12}


def exp2(x: np.ndarray, degree: int) -> np.ndarray:
    """The kernels' steps in float32: floor by adding the rounder downwards, Horner, exponent field."""
    x = np.maximum(x.astype(np.float32), np.float32(EXP2_FLOOR))
    floor = np.floor(x)
    shifted = (np.float32(ROUNDER) + floor).astype(np.float32)
    f = (x - floor).astype(np.float64)
    coefficients = np.array(EXP2_POLYNOMIALS[degree], np.float32).astype(np.float64)
    power = np.full_like(f, coefficients[-1])
    for c in coefficients[-2::-1]:
        power = (power * f + c).astype(np.float32).astype(np.float64)  # one rounding: a fused multiply-add
    bits = power.astype(np.float32).view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))
    return bits.view(np.float32)


@pytest.mark.parametrize("degree", sorted(EXP2_POLYNOMIALS))
def test_coefficients_are_the_scripts(degree):
    coefficients, error = minimax.remez(degree)
    assert np.array_equal(coefficients.astype(np.float32), np.array(EXP2_POLYNOMIALS[degree], np.float32))
    assert error <= LIMITS[degree]


@pytest.mark.parametrize("degree", sorted(EXP2_POLYNOMIALS))
def test_relative_error_over_a_dense_grid(degree):
    x = np.linspace(-125.0, 8.0, (1 << 20) + 1).astype(np.float32)
    error = np.abs(exp2(x, degree).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)
    assert error.max() <= LIMITS[degree]


@pytest.mark.parametrize("degree", sorted(EXP2_POLYNOMIALS))
def test_what_underflows_is_tiny_and_never_negative(degree):
    x = np.array([-125.5, -126.0, -126.5, -127.0, -1e3, -1e30, -np.inf])
    value = exp2(x, degree)
    assert (value >= 0).all() and (value < 2.0**-125).all()


@pytest.mark.parametrize("dtype", sorted(EXP2_DEGREE))
def test_the_chosen_degree_is_lost_in_the_rounding_of_p(dtype):
    assert LIMITS[EXP2_DEGREE[dtype]] < HALF_ULP[dtype] / 20
    assert LIMITS[EXP2_DEGREE[dtype] - 1] > HALF_ULP[dtype] / 20
