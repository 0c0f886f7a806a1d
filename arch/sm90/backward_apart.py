"""Backward of wide heads on Hopper: dK and dV in one kernel (dkdv.py), dQ in another (dq.py), nothing added in memory.

Seven products where backward.py has five, but each of the two keeps what it sums in registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.spec.plan import Plan

from ..common import delta
from ..common.numeric import LOG2_E
from .dkdv import KeyGradientsSm90
from .dq import QueryGradientsSm90
from .grad.schedule import Sizes


class ApartBackwardSm90:
    """One Plan's kernels. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile_m, self.width_v, self.softcap = plan.tile.tile_m, plan.head_dim_v, plan.softcap
        self.keys, self.queries = KeyGradientsSm90(plan, dtype), QueryGradientsSm90(plan, dtype)

    @cute.jit
    def __call__(
        self,
        do: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        o: cute.Tensor,  # as do
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q)
        dlse: cute.Tensor | None,
        dq: cute.Tensor,  # as q
        dk: cute.Tensor,  # as k
        dv: cute.Tensor,  # as v
        scale: Float32,
        memory: cute.Tensor,  # scratch, float32
        stream,
    ):
        self.launch((q, k, v, do, dq, dk, dv), (o, lse, dlse), (scale, None, None, None), memory, stream)

    @cute.jit
    def launch(self, moved: tuple, others: tuple, numbers: tuple, memory: cute.Tensor, stream):
        """`numbers`: (scale, left, right, softcap), the last three None in a plain Plan."""
        q, k, v, do, dq, dk, dv = moved
        o, lse, dlse = others
        scale, left, right, softcap = numbers
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        by_row_tile = (cute.ceil_div(sizes.seqlen_q, self.tile_m), sizes.heads_q, sizes.batch)
        scratch = delta.scratch_of(memory, by_row_tile, self.tile_m, 0)
        delta.prepare_kernel(do, o, lse, dlse, scratch, self.tile_m, self.width_v).launch(
            grid=by_row_tile, block=(delta.THREADS, 1, 1), stream=stream
        )
        factors = (scale * LOG2_E, None)
        if cutlass.const_expr(self.softcap):
            factors = (softcap * LOG2_E, 2.0 * LOG2_E * scale / softcap)
        self.keys.launch((q, k, v, do, dk, dv), scratch.rows, (scale, factors), sizes, stream)
        self.queries.launch((q, k, v, do, dq), scratch.rows, (scale, factors), sizes, stream)


class BoundedApartBackwardSm90(ApartBackwardSm90):
    """The same for Plans that are not plain: a window's bounds and a softcap arrive beside the scale."""

    @cute.jit
    def __call__(
        self,
        do: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Float32,
        left: Int32,
        right: Int32,
        softcap: Float32,
        memory: cute.Tensor,
        stream,
    ):
        self.launch((q, k, v, do, dq, dk, dv), (o, lse, dlse), (scale, left, right, softcap), memory, stream)
