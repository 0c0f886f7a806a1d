"""FlashAttention's functions, names and argument order over ours: for code that imports those.

    from cute_flash.integrations.flash_attn import flash_attn_func

Layouts are the same on both sides: (batch, seqlen, heads, head_dim). What differs, and is turned into our words: a
window bound below 0 is unbounded, softcap 0.0 is none. Where a row sees no key LSE is -inf here. Dropout and
alibi_slopes are refused with a sentence; so are packed sequences and caches, which do not exist here yet.
"""

from typing import Any

import torch

from ..api import attention
from ..spec.errors import UnsupportedError

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def _bound(value: int | None) -> int | None:
    return None if value is None or value < 0 else value


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """attention() under FlashAttention's name.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); k, v: (batch, seqlen_k, heads_kv, head_dim), as attention() takes them.
        dropout_p: 0.0; alibi_slopes: None. Anything else is refused.
        softmax_scale: attention()'s scale. causal, deterministic: the same.
        window_size: (left, right) around the diagonal, both ends included; below 0 = unbounded.
        softcap: 0.0 = none.
        return_attn_probs: return (out, lse, None). There are no probabilities without dropout, there as here.

    Raises what attention() raises.
    """
    left, right = window_size
    result = attention(
        q, k, v, causal=causal, window=(_bound(left), _bound(right)), scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, return_lse=return_attn_probs, deterministic=deterministic, dropout_p=dropout_p,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func(q, k, v, ...) of qkv (batch, seqlen, 3, heads, head_dim), read in place."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must be (batch, seqlen, 3, heads, head_dim), got shape {tuple(qkv.shape)}")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func(q, k, v, ...) of kv (batch, seqlen_k, 2, heads_kv, head_dim), read in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv must be (batch, seqlen_k, 2, heads_kv, head_dim), got shape {tuple(kv.shape)}")
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(*args: Any, **options: Any) -> Any:
    """Not built yet: always raises UnsupportedError."""
    raise UnsupportedError(
        "flash_attn_varlen_func is not built yet: there is no kernel for packed sequences (cu_seqlens) so far; "
        "call flash_attn_func once a sequence"
    )


def flash_attn_with_kvcache(*args: Any, **options: Any) -> Any:
    """Not built yet: always raises UnsupportedError."""
    raise UnsupportedError(
        "flash_attn_with_kvcache is not built yet: there is no kernel for caches of several lengths so far; "
        "call flash_attn_func on the filled part of the cache"
    )
