"""Signs the contract for Hopper (compute capability 9.0)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cute_flash.spec.device import Device
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import FORWARD, Problem

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
        softcap = "softcap" in problem.features
        mask, widths = problem.mask, (tiles.width(problem.head_dim), tiles.width(problem.head_dim_v))
        return Plan(
            backend=self.name,
            direction=problem.direction,
            arch=ARCH,
            dtype=problem.dtype,
            head_dim=widths[0],
            head_dim_v=widths[1],
            mask=mask,
            lse=problem.lse,
            softcap=softcap,
            ctas=problem.device.sm_count,
            draws=tiles.draws(*widths, str(mask), problem.short, softcap),
            tile=tiles.forward_tile(
                problem.head_dim, problem.head_dim_v, str(mask), problem.short and not softcap, softcap
            ),
        )

    def split(self, plan: Plan) -> Plan | None:
        return replace(plan, variant=tiles.SPLIT, draws=False) if plan.direction == FORWARD and plan.plain else None

    def pack(self, plan: Plan) -> Plan | None:
        return None

    def build(self, plan: Plan, options: str = "") -> Callable[..., Any]:
        """A TVM-FFI function (q, k, v, out, lse, scale, ...) on the current stream; `options` go to cute.compile."""
        from .compile import compile_forward

        return compile_forward(plan, options)


BACKEND = Sm90Backend()
