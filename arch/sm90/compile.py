"""Which kernel a Plan names, and its compilation."""

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

from ..common import operands
from .backward import BackwardSm90, BoundedBackwardSm90, PackedBackwardSm90, PackedBoundedBackwardSm90
from .backward_apart import ApartBackwardSm90, BoundedApartBackwardSm90
from .backward_shared import SharedBackwardSm90
from .backward_wide import (
    BoundedWideBackwardSm90,
    PackedBoundedWideBackwardSm90,
    PackedWideBackwardSm90,
    WideBackwardSm90,
)
from .decode import compile_decode
from .forward import (
    BoundedForwardSm90,
    DrawnForwardSm90,
    ForwardSm90,
    PackedBoundedForwardSm90,
    PackedForwardSm90,
    SplitForwardSm90,
)
from .tiles import APART, SHARED, SPLIT, WIDE


def compile_forward(plan: Plan, options: str = ""):
    split = plan.variant == SPLIT
    kernel = ForwardSm90 if plan.plain else BoundedForwardSm90
    if plan.plain and plan.draws:
        kernel = DrawnForwardSm90
    if split:
        kernel = SplitForwardSm90
    if plan.form == PACKED:
        kernel = PackedForwardSm90 if plan.plain else PackedBoundedForwardSm90
    return operands.compile_forward(kernel(plan, operands.DTYPES[plan.dtype]), plan, split, options)


def compile_backward(plan: Plan, options: str = ""):
    plain, bounded = BackwardSm90, BoundedBackwardSm90
    if plan.form == PACKED:
        plain, bounded = PackedBackwardSm90, PackedBoundedBackwardSm90
        if plan.variant == WIDE:
            plain, bounded = PackedWideBackwardSm90, PackedBoundedWideBackwardSm90
    elif plan.variant == APART:
        plain, bounded = ApartBackwardSm90, BoundedApartBackwardSm90
    elif plan.variant == WIDE:
        plain, bounded = WideBackwardSm90, BoundedWideBackwardSm90
    elif plan.variant == SHARED:
        plain = SharedBackwardSm90
    kernel = plain if plan.plain else bounded
    return operands.compile_backward(kernel(plan, operands.DTYPES[plan.dtype]), plan, options)


def compile_cache(plan: Plan, options: str = ""):
    return compile_decode(plan, operands.DTYPES[plan.dtype], options)
