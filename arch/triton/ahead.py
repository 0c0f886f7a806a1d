"""Compile a Plan's kernels with no tensors and no GPU, for the launch that contiguous, 16-byte aligned operands give.

What is compiled lands in Triton's own disk cache, where that launch then finds it.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import PACKED

from .operands import Operand, Spec

POINTER = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
ALIGNED = [["tt.divisibility", 16]]


def launch_options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _constant(value: Any) -> bool:
    return value is None or isinstance(value, int | Spec)


def _leaves(value: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Any]]:
    if not isinstance(value, tuple):
        return [(path, value)]
    return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*path, index))]


def _constants_attributes(leaves: list[tuple[tuple[int, ...], Any]]) -> dict[tuple[int, ...], list[Any]]:
    """From 3.7 on Triton lists top-level constants too, with no attribute; its cache key has the text, in order."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        return {}
    return {path: [] for path, value in leaves if len(path) == 1 and _constant(value)}


def _types(value: Any) -> Any:
    if not isinstance(value, tuple):
        return "constexpr" if _constant(value) else value
    items = [_types(item) for item in value]
    return Operand(*items) if isinstance(value, Operand) else tuple(items)


def operand_types(dtype: str) -> Operand:
    return Operand(POINTER[dtype], "i32", "i32", "i32", 1)


def bound_types(plan: Plan) -> tuple[str | None, str | None, str | None]:
    """Of a kernel's left, right and softcap."""
    has_right = plan.mask.right and not plan.mask.causal
    return "i32" if plan.mask.left else None, "i32" if has_right else None, "fp32" if plan.softcap else None


def length_types(plan: Plan) -> tuple[tuple[str, str] | None, str | None]:
    """Of a kernel's lengths and sequences."""
    return (("*i32", "*i32"), "i32") if plan.form == PACKED else (None, None)


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], arch: str, tile: Tile) -> Any:
    """`arguments` = Triton's name of a type for each parameter, in tuples as they are passed, or a constant's value."""
    leaves = _leaves(arguments)
    aligned = [path for path, value in leaves if not _constant(value) and (len(path) > 1 or value.startswith("*"))]
    major, minor = arch.split(".")
    return triton.compile(
        ASTSource(
            kernel,
            signature=dict(zip(kernel.arg_names, _types(arguments), strict=True)),
            constexprs={path: value for path, value in leaves if _constant(value)},
            attrs=dict(sorted((_constants_attributes(leaves) | dict.fromkeys(aligned, ALIGNED)).items())),
        ),
        target=GPUTarget("cuda", int(major) * 10 + int(minor), 32),
        options=launch_options(tile),
    )
