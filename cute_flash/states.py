"""Attention over keys that were attended in parts: how two partial results become one."""

from typing import Any

import torch

from .runtime import request


def merge_attention_states(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and LSE of attention over two disjoint sets of keys, from the outputs and LSEs of each.

    softmax over a union weighs each part by exp(its LSE): o = (exp(lse1) o1 + exp(lse2) o2) / (exp(lse1) + exp(lse2)),
    lse = log(exp(lse1) + exp(lse2)), both taken relative to the larger LSE. Rabe and Staats,
    https://arxiv.org/abs/2112.05682, section 2.

    Args:
        o1, o2: (batch, seqlen_q, heads_q, head_dim_v), or packed (total_q, heads_q, head_dim_v); one shape, one dtype.
        lse1, lse2: (batch, heads_q, seqlen_q), or packed (heads_q, total_q), natural logarithm; float32, float64 for
            float64 outputs: as attention returns it. -inf says that a part had no key for the row, and then its output
            means nothing, NaN included.

    Returns:
        (o, lse) in the shapes and dtypes of the arguments; 0 and -inf where both parts had no key. Computed in float32
        (float64 for float64), differentiable in all four arguments, and plain torch operations: torch.compile fuses
        them.

    Raises:
        TypeError, ValueError: not such tensors, naming the value and the rule.
    """
    _check(o1=o1, o2=o2, lse1=lse1, lse2=lse2)
    top = torch.maximum(lse1, lse2).detach()
    top = top.masked_fill(top == float("-inf"), 0.0)
    weight1, weight2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = weight1 + weight2
    dead = total == 0
    total = total.masked_fill(dead, 1.0)  # before log and division: their gradients at 0 are infinite
    lse = (top + torch.log(total)).masked_fill(dead, float("-inf"))
    o = _weighted(o1, lse1, weight1 / total) + _weighted(o2, lse2, weight2 / total)
    return o.to(o1.dtype), lse


def _weighted(o: torch.Tensor, lse: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    keyless = _as_column(lse) == float("-inf")
    return o.to(share.dtype).masked_fill(keyless, 0.0) * _as_column(share)


def _as_column(rows: torch.Tensor) -> torch.Tensor:
    """(..., heads, seqlen) beside (..., seqlen, heads, dim)."""
    return rows.transpose(-1, -2)[..., None]


def _check(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        request.refuse_layout(name, tensor)
    o1, o2 = tensors["o1"], tensors["o2"]
    if o1.dim() not in (3, 4):
        shapes = "(batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)"
        raise ValueError(f"o1 must be {shapes}, got {tuple(o1.shape)}")
    if o1.shape != o2.shape:
        raise ValueError(f"o1 and o2 must have one shape, got {tuple(o1.shape)} and {tuple(o2.shape)}")
    if o1.dtype not in request.DTYPES or o1.dtype != o2.dtype:
        names = ", ".join(request.dtype_name(dtype) for dtype in request.DTYPES)
        raise TypeError(f"o1 and o2 must have one dtype of {names}, got {o1.dtype} and {o2.dtype}")
    rows, dtype = (*o1.shape[:-3], o1.shape[-2], o1.shape[-3]), request.lse_dtype(o1.dtype)
    for name in ("lse1", "lse2"):
        if tensors[name].shape != rows:
            raise ValueError(
                f"{name} must be {rows} beside outputs of {tuple(o1.shape)}, got {tuple(tensors[name].shape)}"
            )
        if tensors[name].dtype != dtype:
            raise TypeError(f"{name} must be {dtype} beside outputs of {o1.dtype}, got {tensors[name].dtype}")
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"o1, lse1, o2 and lse2 must be on one device, got {', '.join(sorted(map(str, devices)))}")
