"""Signs the contract for every GPU of compute capability 8.0 and above."""

from collections.abc import Callable, Sequence
from typing import Any

from cute_flash.spec.device import Device
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, CACHE, FORWARD, Problem
from cute_flash.spec.scratch import ScratchRule

from . import support, tiles


class TritonBackend:
    name = "triton"
    exports = False
    spreads = False
    row_alignment = 0
    toolchain = ("triton",)

    def native(self, device: Device) -> bool:
        return support.native(device)

    def caveat(self, device: Device) -> str:
        return support.caveat(device)

    def refuse(self, problem: Problem) -> Sequence[str]:
        return support.refuse(problem)

    def plan(self, problem: Problem) -> Plan:
        capability = problem.device.capability
        head_dim, head_dim_v = tiles.width(problem.head_dim), tiles.width(problem.head_dim_v)
        padded = (head_dim, head_dim_v) != (problem.head_dim, problem.head_dim_v)
        widest = max(head_dim, head_dim_v)
        ieee = problem.dtype == "float32" and problem.ieee_float32
        plan = Plan(
            backend=self.name,
            direction=problem.direction,
            arch=f"{capability[0]}.{capability[1]}",
            dtype=problem.dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            mask=problem.mask,
            lse=problem.lse or problem.direction == BACKWARD,
            lse_grad=problem.lse_grad,
            deterministic=True,  # no atomics anywhere
            ieee_float32=ieee,
            softcap="softcap" in problem.features,
            tile=tiles.choose(problem.direction, widest, problem.dtype, ieee, capability),
            form=problem.form,
            page_size=problem.page_size,
            variant=tiles.variant(problem.direction, widest, padded, problem.dtype, capability),
        )
        if problem.form == CACHE:
            return tiles.for_cache(plan, problem.few_rows)
        few = problem.few_rows, problem.few_keys
        return tiles.for_sequences(plan, *few) if any(few) else plan

    def split(self, plan: Plan) -> Plan | None:
        return None

    def scratch(self, plan: Plan) -> ScratchRule | None:
        return None

    def pack(self, plan: Plan) -> Plan | None:
        return None

    def build(self, plan: Plan) -> Callable[..., Any]:
        if plan.form == CACHE:
            from . import cache as kernels
        elif plan.direction == FORWARD:
            from . import forward as kernels
        else:
            from . import backward as kernels
        return kernels.build(plan)


BACKEND = TritonBackend()
