"""Which kernel a Plan names, and its compilation."""

from cute_flash.spec.plan import Plan

from ..common import operands
from .backward import BackwardSm90, BoundedBackwardSm90
from .backward_apart import ApartBackwardSm90, BoundedApartBackwardSm90
from .decode import compile_decode
from .forward import BoundedForwardSm90, DrawnForwardSm90, ForwardSm90, SplitForwardSm90
from .tiles import APART, SPLIT


def compile_forward(plan: Plan, options: str = ""):
    split = plan.variant == SPLIT
    kernel = ForwardSm90 if plan.plain else BoundedForwardSm90
    if plan.plain and plan.draws:
        kernel = DrawnForwardSm90
    if split:
        kernel = SplitForwardSm90
    return operands.compile_forward(kernel(plan, operands.DTYPES[plan.dtype]), plan, split, options)


def compile_backward(plan: Plan, options: str = ""):
    if plan.variant == APART:
        kernel = ApartBackwardSm90 if plan.plain else BoundedApartBackwardSm90
    else:
        kernel = BackwardSm90 if plan.plain else BoundedBackwardSm90
    return operands.compile_backward(kernel(plan, operands.DTYPES[plan.dtype]), plan, options)


def compile_cache(plan: Plan, options: str = ""):
    return compile_decode(plan, operands.DTYPES[plan.dtype], options)
