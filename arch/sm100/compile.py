"""Which kernel a Plan names, and its compilation."""

from cute_flash.spec.plan import Plan

from ..common import operands
from .forward import ForwardSm100


def compile_forward(plan: Plan, options: str = ""):
    return operands.compile_forward(ForwardSm100(plan, operands.DTYPES[plan.dtype]), plan, False, options)
