"""The operands of kernels as the contract has them (cute_flash/spec/backend.py), bundled for a kernel class.

A forward's class has run(tensors, lse, numbers, counter, stream): tensors (q, k, v, o), numbers (scale, left, right,
softcap) with the last three None where the Plan is plain, counter None where nothing is drawn; and, where keys are
shared, run_split(tensors, lse, scale, partials, stream). A backward's has launch, see PlainEntry.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32


class ForwardEntry:
    """Of a plain Plan."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        o: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor | None,  # (batch, heads_q, seqlen_q)
        scale: Float32,
        stream,
    ):
        self.run((q, k, v, o), lse, (scale, None, None, None), None, stream)


class DrawnForwardEntry:
    """Where CTAs draw their query tiles."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float32,
        counter: cute.Tensor,  # (1,) int32, zero before and after
        stream,
    ):
        self.run((q, k, v, o), lse, (scale, None, None, None), counter, stream)


class BoundedForwardEntry:
    """For Plans that are not plain: a window's bounds and a softcap arrive beside the scale."""

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
        self.run((q, k, v, o), lse, (scale, left, right, softcap), None, stream)


class DrawnBoundedForwardEntry:
    """Both."""

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
        counter: cute.Tensor,
        stream,
    ):
        self.run((q, k, v, o), lse, (scale, left, right, softcap), counter, stream)


class PackedForwardEntry:
    """For sequences that lie one after another; batch is 1."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor,  # (sequences + 1,) int32
        cu_seqlens_k: cute.Tensor,
        scale: Float32,
        table: cute.Tensor,  # scratch, int32
        counter: cute.Tensor,
        stream,
    ):
        numbers, packed = (scale, None, None, None), (cu_seqlens_q, cu_seqlens_k, table)
        self.run_packed((q, k, v, o), lse, numbers, packed, counter, stream)


class PackedBoundedForwardEntry:
    """The same for Plans that are not plain."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        scale: Float32,
        left: Int32,
        right: Int32,
        softcap: Float32,
        table: cute.Tensor,
        counter: cute.Tensor,
        stream,
    ):
        numbers, packed = (scale, left, right, softcap), (cu_seqlens_q, cu_seqlens_k, table)
        self.run_packed((q, k, v, o), lse, numbers, packed, counter, stream)


class SplitForwardEntry:
    """For query tiles too few to fill the GPU: several CTAs share one, each with a run of keys."""

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
        self.run_split((q, k, v, o), lse, scale, (o_partial, state_partial), stream)


class PlainEntry:
    """launch(tensors, others, numbers, memory, stream): tensors (q, k, v, do, dq, dk, dv), others (o, lse, dlse) and
    numbers (scale, left, right, softcap) with the last three None."""

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


class PackedEntry:
    """For sequences that lie one after another; batch is 1. launch_packed(tensors, others, numbers, (cu_seqlens_q,
    cu_seqlens_k), memory, stream)."""

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
        cu_seqlens_q: cute.Tensor,  # (sequences + 1,) int32
        cu_seqlens_k: cute.Tensor,
        scale: Float32,
        memory: cute.Tensor,
        stream,
    ):
        tensors, numbers = (q, k, v, do, dq, dk, dv), (scale, None, None, None)
        self.launch_packed(tensors, (o, lse, dlse), numbers, (cu_seqlens_q, cu_seqlens_k), memory, stream)


class PackedBoundedEntry:
    """The same for Plans that are not plain."""

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
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        scale: Float32,
        left: Int32,
        right: Int32,
        softcap: Float32,
        memory: cute.Tensor,
        stream,
    ):
        tensors, numbers = (q, k, v, do, dq, dk, dv), (scale, left, right, softcap)
        self.launch_packed(tensors, (o, lse, dlse), numbers, (cu_seqlens_q, cu_seqlens_k), memory, stream)


class BoundedEntry:
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
