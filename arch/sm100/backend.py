"""Signs the contract for Blackwell (compute capability 10.0 and 10.3)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cute_flash.spec.device import Device
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem
from cute_flash.spec.scratch import ScratchRule

from . import support, tiles

ARCHES = {(10, 0): "sm_100a", (10, 3): "sm_103a"}


class Sm100Backend:
    name = "sm100"
    exports = True
    spreads = False
    row_alignment = 16  # TMA: base address and outer strides in 16-byte units

    def native(self, device: Device) -> bool:
        return support.native(device)

    def caveat(self, device: Device) -> str:
        return "compiled and emulated, not yet run on silicon"

    def refuse(self, problem: Problem) -> Sequence[str]:
        return support.refuse(problem)

    def plan(self, problem: Problem) -> Plan:
        if problem.direction == BACKWARD:
            return self._backward(problem)
        return Plan(
            backend=self.name,
            direction=problem.direction,
            arch=ARCHES[problem.device.capability],
            dtype=problem.dtype,
            head_dim=tiles.width(problem.head_dim),
            head_dim_v=tiles.width(problem.head_dim_v),
            mask=problem.mask,
            lse=problem.lse,
            tile=tiles.forward_tile(problem.head_dim, problem.head_dim_v),
            softcap="softcap" in problem.features,
            variant=self._variant(problem),
            ctas=problem.device.sm_count
            if tiles.persistent(problem.head_dim, problem.head_dim_v, str(problem.mask))
            else 0,
        )

    def _backward(self, problem: Problem) -> Plan:
        widths = tiles.backward_widths(problem.head_dim, problem.head_dim_v)
        return Plan(
            backend=self.name,
            direction=BACKWARD,
            arch=ARCHES[problem.device.capability],
            dtype=problem.dtype,
            head_dim=widths[0],
            head_dim_v=widths[1],
            mask=problem.mask,
            lse=problem.lse,
            lse_grad=problem.lse_grad,
            deterministic=problem.deterministic,
            tile=tiles.backward_tile(*widths),
            variant=tiles.backward_variant(*widths),
            softcap="softcap" in problem.features,
        )

    def _variant(self, problem: Problem) -> str:
        plain = "softcap" not in problem.features
        return tiles.PAIRS if plain and tiles.paired(problem.head_dim, problem.head_dim_v, str(problem.mask)) else ""

    def split(self, plan: Plan) -> Plan | None:
        """One query tile a CTA: with so few rows the second one would be empty."""
        if plan.direction != FORWARD or not plan.plain:
            return None
        return replace(plan, tile=tiles.split_tile(plan.head_dim, plan.head_dim_v), ctas=0, variant=tiles.SPLIT)

    def scratch(self, plan: Plan) -> ScratchRule | None:
        return tiles.backward_scratch(plan) if plan.direction == BACKWARD else None

    def pack(self, plan: Plan) -> Plan | None:
        split = self.split(plan)
        return None if split is None else replace(split, variant=tiles.PACKED)

    def build(self, plan: Plan, options: str = "") -> Callable[..., Any]:
        """A TVM-FFI function on the current stream, see the contract. `options`: more for cute.compile."""
        from . import compile

        return (compile.compile_backward if plan.direction == BACKWARD else compile.compile_forward)(plan, options)


BACKEND = Sm100Backend()
