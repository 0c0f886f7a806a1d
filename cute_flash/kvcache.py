"""attention_kvcache: few query rows over a key-value cache, dense or paged. The path of a call is api.attention's."""

from typing import Any

import torch
from torch.autograd import forward_ad

from .runtime import autograd, cache_ops, caches, dispatch, ops, report, request, substitution
from .runtime.caches import Cache, CacheCall
from .runtime.dispatch import Decision
from .runtime.request import SCALE_MAX, SCALE_MIN, Options
from .spec import settings
from .spec.device import Device

_warm: dict[tuple[Any, ...], CacheCall] = {}

_is_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_modes = request.modes

TABLES = ("cache_seqlens", "page_table", "cache_batch_idx")


def attention_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Exact attention of few query rows (one of a decoding step, some of a speculated one) over a key-value cache.

    Lengths and tables stay on the device: nothing waits for it, and a CUDA graph may be replayed with other ones (but
    backend="reference" reads them on the host). Not differentiable.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim): the last seqlen_q positions of each row.
        k_cache: (cache rows, length, heads_kv, head_dim), or with a page_table (pages, page_size, heads_kv, head_dim).
        v_cache: the same with head_dim_v. Dtypes, head counts, head dims and strides as attention takes them.
        cache_seqlens: (batch,) int32 on q's device: keys that each row has in the cache, before k_new. 0 gives output 0
            and LSE -inf. What lies after them is never looked at. A call does not change it: add what k_new brought.
        page_table: (batch, pages a row) int32: where each row's keys lie, page by page; entries after its last key mean
            nothing. Any page_size.
        cache_batch_idx: (batch,) int32: which cache row belongs to each row of q; not with a page_table.
        k_new, v_new: (batch, new keys, heads_kv, dim): written into the caches after each row's last key, in place,
            and then part of it. What a row has no room for is dropped. No two rows may write to one place (a cache
            row named twice, a page that both end in): refused on the CPU, while on a GPU one of them is kept.
        num_splits: how many programs share the keys of a row; None: chosen from the cache's length and the GPU, never
            from lengths on the device. Results differ by rounding.
        batch_invariant: a row's result depends, bit for bit, on nothing but the row: keys are shared out in runs of a
            fixed length.
        causal, window: as attention takes them, the last query row standing at the last key, new ones included.
        scale, softcap, return_lse, backend: as attention takes them.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v), contiguous, in q's dtype; or (out, lse) with return_lse=True, lse
        (batch, heads_q, seqlen_q), natural logarithm, float32 (float64 for float64).

    Raises:
        ValueError, TypeError: a bad input, naming the value and the rule. Of values on a GPU nothing is said: lengths
            beyond the cache and pages that do not exist give wrong numbers, and touch nothing outside the caches.
        UnsupportedError: an input needs gradients; or no backend, or not the one asked for, can run this.
        BackendBuildError: a kernel failed to compile.
    """
    key, call = None, None
    cache = Cache(k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, k_new, v_new)
    options = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "return_lse": return_lse,
        "backend": backend,
    }  # fmt: skip
    if not unknown:
        try:
            kind, bounds = (causal, ()) if window is softcap is None else request.bounds(causal, window, softcap)
            dtype, (_, seqlen_q, heads_q, head_dim) = q.dtype, q.shape
            if seqlen_q == 1 and kind is not False:  # see caches.without_right
                kind, bounds = request.bounds(False, window and (window[0], None), softcap)
            key = (
                dtype, q.device, type(q), seqlen_q, heads_q, head_dim, k_cache.shape[2], v_cache.shape[3], kind,
                return_lse, cache.page_size, cache_batch_idx is None, cache.appends, backend, settings.generation,
                request.ieee_float32(dtype),
            )  # fmt: skip
            call = _warm.get(key) if caches.fit(q, cache) else None
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):  # RuntimeError: of a nested tensor
            key = None  # the cold path says what is wrong
    if (
        call is not None
        and not (q.is_neg() or k_cache.is_neg() or v_cache.is_neg())
        and forward_ad._current_level < 0 and not _functorch_active() and not _modes()
        and not (_is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad))
        and (scale is None or (type(scale) is float and SCALE_MIN <= scale <= SCALE_MAX))
        and (causal is False or causal is True) and (return_lse is False or return_lse is True)
        and (num_splits is None or (type(num_splits) is int and num_splits > 0 and not batch_invariant))
        and (batch_invariant is False or batch_invariant is True)
    ):  # fmt: skip
        try:
            out, lse = call(q, cache, (scale or call.scale, *bounds), num_splits, batch_invariant)
        except Exception:  # of the caches only shapes were looked at
            caches.check(q, cache)
            raise
        return (out, lse) if return_lse else out
    checked = _check_options(options, unknown)
    return _cold(q, cache, checked, (num_splits, batch_invariant), key)


def _check_options(arguments: dict[str, Any], unknown: dict[str, Any]) -> Options:
    named = {**arguments, "deterministic": False}
    return request.check_options(named, unknown, settings.BACKEND_NAMES, "attention_kvcache")


def _call(q: Any, cache: Cache, options: Options, splits: tuple[Any, Any]) -> Any:
    """attention_kvcache of arguments that were looked at."""
    k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, k_new, v_new = cache
    return attention_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table, cache_batch_idx=cache_batch_idx,
        k_new=k_new, v_new=v_new, num_splits=splits[0], batch_invariant=splits[1],
        **{name: getattr(options, name) for name in _OPTIONS},
    )  # fmt: skip


def _cold(q: Any, cache: Cache, options: Options, splits: tuple[Any, Any], key: tuple[Any, ...] | None) -> Any:
    """The first call of a kind, and every one out of the ordinary: checked in full, then as the warm path."""
    if request.is_recorded(q, cache.k):
        return cache_ops.attention_kvcache(q, cache, options, splits)
    cast, cast_cache = caches.autocast(q, cache)
    if cast is not q or any(new is not old for new, old in zip(cast_cache, cache, strict=True)):
        return _call(cast, cast_cache, options, splits)
    caches.check(q, cache)
    num_splits, batch_invariant = splits[0], caches.check_splits(*splits)
    if any(x is not None and x.is_neg() for x in (cache.k, cache.v)):  # a copy would not be what is appended to
        raise ValueError("k_cache and v_cache must not carry a lazy sign (torch._neg_view): call resolve_neg() once")
    if cache.k_new is not None and cache.v_new is not None:
        cache = cache._replace(k_new=cache.k_new.resolve_neg(), v_new=cache.v_new.resolve_neg())
    options = caches.without_right(options, q.shape[1])
    for sentence in request.scale_copy(options.scale):
        report.say("dispatch", sentence)
    q, scale = request.positive_scale(q.resolve_neg(), options.scale)
    if request.is_empty(q, cache.k) or cache.capacity == 0:
        dispatch.choose(caches.describe(q, cache, options), options.backend)
        empty = autograd.empty_outputs(q, cache.v)
        return empty if options.return_lse else empty[0]
    call = _warm.get(key) if key is not None else None
    if call is None:
        call = caches.call_of(q, cache, options)
        if key is not None and call.anywhere:
            ops.remember(_warm, key, call)
    numbers = (scale, *request.bounds(options.causal, options.window, options.softcap)[1])
    out, lse = call(q, cache, numbers, num_splits, batch_invariant)
    return (out, lse) if options.return_lse else out


_OTHERS = ("k_new", "v_new", "num_splits", "batch_invariant")
_OPTIONS = frozenset(attention_kvcache.__kwdefaults__ or ()).difference(TABLES, _OTHERS)


def _checked(k_cache: Any, v_cache: Any, given: dict[str, Any]) -> tuple[Cache, Options, tuple[Any, Any]]:
    """(cache, options, num_splits and batch_invariant) of the keyword arguments that were given."""
    if "cache_seqlens" not in given:
        raise TypeError("a cache needs cache_seqlens=")
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    rest = {name: value for name, value in given.items() if name not in _OPTIONS and name not in TABLES}
    checked = _check_options(options, {name: value for name, value in rest.items() if name not in _OTHERS})
    tables = given["cache_seqlens"], given.get("page_table"), given.get("cache_batch_idx")
    cache = Cache(k_cache, v_cache, *tables, given.get("k_new"), given.get("v_new"))
    return cache, checked, (given.get("num_splits"), given.get("batch_invariant", False))


def explain(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, device: Device | None, given: dict[str, Any]
) -> Decision:
    """What attention_kvcache would run with the keyword arguments `given`; see api.explain."""
    cache, options, splits = _checked(k_cache, v_cache, given)
    caches.check(q, cache, values=False)
    caches.check_splits(*splits)
    return caches.decide(q, cache, options, device)


def _in_graph(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **given: Any) -> Any:
    """What torch.compile traces in place of attention_kvcache: the operator. Checked by the same rules."""
    cache, options, splits = _checked(k_cache, v_cache, given)
    return cache_ops.attention_kvcache(q, cache, options, splits)


substitution.substitute(attention_kvcache, _in_graph)
