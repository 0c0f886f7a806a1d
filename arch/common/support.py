"""Limits that the CuTe-DSL kernels share whatever the architecture: one sentence each, with the number."""

from cute_flash.spec.problem import Problem

DTYPES = ("bfloat16", "float16")
HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 256


def refuse_forward(problem: Problem, features: frozenset[str]) -> tuple[str, ...]:
    """Of a forward on the right GPU. features: options beyond the plain call that the backend serves."""
    reasons = []
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}")
    for name, value in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX:
            reasons.append(f"{name}={value} is outside {HEAD_DIM_MIN}..{HEAD_DIM_MAX}")
    reasons += [f"{name}= is not built yet" for name in sorted(problem.features - features)]
    return tuple(reasons)
