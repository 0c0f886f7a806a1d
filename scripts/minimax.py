"""Coefficients of the polynomials that stand in for MUFU.EX2: `python -m scripts.minimax`.

p(f) approximates 2^f on [0, 1) with the smallest possible maximum of |p(f) / 2^f - 1|. By Chebyshev's theorem that p is
the one whose error touches its maximum at degree + 2 points with alternating signs; Remez' algorithm finds the points:
solve for p and the error at guessed points, move the points to where the error peaks, repeat. float64 is enough, the
smallest error asked for is 1e-7.
"""

import argparse

import numpy as np

DEGREES = (2, 3, 4, 5)
GRID = 1 << 16


def remez(degree: int, rounds: int = 20) -> tuple[np.ndarray, float]:
    """(coefficients from the constant up, maximum relative error) in float64."""
    count = degree + 2
    points = (1 - np.cos(np.pi * np.arange(count) / (count - 1))) / 2
    grid = np.linspace(0.0, 1.0, GRID + 1)
    signs = (-1.0) ** np.arange(count)
    for _ in range(rounds):
        powers = points[:, None] ** np.arange(degree + 1) * np.exp2(-points)[:, None]
        solution = np.linalg.solve(np.column_stack([powers, signs]), np.ones(count))
        coefficients = solution[:-1]
        error = np.polynomial.polynomial.polyval(grid, coefficients) * np.exp2(-grid) - 1
        cuts = np.flatnonzero(np.diff(np.sign(error))) + 1  # between sign changes lies one peak each
        peaks = [run[np.argmax(np.abs(error[run]))] for run in np.split(np.arange(grid.size), cuts)]
        if len(peaks) != count:
            raise ArithmeticError(f"degree {degree}: {len(peaks)} peaks, {count} expected")
        points = grid[peaks]
    return coefficients, float(np.abs(error).max())


def float32_error(coefficients: np.ndarray) -> float:
    """Maximum relative error of Horner's rule in float32 with fused steps, as the kernels evaluate it."""
    f = np.linspace(0.0, 1.0, GRID, endpoint=False, dtype=np.float32).astype(np.float64)
    rounded = coefficients.astype(np.float32).astype(np.float64)
    value = np.full_like(f, rounded[-1])
    for c in rounded[-2::-1]:
        value = (value * f + c).astype(np.float32).astype(np.float64)
    return float(np.abs(value * np.exp2(-f) - 1).max())


def main() -> None:
    argparse.ArgumentParser(prog="python -m scripts.minimax", description=__doc__.splitlines()[0]).parse_args()
    for degree in DEGREES:
        coefficients, error = remez(degree)
        values = ", ".join(f"{float(np.float32(c)):.9g}" for c in coefficients)
        print(f"    {degree}: ({values}),  # {error:.2e}, with float32 steps {float32_error(coefficients):.2e}")


if __name__ == "__main__":
    main()
