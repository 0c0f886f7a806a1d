"""The operands of a backward as the contract has them (cute_flash/spec/backend.py), for a kernel class's launch."""

import cutlass.cute as cute
from cutlass import Float32, Int32


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
