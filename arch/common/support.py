"""Limits of a call that backends share whatever the GPU: one sentence each, with the number."""

from cute_flash.spec.problem import BACKWARD, CACHE, DENSE, HEAD_DIM_MAX, HEAD_DIM_MIN, PACKED, Problem

DTYPES = ("bfloat16", "float16")  # of the CuTe-DSL kernels
CALLS = {PACKED: "packed sequences (attention_varlen)", CACHE: "key-value caches (attention_kvcache)"}


def refuse_call(
    problem: Problem, features: frozenset[str], dtypes: tuple[str, ...] = DTYPES, forms: tuple[str, ...] = (DENSE,)
) -> tuple[str, ...]:
    """On the right device. features: options beyond the plain call that the backend serves; forms likewise."""
    reasons = []
    if problem.form not in forms:
        backward = "the backward of " if problem.direction == BACKWARD else ""
        reasons.append(f"{backward}{CALLS[problem.form]} {'is' if backward else 'are'} not built yet")
    if problem.dtype not in dtypes:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(dtypes)}")
    for name, value in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX:
            reasons.append(f"{name}={value} is outside {HEAD_DIM_MIN}..{HEAD_DIM_MAX}")
    reasons += [f"{name}= is not built yet" for name in sorted(problem.features - features)]
    return tuple(reasons)
