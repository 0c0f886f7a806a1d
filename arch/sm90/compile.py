"""Which kernel a Plan names, and its compilation."""

from cute_flash.spec.plan import Plan

from ..common import operands
from .forward import BoundedForwardSm90, DrawnForwardSm90, ForwardSm90, SplitForwardSm90
from .tiles import SPLIT


def compile_forward(plan: Plan, options: str = ""):
    split = plan.variant == SPLIT
    kernel = ForwardSm90 if plan.plain else BoundedForwardSm90
    if plan.plain and plan.draws:
        kernel = DrawnForwardSm90
    if split:
        kernel = SplitForwardSm90
    return operands.compile_forward(kernel(plan, operands.DTYPES[plan.dtype]), plan, split, options)
