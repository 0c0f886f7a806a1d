"""Signs the contract for Hopper (compute capability 9.0)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cute_flash.spec.device import Device
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem
from cute_flash.spec.scratch import ScratchRule

from . import support, tiles

ARCH = "sm_90a"


class Sm90Backend:
    name = "sm90"
    exports = True
    row_alignment = 16  # TMA: base address and outer strides in 16-byte units

    def native(self, device: Device) -> bool:
        return support.native(device)

    def refuse(self, problem: Problem) -> Sequence[str]:
        return support.refuse(problem)

    def plan(self, problem: Problem) -> Plan:
        softcap, mask = "softcap" in problem.features, str(problem.mask)
        dims = problem.head_dim, problem.head_dim_v
        backward = problem.direction == BACKWARD
        widths = tiles.backward_widths(*dims) if backward else tuple(tiles.width(dim) for dim in dims)
        if backward:
            tile = tiles.backward_tile(*dims, not softcap and not problem.mask.windowed)
        else:
            tile = tiles.forward_tile(*dims, mask, problem.short and not softcap, softcap)
        return Plan(
            backend=self.name,
            direction=problem.direction,
            arch=ARCH,
            dtype=problem.dtype,
            head_dim=widths[0],
            head_dim_v=widths[1],
            mask=problem.mask,
            lse=problem.lse,
            lse_grad=problem.lse_grad,
            deterministic=backward and (problem.deterministic or not tiles.fused_backward(*dims)),
            softcap=softcap,
            ctas=0 if backward else problem.device.sm_count,
            tile=tile,
            variant=tiles.backward_variant(*dims, tile) if backward else "",
        )

    def split(self, plan: Plan) -> Plan | None:
        return replace(plan, variant=tiles.SPLIT) if plan.direction == FORWARD and plan.plain else None

    def scratch(self, plan: Plan) -> ScratchRule | None:
        return tiles.backward_scratch(plan) if plan.direction == BACKWARD else None

    def build(self, plan: Plan, options: str = "") -> Callable[..., Any]:
        """A TVM-FFI function as the contract has it, on the current stream; `options` go to cute.compile."""
        from . import compile

        return (compile.compile_backward if plan.direction == BACKWARD else compile.compile_forward)(plan, options)


BACKEND = Sm90Backend()
