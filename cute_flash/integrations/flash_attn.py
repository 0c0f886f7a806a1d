"""FlashAttention's functions, names and argument order over ours: for code that imports those.

    from cute_flash.integrations.flash_attn import flash_attn_func

Layouts are the same on both sides: (batch, seqlen, heads, head_dim), packed (total, heads, head_dim). What differs, and
is turned into our words: a window bound below 0 is unbounded, softcap 0.0 is none. Where a row sees no key LSE is -inf
here. Dropout, alibi_slopes and left padding are refused with a sentence. Functions and order are FlashAttention 2's;
where later ones put arguments elsewhere, name them. bert_padding.py, beside, has flash_attn.bert_padding's functions.
"""

import numbers
from typing import Any

import torch

from ..api import attention
from ..kvcache import attention_kvcache
from ..runtime import caches
from ..runtime.caches import Cache
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


def _check_rotation(cos: Any, sin: Any, q: torch.Tensor, cache: Cache) -> None:
    """q and the cache have been looked at."""
    for name, angles in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(angles, torch.Tensor) or not angles.is_floating_point():
            got = angles.dtype if isinstance(angles, torch.Tensor) else type(angles).__name__
            raise TypeError(f"{name} must be a tensor of floats, as its companion is, got {got}")
        if angles.dim() != 2 or angles.shape != cos.shape or not 0 < 2 * angles.shape[1] <= q.shape[3]:
            rule = f"(positions, up to half of head_dim {q.shape[3]}), rotary_cos and rotary_sin alike"
            raise ValueError(f"{name} must be {rule}, got shape {tuple(angles.shape)}")
        if angles.shape[0] < cache.capacity:
            raise ValueError(f"{name} has {angles.shape[0]} positions for the {cache.capacity} keys of the cache")
        if angles.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {angles.device}")


def _rotated(
    x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim), its first dims turned by the angles of positions (batch, seqlen or 1).

    Computed in float32 (float64 for float64). The pairs that turn together are neighbours, or lie half the dims apart.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    last = angles[0].shape[0] - 1  # beyond are keys that the cache has no room for; a wrong length must not fault
    cos, sin = (angle.to(dtype)[positions.clamp(0, last)].unsqueeze(2) for angle in angles)
    dims = 2 * cos.shape[-1]
    turning = x[..., :dims].to(dtype)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    turned = a * cos - b * sin, a * sin + b * cos
    whole = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((whole.to(x.dtype), x[..., dims:]), dim=-1)


def _rotate(
    q: torch.Tensor, cache: Cache, angles: tuple[Any, Any], interleaved: bool, bounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k_new, v_new) where new keys stand at their places in the cache, and so do query rows if a mask is bounded to
    a diagonal; without one they all stand at the first new key's, as FlashAttention has it."""
    q, cache = caches.autocast(q, cache)
    caches.check(q, cache)
    _check_rotation(*angles, q, cache)
    k_new, v_new = cache.k_new, cache.v_new
    if k_new is None or v_new is None:
        raise ValueError("rotary_cos= and rotary_sin= go with k= and v=: what is in the cache was rotated before")
    start = cache.seqlens[:, None].long()
    rows, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k_new))
    turned = _rotated(q, angles, start + rows if bounded else start, interleaved)
    return turned, _rotated(k_new, angles, start + keys, interleaved), v_new


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
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), at least as many positions as the cache holds keys: q and k
            are rotated before they are used and written, in torch operations of their own, k at its places in the
            cache. rotary_interleaved: neighbouring dims turn together, else dims i and i + rotary_dim / 2.
        cache_leftpad: None. Anything else is refused.

    Raises what attention_kvcache() raises.
    """
    if cache_leftpad is not None:
        raise UnsupportedError("cache_leftpad= is not built yet: cut the padding before the call")
    if cache_seqlens is None and (k is not None or v is not None):
        raise ValueError("cache_seqlens=None is the whole cache, which has no room for k= and v=: say where they go")
    if not isinstance(cache_seqlens, torch.Tensor):
        length = _length(k_cache, block_table, cache_seqlens)
        cache_seqlens = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    window = _window(window_size)
    if rotary_cos is not None or rotary_sin is not None:
        cache = Cache(k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, k, v)
        q, k, v = _rotate(q, cache, (rotary_cos, rotary_sin), rotary_interleaved, causal or window != (None, None))
    return attention_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=block_table, cache_batch_idx=cache_batch_idx,
        k_new=k, v_new=v, num_splits=num_splits or None, causal=causal, window=window,
        scale=softmax_scale, softcap=softcap, return_lse=return_softmax_lse, **_refused(0.0, alibi_slopes),
    )  # fmt: skip
