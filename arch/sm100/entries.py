"""The kernels that a Plan may name beside the plain one: with shared keys, with bounds, in pairs of CTAs."""

import cutlass.cute as cute
from cutlass import Float32

from cute_flash.spec.plan import Plan

from ..common.combine import launch_combine
from ..common.entry import BoundedForwardEntry, ForwardEntry, SplitForwardEntry
from ..common.numeric import LOG2_E
from .forward import ForwardSm100, Results, Softening
from .tiles import PAIR, pairs_pay


class SplitForwardSm100(SplitForwardEntry, ForwardSm100):
    """The same kernel for query tiles too few to fill the GPU: several CTAs share one, each with a run of keys."""

    def run_split(self, tensors: tuple, lse: cute.Tensor | None, scale: Float32, partials: tuple, stream):
        o_partial, state_partial = partials
        results = Results(None, o_partial, state_partial)
        self.launch(tensors, results, Softening(scale * LOG2_E), (None, None), stream)
        launch_combine(o_partial, state_partial, tensors[3], lse, stream)


class PairedForwardSm100(ForwardEntry):
    """Two kernels in one: pairs of CTAs, or single ones where a pair's second CTA would have too few rows."""

    def __init__(self, plan: Plan, dtype: type):
        self.single, self.pair = ForwardSm100(plan, dtype), ForwardSm100(plan, dtype, PAIR)
        self.sizes = plan.tile.tile_m, plan.head_dim, plan.head_dim_v

    @cute.jit
    def run(self, tensors: tuple, lse: cute.Tensor | None, numbers: tuple, counter: None, stream):
        q, _, _, _ = tensors
        results, softening = Results(lse), Softening(numbers[0] * LOG2_E)
        if pairs_pay(q.shape[1], *self.sizes):
            self.pair.launch(tensors, results, softening, (None, None), stream)
        else:
            self.single.launch(tensors, results, softening, (None, None), stream)


class BoundedForwardSm100(BoundedForwardEntry, ForwardSm100):
    """The same kernel with a window, a softcap or both."""

    def __init__(self, plan: Plan, dtype: type):
        super().__init__(plan, dtype)
        self.softcap = plan.softcap

    def run(self, tensors: tuple, lse: cute.Tensor | None, numbers: tuple, counter: None, stream):
        scale, left, right, softcap = numbers
        softening = Softening(scale * LOG2_E)
        if self.softcap:
            softening = Softening(softcap * LOG2_E, 2.0 * LOG2_E * (scale / softcap))
        bounds = (left if self.mask.left else None, right if self.mask.right and not self.mask.causal else None)
        self.launch(tensors, Results(lse), softening, bounds, stream)
