"""Signs the contract for Hopper (compute capability 9.0)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cute_flash.spec.device import Device
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, CACHE, DENSE, FORWARD, PACKED, Problem
from cute_flash.spec.scratch import ScratchRule, TableRule

from . import support, tiles
from .cached.tiles import cache_tile, width_qk, width_v

ARCH = "sm_90a"


class Sm90Backend:
    name = "sm90"
    exports = True
    spreads = True
    row_alignment = 16  # TMA: base address and outer strides in 16-byte units

    def native(self, device: Device) -> bool:
        return support.native(device)

    def caveat(self, device: Device) -> str:
        return ""

    def refuse(self, problem: Problem) -> Sequence[str]:
        return support.refuse(problem)

    def plan(self, problem: Problem) -> Plan:
        """A forward's; a backward's has what the two share and its own tile."""
        softcap, mask = "softcap" in problem.features, problem.mask
        dims, small = (problem.head_dim, problem.head_dim_v), tiles.small(problem)
        forward = Plan(
            backend=self.name,
            direction=problem.direction,
            arch=ARCH,
            dtype=problem.dtype,
            head_dim=tiles.width(dims[0]),
            head_dim_v=tiles.width(dims[1]),
            mask=mask,
            lse=problem.lse,
            softcap=softcap,
            ctas=problem.device.sm_count,
            draws=tiles.draws(tiles.width(dims[0]), tiles.width(dims[1]), str(mask), problem.short or small, softcap),
            tile=tiles.forward_tile(*dims, str(mask), problem.short and not softcap, softcap, small),
        )
        if problem.form == CACHE:
            return self._cache_plan(forward, problem)
        if problem.direction == FORWARD and problem.form == PACKED:
            tile = tiles.packed_tile(problem, softcap)
            ctas = problem.device.sm_count * tiles.forward_ctas(tile, forward.head_dim, forward.head_dim_v)
            return replace(forward, form=PACKED, tile=tile, ctas=ctas, draws=True)
        if problem.direction == FORWARD:
            together = tiles.forward_ctas(forward.tile, forward.head_dim, forward.head_dim_v)
            return replace(forward, ctas=problem.device.sm_count * together)
        widths = tiles.backward_widths(*dims)
        tile = tiles.backward_tile(problem, forward.plain)
        variant = tiles.backward_variant(problem, tile)
        return replace(
            forward,
            form=problem.form,
            head_dim=widths[0],
            head_dim_v=widths[1],
            lse_grad=problem.lse_grad,
            deterministic=tiles.adds_in_turn(problem, variant),
            ctas=problem.device.sm_count,
            draws=False,
            tile=tile,
            variant=variant,
        )

    def _cache_plan(self, forward: Plan, problem: Problem) -> Plan:
        widths = width_qk(problem.head_dim, problem.page_size), width_v(problem.head_dim_v)
        return replace(
            forward,
            head_dim=widths[0],
            head_dim_v=widths[1],
            form=CACHE,
            page_size=problem.page_size,
            chosen=problem.chosen,
            appends=problem.appends,
            draws=False,
            tile=cache_tile(*widths, problem.few_rows),
        )

    def split(self, plan: Plan) -> Plan | None:
        shares = plan.direction == FORWARD and plan.plain and plan.form == DENSE
        if not shares:
            return None
        tile = tiles.split_tile(plan)
        ctas = plan.ctas // tiles.forward_ctas(plan.tile, plan.head_dim, plan.head_dim_v)
        return replace(plan, variant=tiles.SPLIT, draws=False, tile=tile, ctas=ctas)

    def scratch(self, plan: Plan) -> ScratchRule | TableRule | None:
        if plan.direction == BACKWARD:
            return tiles.backward_scratch(plan)
        if plan.form == CACHE:
            return ScratchRule(1, plan.head_dim_v + 2)  # of each share: O, then a row's maximum and total
        return tiles.TABLE if plan.form == PACKED else None

    def pack(self, plan: Plan) -> Plan | None:
        return None

    def build(self, plan: Plan, options: str = "") -> Callable[..., Any]:
        """A TVM-FFI function as the contract has it, on the current stream; `options` go to cute.compile."""
        from . import compile

        if plan.form == CACHE:
            return compile.compile_cache(plan, options)
        return (compile.compile_backward if plan.direction == BACKWARD else compile.compile_forward)(plan, options)


BACKEND = Sm90Backend()
