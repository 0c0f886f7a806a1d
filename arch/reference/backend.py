"""Signs the contract for plain PyTorch: any device, any floating dtype, and the meaning of every option."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_flash.spec.device import Device
from cute_flash.spec.mask import Bounds
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, CACHE, PACKED, Problem
from cute_flash.spec.scratch import ScratchRule

from . import support


class ReferenceBackend:
    name = "reference"
    exports = False
    spreads = False
    row_alignment = 0

    def native(self, device: Device) -> bool:
        return support.native(device)

    def caveat(self, device: Device) -> str:
        return ""

    def refuse(self, problem: Problem) -> Sequence[str]:
        return support.refuse(problem)

    def plan(self, problem: Problem) -> Plan:
        from .tiles import TILE

        return Plan(
            backend=self.name,
            direction=problem.direction,
            arch="",
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=problem.mask,
            lse=problem.lse,
            lse_grad=problem.lse_grad,
            deterministic=problem.deterministic,
            ieee_float32=problem.ieee_float32,
            softcap="softcap" in problem.features,
            tile=TILE,
            form=problem.form,
            page_size=problem.page_size,
        )

    def split(self, plan: Plan) -> Plan | None:
        return None

    def scratch(self, plan: Plan) -> ScratchRule | None:
        return None

    def pack(self, plan: Plan) -> Plan | None:
        return None

    def build(self, plan: Plan) -> Callable[..., Any]:
        if plan.form == CACHE:
            return _cache_kernel(plan)
        if plan.form == PACKED:
            return _packed_backward_kernel(plan) if plan.direction == BACKWARD else _packed_forward_kernel(plan)
        return _backward_kernel(plan) if plan.direction == BACKWARD else _forward_kernel(plan)


def _forward_kernel(plan: Plan) -> Callable[..., None]:
    from .forward import forward
    from .tiles import Geometry

    tile = plan.tile
    assert tile is not None  # plan() always sets one

    @torch.no_grad()
    def kernel(q, k, v, out, lse, scale, left=0, right=0, softcap=0.0) -> None:
        geometry = Geometry(plan.mask, tile, q.shape[1], k.shape[1], Bounds(left, right))
        with torch.autocast(q.device.type, enabled=False):  # a matmul in 16 bits would be another meaning
            forward(geometry, (q, k, v), out, lse, scale, softcap)

    return kernel


def _backward_kernel(plan: Plan) -> Callable[..., None]:
    from .backward import Saved, backward
    from .tiles import Geometry

    tile = plan.tile
    assert tile is not None  # plan() always sets one

    @torch.no_grad()
    def kernel(dout, q, k, v, out, lse, dlse, dq, dk, dv, scale, left=0, right=0, softcap=0.0) -> None:
        geometry = Geometry(plan.mask, tile, q.shape[1], k.shape[1], Bounds(left, right))
        with torch.autocast(q.device.type, enabled=False):
            backward(geometry, Saved(q, k, v, out, lse, dout, dlse), (dq, dk, dv), scale, softcap)

    return kernel


def _packed_forward_kernel(plan: Plan) -> Callable[..., None]:
    from .packed import Lengths, forward_packed

    @torch.no_grad()
    def kernel(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *numbers) -> None:
        with torch.autocast(q.device.type, enabled=False):
            lengths = Lengths(cu_seqlens_q, cu_seqlens_k)
            forward_packed(plan, (q, k, v), (out, lse), lengths, _scale_bounds_softcap(*numbers))

    return kernel


def _packed_backward_kernel(plan: Plan) -> Callable[..., None]:
    from .backward import Saved
    from .packed import Lengths, backward_packed

    @torch.no_grad()
    def kernel(dout, q, k, v, out, lse, dlse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *numbers) -> None:
        with torch.autocast(q.device.type, enabled=False):
            saved, lengths = Saved(q, k, v, out, lse, dout, dlse), Lengths(cu_seqlens_q, cu_seqlens_k)
            backward_packed(plan, saved, (dq, dk, dv), lengths, _scale_bounds_softcap(*numbers))

    return kernel


def _cache_kernel(plan: Plan) -> Callable[..., None]:
    from .cache import Cache, forward_cache

    @torch.no_grad()
    def kernel(
        q, k, v, out, lse, cache_seqlens, page_table, cache_batch_idx, k_new, v_new, splits, split_keys, *numbers
    ) -> None:
        with torch.autocast(q.device.type, enabled=False):
            cache = Cache(k, v, cache_seqlens, page_table, cache_batch_idx, k_new, v_new)
            forward_cache(plan, q, cache, (out, lse), _scale_bounds_softcap(*numbers))

    return kernel


def _scale_bounds_softcap(
    scale: float, left: int = 0, right: int = 0, softcap: float = 0.0
) -> tuple[float, Bounds, float]:
    return scale, Bounds(left, right), softcap


BACKEND = ReferenceBackend()
