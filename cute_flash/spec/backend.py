"""The contract a backend signs. The office (cute_flash.runtime) knows backends only through it.

Kernels are called with flat positional arguments and launch on the current stream:

    forward:  kernel(q, k, v, out, lse, scale)
    backward: kernel(dout, q, k, v, out, lse, dlse, dq, dk, dv, scale)

q, dq   (batch, seqlen_q, heads_q, head_dim)         out, dout (batch, seqlen_q, heads_q, head_dim_v)
k, dk   (batch, seqlen_k, heads_kv, head_dim)        lse, dlse (batch, heads_q, seqlen_q) float32 (float64 for float64)
v, dv   (batch, seqlen_k, heads_kv, head_dim_v)      scale     a finite Python float > 0

A Plan whose form is "packed" runs sequences that lie one after another: batch is 1, seqlen_q and seqlen_k are the rows
of all together, and two operands stand before the scale:

    ..., cu_seqlens_q, cu_seqlens_k, scale[, left, right, softcap])

cu_seqlens  (sequences + 1,) int32, contiguous, on the operands' device: sequence i has rows [cu[i], cu[i + 1]) of q and
            of k, and its mask is aligned to its own lengths. Rows after the last sequence get output 0, LSE -inf and
            zero gradients; no row reads what belongs to another sequence, NaN included. The office has not read the
            values: out of order they may give any numbers, but nothing is read or written outside the operands.

A packed forward may want scratch (see `scratch`, a TableRule): its kernel takes (elements,) int32, as it comes, after
these numbers.

A Plan whose form is "cache" (forward only) runs few query rows over a cache. Its k and v are
(cache rows, length, heads_kv, dim), or with a page_size (pages, page_size, heads_kv, dim), and seven operands stand
before the scale:

    ..., cache_seqlens, page_table, cache_batch_idx, k_new, v_new, splits, split_keys, scale[, left, right, softcap])

cache_seqlens    (batch,) int32: keys of each row of q in the cache, at most what it holds
page_table       (batch, pages a row) int32, last stride 1; None without a page_size
cache_batch_idx  (batch,) int32: the cache row of each row of q; None: its own number, or paged
k_new, v_new     (batch, new keys, heads_kv, dim), or None both: written into k and v behind each row's keys, as far as
                 there is room, and then part of them
splits           a Python int >= 1: programs that share the keys of a query tile
split_keys       0: equal shares of what each row has. > 0: each share is exactly so many keys, whatever the row has, so
                 that no other row changes how a row is summed; splits * split_keys holds the whole cache. < 0: the keys
                 of all rows, end to end, are cut into -split_keys equal runs, and `splits` is twice as many: of a run
                 its first row and its last may be shared. Only a backend that `spreads` is told so, of a mask without a
                 left bound and a batch within spec/splits.py's limits

As with cu_seqlens, values are not read by the office, and wrong ones touch nothing outside the operands. What is not a
key of the row is never read into it. A Plan may say which of the operands that may be None are given (`chosen`,
`appends`): its kernel takes these and no others.

A Plan that is not `plain` has a windowed mask, a softcap or both. Its kernels take three numbers after the scale, here
and below, of which one that the Plan does not use is 0:

    ..., scale, left, right, softcap)

left, right  Python ints in 0..2^30, the bounds that Plan.mask says there are (see mask.py; a causal mask's right is 0)
softcap      a finite Python float > 0: scores become softcap * tanh(scale * q k / softcap) before the mask

A Plan that `draws` has kernels that take one more operand, the last:

counter  (1,) int32, zero before and after; no other launch that may run at the same time is given it

A backend may offer a second forward for calls whose query tiles are too few to fill the GPU (see `split`):

    kernel(q, k, v, out, lse, scale[, left, right, softcap], o_partial, state_partial)

o_partial     (splits, batch, heads_q, seqlen_q, Plan.head_dim_v) float32, scratch
state_partial (splits, batch, heads_q, seqlen_q, 2) float32, scratch: a row's maximum and total in each split

and a third one of the same kind for calls whose rows, of all query heads of a group together, fit one query tile (see
`pack`); `splits` may be 1 there.

A backward may want scratch (see `scratch`): its kernel takes (elements,) float32, as it comes, as the last operand. So
may a cache's, so many elements for each of its splits, and none where splits is 1.

lse is None where Plan.lse is False, dlse where Plan.lse_grad is False. The office never calls a kernel with an empty
batch, head or sequence dimension, and hands over tensors that keep the backend's `row_alignment`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .device import Device
from .plan import Plan
from .problem import Problem
from .scratch import ScratchRule, TableRule


class Backend(Protocol):
    name: str
    exports: bool  # build() returns a CuTe-DSL object with export_to_c: the office keeps it on disk as a shared library
    spreads: bool  # does a cache's kernel cut a whole batch into equal runs (split_keys < 0)?
    row_alignment: int  # bytes every row start and outer stride must be a multiple of; 0 = any strides are taken

    def native(self, device: Device) -> bool:
        """Is this backend the one made for the device? A native backend's refusal is a fallback, said aloud."""
        ...

    def caveat(self, device: Device) -> str:
        """What a user of it on this device should know, which `explain` shows beside its plans; mostly nothing."""
        ...

    def refuse(self, problem: Problem) -> Sequence[str]:
        """Why not: a sentence per limit, with the number. Empty = taken. No side effects, no heavy imports."""
        ...

    def plan(self, problem: Problem) -> Plan:
        """What would run. Only called on problems that are not refused."""
        ...

    def split(self, plan: Plan) -> Plan | None:
        """The plan that shares a query tile among CTAs, each with a run of keys; None where there is none."""
        ...

    def scratch(self, plan: Plan) -> ScratchRule | TableRule | None:
        """What the plan's kernel wants beside its operands; None: it takes no such operand."""
        ...

    def pack(self, plan: Plan) -> Plan | None:
        """A split plan whose query tiles hold the rows of all query heads of a group; None where there is none."""
        ...

    def build(self, plan: Plan) -> Callable[..., Any]:
        """Compile. Heavy imports (cutlass, triton) happen in here only."""
        ...
