"""FlashAttention's functions, names and argument order over ours: for code that imports those.

    from cute_flash.integrations.flash_attn import flash_attn_func

Layouts are the same on both sides: (batch, seqlen, heads, head_dim), packed (total, heads, head_dim). What differs, and
is turned into our words: a window bound below 0 is unbounded, softcap 0.0 is none. Where a row sees no key LSE is -inf
here. Dropout, alibi_slopes, rotation and left padding are refused with a sentence.
"""

import numbers
from typing import Any

import torch

from ..api import attention
from ..kvcache import attention_kvcache
from ..spec.errors import UnsupportedError
from ..varlen import attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _bound(value: int | None) -> int | None:
    return None if value is None or value < 0 else value


def _window(window_size: Any) -> tuple[int | None, int | None]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be a pair (left, right), -1 unbounded, got {window_size!r}") from None
    return _bound(left), _bound(right)


def _hint(longest: Any) -> Any:
    """A length that lies in a tensor is left out: it only chooses a kernel, and reading it would wait for the GPU."""
    return None if isinstance(longest, torch.Tensor) else longest


def _refused(dropout_p: float, alibi_slopes: torch.Tensor | None) -> dict[str, Any]:
    """What ours refuse, where it is asked for. Words that say nothing are left out: they would cost the warm path."""
    refused: dict[str, Any] = {}
    if dropout_p:
        refused["dropout_p"] = dropout_p
    if alibi_slopes is not None:
        refused["alibi_slopes"] = alibi_slopes
    return refused


def _parts(name: str, packed: torch.Tensor, shape: str) -> tuple[torch.Tensor, ...]:
    """q, k and v, or k and v, that lie side by side along the axis whose size `shape` spells out."""
    sizes = shape.split(", ")
    axis = next(index for index, size in enumerate(sizes) if size.isdecimal())
    if packed.dim() != len(sizes) or packed.shape[axis] != int(sizes[axis]):
        raise ValueError(f"{name} must be ({shape}), got shape {tuple(packed.shape)}")
    return packed.unbind(axis)


def _length(k_cache: torch.Tensor, block_table: torch.Tensor | None, given: Any) -> int:
    """Keys of every row, from the one number that is given; None = as many as the cache holds."""
    capacity: int = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    if given is None:
        return capacity
    is_integer = isinstance(given, (numbers.Integral, torch.SymInt)) and not isinstance(given, bool)
    if not is_integer:
        raise TypeError(f"cache_seqlens must be an int32 tensor, an integer or None, got {type(given).__name__}")
    if not 0 <= given <= capacity:
        raise ValueError(f"cache_seqlens={given}: 0 to the {capacity} keys that the cache holds")
    length: int = given
    return length


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
    result = attention(
        q, k, v, causal=causal, window=_window(window_size), scale=softmax_scale, softcap=softcap,
        return_lse=return_attn_probs, deterministic=deterministic, **_refused(dropout_p, alibi_slopes),
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func(q, k, v, ...) of qkv (batch, seqlen, 3, heads, head_dim), read in place."""
    q, k, v = _parts("qkv", qkv, "batch, seqlen, 3, heads, head_dim")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func(q, k, v, ...) of kv (batch, seqlen_k, 2, heads_kv, head_dim), read in place."""
    k, v = _parts("kv", kv, "batch, seqlen_k, 2, heads_kv, head_dim")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """attention_varlen() under FlashAttention's name; q (total_q, heads_q, head_dim), LSE (heads_q, total_q).

    Arguments as flash_attn_func and attention_varlen() have them; max_seqlen_q, max_seqlen_k that are tensors are not
    looked at; block_table: None. Raises what they raise.
    """
    if block_table is not None:
        raise UnsupportedError("block_table= is not built yet here: flash_attn_with_kvcache has it, for equal seqlen_q")
    result = attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=_hint(max_seqlen_q),
        max_seqlen_k=_hint(max_seqlen_k), causal=causal, window=_window(window_size), scale=softmax_scale,
        softcap=softcap, return_lse=return_attn_probs, deterministic=deterministic, **_refused(dropout_p, alibi_slopes),
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """flash_attn_varlen_func(q, k, v, ...) of qkv (total, 3, heads, head_dim), read in place."""
    q, k, v = _parts("qkv", qkv, "total, 3, heads, head_dim")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Any:
    """flash_attn_varlen_func(q, k, v, ...) of kv (total_k, 2, heads_kv, head_dim), read in place."""
    k, v = _parts("kv", kv, "total_k, 2, heads_kv, head_dim")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """attention_kvcache() under FlashAttention's name: (out, lse) with return_softmax_lse, else out.

    Args:
        q, k_cache, v_cache, cache_batch_idx, causal: as attention_kvcache() takes them; k, v: its k_new, v_new.
        cache_seqlens: (batch,) int32, or one integer for all rows; None = the whole cache, and then no k and v.
        block_table: its page_table. num_splits: 0 = its None. The others as flash_attn_func has them.
        rotary_cos, rotary_sin, cache_leftpad: None. Anything else is refused.

    Raises what attention_kvcache() raises.
    """
    for name, value in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin), ("cache_leftpad", cache_leftpad)):
        if value is not None:
            raise UnsupportedError(f"{name}= is not built yet: rotate q and k, and cut the padding, before the call")
    if cache_seqlens is None and (k is not None or v is not None):
        raise ValueError("cache_seqlens=None is the whole cache, which has no room for k= and v=: say where they go")
    if not isinstance(cache_seqlens, torch.Tensor):
        length = _length(k_cache, block_table, cache_seqlens)
        cache_seqlens = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    return attention_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=block_table, cache_batch_idx=cache_batch_idx,
        k_new=k, v_new=v, num_splits=num_splits or None, causal=causal, window=_window(window_size),
        scale=softmax_scale, softcap=softcap, return_lse=return_softmax_lse, **_refused(0.0, alibi_slopes),
    )  # fmt: skip
