"""Which kernel a Plan names, and its compilation."""

from cute_flash.spec.plan import Plan

from ..common import operands
from .forward import BoundedForwardSm90, DrawnForwardSm90, ForwardSm90, SplitForwardSm90
from .tiles import DRAWN, SPLIT


KERNELS = {SPLIT: SplitForwardSm90, DRAWN: DrawnForwardSm90}


def compile_forward(plan: Plan, options: str = ""):
    kernel = KERNELS.get(plan.variant, ForwardSm90 if plan.plain else BoundedForwardSm90)
    split, drawn = plan.variant == SPLIT, plan.variant == DRAWN
    return operands.compile_forward(kernel(plan, operands.DTYPES[plan.dtype]), plan, split, options, drawn)
