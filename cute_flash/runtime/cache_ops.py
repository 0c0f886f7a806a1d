"""attention_kvcache as torch.library operators: what torch.compile, torch.export and FakeTensorMode see in its place.

    cute_flash::attention_kvcache         (q, k_cache, v_cache, TABLES, num_splits, batch_invariant, lse, WORDS)
    cute_flash::attention_kvcache_append  the same with k_new and v_new after TABLES: it writes into the caches

As in ops.py, -> (out, lse), and without a gradient.
"""

from typing import Any

import torch

from . import autograd, caches, flops, ops, request
from .caches import Cache, CacheCall
from .ops import Words
from .request import Options

_calls: dict[tuple[Any, ...], CacheCall] = {}


def attention_kvcache(q: torch.Tensor, cache: Cache, options: Options, splits: tuple[Any, Any]) -> Any:
    """attention_kvcache() as a graph holds it, for options that are checked."""
    q, cache = caches.autocast(q, cache)
    caches.check(q, cache)
    num_splits, batch_invariant = splits[0], caches.check_splits(*splits)
    q, words = ops.words_of(q, options)
    lse = options.return_lse
    tables: tuple[torch.Tensor | None, ...] = cache
    operator = torch.ops.cute_flash.attention_kvcache_append
    if cache.k_new is None:
        tables, operator = cache[:5], torch.ops.cute_flash.attention_kvcache
    out, lse_out = operator(q, *tables, num_splits, batch_invariant, lse, *words)
    return (out, lse_out) if lse else out


def _forward(q: torch.Tensor, *given: Any) -> Any:
    return _append_forward(q, *given[:5], None, None, *given[5:])


def _append_forward(q: torch.Tensor, *given: Any) -> Any:
    cache, words = Cache(*given[:7]), Words(*given[10:])
    num_splits, batch_invariant, lse = given[7:10]
    with torch.no_grad():
        caches.check(q, cache)
        caches.check_splits(num_splits, batch_invariant)
        options = caches.without_right(words.options(lse), q.shape[1])
        of, (scale, *_) = ops.split(q, ops.dims_of(q, cache.k, cache.v), words)
        numbers = (scale, *request.bounds(options.causal, options.window, options.softcap)[1])
        out: torch.Tensor
        lse_out: torch.Tensor | None
        if request.is_empty(q, cache.k) or cache.capacity == 0:
            out, lse_out = autograd.empty_outputs(q, cache.v)
        else:
            key = (of, q.shape[1], cache.page_size, cache.batch_idx is None, cache.appends, lse)
            call = _calls.get(key)
            if call is None:
                call = caches.call_of(q, cache, options)
                if call.anywhere:
                    ops.remember(_calls, key, call)
            out, lse_out = call(q, cache, numbers, num_splits, batch_invariant)
    return out, ops.no_lse(q) if lse_out is None or not lse else lse_out


def _fake_forward(q: torch.Tensor, *given: Any) -> Any:
    return _fake_append_forward(q, *given[:5], None, None, *given[5:])


def _fake_append_forward(q: torch.Tensor, *given: Any) -> Any:
    cache, lse = Cache(*given[:7]), given[9]
    caches.check(q, cache)
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty(batch, seqlen_q, heads_q, cache.v.shape[3])
    return out, q.new_empty(batch, heads_q, seqlen_q, dtype=request.lse_dtype(q.dtype)) if lse else ops.no_lse(q)


def _register() -> ops.Library:
    library = ops.Library("FRAGMENT")
    tables = "Tensor cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx"
    rest = f"SymInt? num_splits, bool batch_invariant, bool lse, {ops.WORDS}) -> (Tensor, Tensor)"
    read = f"attention_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, {tables}, {rest}"
    written = f"Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {tables}, Tensor k_new, Tensor v_new"
    ops.define(library, read, _forward, _fake_forward)
    ops.define(library, f"attention_kvcache_append({written}, {rest}", _append_forward, _fake_append_forward)
    for name in ("attention_kvcache", "attention_kvcache_append"):
        flops.register(name, flops.cached, flops.FORWARD)
    return library


_library = _register()  # the operators live as long as it does
