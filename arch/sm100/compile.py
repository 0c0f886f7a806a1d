"""Which kernel a Plan names, and its compilation."""

from cute_flash.spec.plan import Plan

from ..common import operands
from .backward import BackwardSm100, BoundedBackwardSm100
from .entries import BoundedForwardSm100, PairedForwardSm100, SplitForwardSm100
from .forward import ForwardSm100
from .tiles import PACKED, PAIRS, SPLIT


def compile_forward(plan: Plan, options: str = ""):
    kernels = {SPLIT: SplitForwardSm100, PACKED: SplitForwardSm100, PAIRS: PairedForwardSm100}
    kernel = kernels.get(plan.variant, ForwardSm100 if plan.plain else BoundedForwardSm100)
    return operands.compile_forward(
        kernel(plan, operands.DTYPES[plan.dtype]), plan, plan.variant in (SPLIT, PACKED), options
    )


def compile_backward(plan: Plan, options: str = ""):
    kernel = BackwardSm100 if plan.plain else BoundedBackwardSm100
    return operands.compile_backward(kernel(plan, operands.DTYPES[plan.dtype]), plan, options)
