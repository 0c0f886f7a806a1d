"""Which kernel a Plan names, and its compilation."""

from cute_flash.spec.plan import Plan

from ..common import operands
from .forward import BoundedForwardSm100, ForwardSm100, SplitForwardSm100
from .tiles import SPLIT


def compile_forward(plan: Plan, options: str = ""):
    split = plan.variant == SPLIT
    kernel = SplitForwardSm100 if split else ForwardSm100 if plan.plain else BoundedForwardSm100
    return operands.compile_forward(kernel(plan, operands.DTYPES[plan.dtype]), plan, split, options)
