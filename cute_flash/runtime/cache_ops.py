"""attention_kvcache as a torch.library operator: what torch.compile, torch.export and FakeTensorMode see in its place.

    cute_flash::attention_kvcache  (q, k_cache, v_cache, TABLES, num_splits, batch_invariant, lse, WORDS) -> (out, lse)

As in ops.py, and without a gradient. An append is not the operator's affair: it is torch operations before it.
"""

from typing import Any

import torch

from . import autograd, caches, ops, request
from .caches import Cache, CacheCall
from .ops import NAMESPACE, Words
from .request import Options

_TABLES = "Tensor cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx"

_calls: dict[tuple[Any, ...], CacheCall] = {}


def attention_kvcache(
    q: torch.Tensor, cache: Cache, new: tuple[Any, Any], options: Options, splits: tuple[Any, Any]
) -> Any:
    """attention_kvcache() as a graph holds it, for options that are checked."""
    caches.check(q, cache)
    num_splits, batch_invariant = splits[0], caches.check_splits(*splits)
    if new[0] is not None or new[1] is not None:
        caches.check_new(q, cache, *new)
        cache = caches.append(cache, *new)
    q, words = ops.words_of(q, options)
    lse = options.return_lse
    out, lse_out = torch.ops.cute_flash.attention_kvcache(q, *cache, num_splits, batch_invariant, lse, *words)
    return (out, lse_out) if lse else out


def _forward(q: torch.Tensor, *given: Any) -> Any:
    cache, words = Cache(*given[:5]), Words(*given[8:])
    num_splits, batch_invariant, lse = given[5:8]
    with torch.no_grad():
        caches.check(q, cache)
        caches.check_splits(num_splits, batch_invariant)
        options = caches.without_right(words.options(lse), q.shape[1])
        numbers = words.numbers(q.shape[3])[:1] + request.bounds(options.causal, options.window, options.softcap)[1]
        out: torch.Tensor
        lse_out: torch.Tensor | None
        if request.is_empty(q, cache.k) or cache.capacity == 0:
            out, lse_out = autograd.empty_outputs(q, cache.v)
        else:
            key = (*ops.kind(q, cache.k, cache.v, words), q.shape[1], cache.page_size, lse)
            call = _calls.get(key) or ops.remember(_calls, key, CacheCall(q, cache, options))
            out, lse_out = call(q, cache, numbers, num_splits, batch_invariant)
    return out, ops.no_lse(q) if lse_out is None or not lse else lse_out


def _fake_forward(q: torch.Tensor, *given: Any) -> Any:
    cache, lse = Cache(*given[:5]), given[7]
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty(batch, seqlen_q, heads_q, cache.v.shape[3])
    return out, q.new_empty(batch, heads_q, seqlen_q, dtype=request.lse_dtype(q.dtype)) if lse else ops.no_lse(q)


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    head = f"Tensor q, Tensor k_cache, Tensor v_cache, {_TABLES}, SymInt? num_splits, bool batch_invariant, bool lse"
    name = "attention_kvcache"
    ops.define(library, name, f"({head}, {ops.WORDS}) -> (Tensor, Tensor)")
    library.impl(name, _forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake_forward, lib=library)
    return library


_library = _register()  # the operator lives as long as it does
