"""Signs the contract for Blackwell (compute capability 10.0 and 10.3)."""

from collections.abc import Callable, Sequence
from typing import Any

from cute_flash.spec.device import Device
from cute_flash.spec.errors import UnsupportedError
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import Problem

from . import support


class Sm100Backend:
    name = "sm100"
    exports = True
    row_alignment = 16

    def native(self, device: Device) -> bool:
        return support.native(device)

    def refuse(self, problem: Problem) -> Sequence[str]:
        return support.refuse(problem)

    def plan(self, problem: Problem) -> Plan:
        raise UnsupportedError(f"sm100 plans nothing yet: {problem}")

    def split(self, plan: Plan) -> Plan | None:
        return None

    def build(self, plan: Plan) -> Callable[..., Any]:
        raise UnsupportedError(f"sm100 builds nothing yet: {plan}")


BACKEND = Sm100Backend()
