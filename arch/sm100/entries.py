"""The kernels that a Plan may name beside the plain one: with shared keys, with bounds, in pairs of CTAs."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.spec.plan import Plan

from ..common.combine import launch_combine
from ..common.numeric import LOG2_E
from .forward import ForwardSm100, Results, Softening
from .tiles import PAIR, pairs_pay


class SplitForwardSm100(ForwardSm100):
    """The same kernel for query tiles too few to fill the GPU: several CTAs share one, each with a run of keys."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        o_partial: cute.Tensor,  # (splits, batch, heads_q, seqlen_q, width_v) float32
        state_partial: cute.Tensor,  # (splits, batch, heads_q, seqlen_q, 2) float32
        stream,
    ):
        results = Results(None, o_partial, state_partial)
        self.launch((q, k, v, o), results, Softening(scale * LOG2_E), (None, None), stream)
        launch_combine(o_partial, state_partial, o, lse, stream)


class PairedForwardSm100:
    """Two kernels in one: pairs of CTAs, or single ones where a pair's second CTA would have too few rows."""

    def __init__(self, plan: Plan, dtype: type):
        self.single, self.pair = ForwardSm100(plan, dtype), ForwardSm100(plan, dtype, PAIR)
        self.sizes = plan.tile.tile_m, plan.head_dim, plan.head_dim_v

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        stream,
    ):
        tensors, results, softening = (q, k, v, o), Results(lse), Softening(scale * LOG2_E)
        if pairs_pay(q.shape[1], *self.sizes):
            self.pair.launch(tensors, results, softening, (None, None), stream)
        else:
            self.single.launch(tensors, results, softening, (None, None), stream)


class BoundedForwardSm100(ForwardSm100):
    """The same kernel with a window, a softcap or both."""

    def __init__(self, plan: Plan, dtype: type):
        super().__init__(plan, dtype)
        self.softcap = plan.softcap

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        left: Int32,
        right: Int32,
        softcap: Float32,
        stream,
    ):
        softening = Softening(scale * LOG2_E)
        if cutlass.const_expr(self.softcap):
            softening = Softening(softcap * LOG2_E, 2.0 * LOG2_E * (scale / softcap))
        bounds = (
            left if cutlass.const_expr(self.mask.left) else None,
            right if cutlass.const_expr(self.mask.right and not self.mask.causal) else None,
        )
        self.launch((q, k, v, o), Results(lse), softening, bounds, stream)
