"""Backward of wide heads on Hopper: dK and dV in one kernel (dkdv.py), dQ in another (dq.py), nothing added in memory.

Seven products where backward.py has five, but each of the two keeps what it sums in registers.
"""

import cutlass
import cutlass.cute as cute

from cute_flash.spec.plan import Plan

from ..common import delta
from ..common.entry import BoundedEntry, PlainEntry
from ..common.keyunits import unit_count
from ..common.numeric import LOG2_E
from ..common.order import Sizes
from .dkdv import KeyGradientsSm90
from .dkdv_whole import WholeKeyGradientsSm90
from .dq import QueryGradientsSm90
from .grad.zeros import Zeroing


class ApartBackwardSm90(PlainEntry):
    """One Plan's kernels. Everything read here comes from the Plan."""

    def __init__(self, plan: Plan, dtype: type):
        self.tile_m, self.width_v, self.softcap = plan.tile.tile_m, plan.head_dim_v, plan.softcap
        keys = WholeKeyGradientsSm90 if plan.tile.tile_n == 128 else KeyGradientsSm90
        self.keys, self.queries = keys(plan, dtype), QueryGradientsSm90(plan, dtype)

    @cute.jit
    def launch(self, tensors: tuple, others: tuple, numbers: tuple, memory: cute.Tensor, stream):
        """See common/entry.py."""
        q, k, v, do, dq, dk, dv = tensors
        o, lse, dlse = others
        scale, left, right, softcap = numbers
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], left, right)
        by_row_tile = (cute.ceil_div(sizes.seqlen_q, self.tile_m), sizes.heads_q, sizes.batch)
        scratch = delta.scratch_of(memory, by_row_tile, self.tile_m, 0, counters=2)
        delta.prepare_kernel(do, o, lse, dlse, scratch, self.tile_m, self.width_v).launch(
            grid=delta.row_tile_grid(by_row_tile), block=(delta.THREADS, 1, 1), stream=stream
        )
        factors = (scale * LOG2_E, None)
        if cutlass.const_expr(self.softcap):
            factors = (softcap * LOG2_E, 2.0 * LOG2_E * scale / softcap)
        units = unit_count(sizes, self.keys.tile)
        self.keys.launch_keys((q, k, v, do), (Zeroing(scratch), dk, dv), (scale, factors), sizes, units, stream)
        self.queries.launch((q, k, v, do, dq), scratch, (scale, factors), sizes, stream)


class BoundedApartBackwardSm90(BoundedEntry, ApartBackwardSm90):
    """For a Plan that is not plain."""
