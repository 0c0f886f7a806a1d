"""Key-value caches: the checks, the Problem and the launch of attention_kvcache."""

import numbers
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..spec import settings
from ..spec.device import Device
from ..spec.errors import UnsupportedError
from ..spec.problem import CACHE, CACHE_FEW, Problem
from ..spec.scratch import ScratchRule
from ..spec.splits import INVARIANT_SPLIT_KEYS, cache_splits, row_groups, sharing_of
from . import dispatch, launch, ops, report, request
from .dispatch import Decision
from .request import ROW_BYTES, Options, alignment_faults

Numbers = tuple[float, ...]
Outputs = tuple[torch.Tensor, torch.Tensor | None]
_int32 = torch.int32


class Cache(NamedTuple):
    """What attention_kvcache takes beside q and Options."""

    k: torch.Tensor  # (cache rows, length, heads_kv, head_dim) or (pages, page_size, heads_kv, head_dim)
    v: torch.Tensor
    seqlens: torch.Tensor  # (batch,) int32
    page_table: torch.Tensor | None = None  # (batch, pages a row) int32
    batch_idx: torch.Tensor | None = None  # (batch,) int32
    k_new: torch.Tensor | None = None  # (batch, new keys, heads_kv, head_dim)
    v_new: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return 0 if self.page_table is None else self.k.shape[1]

    @property
    def appends(self) -> bool:
        return self.k_new is not None and self.k_new.shape[1] > 0

    @property
    def capacity(self) -> int:
        """Keys that a row may have."""
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])


def _check_table(name: str, tensor: Any, q: torch.Tensor, dims: int) -> None:
    shape = "(batch,)" if dims == 1 else "(batch, pages)"
    request.check_int32(name, tensor, shape)
    if tensor.dim() != dims or tensor.shape[0] != q.shape[0]:
        raise ValueError(f"{name} must be {shape} for a batch of {q.shape[0]}, got shape {tuple(tensor.shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"the last stride of {name} must be 1, got {tensor.stride(-1)}")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def fit(q: torch.Tensor, cache: Cache) -> bool:
    """Would check() pass them, and is there anything to attend to? In a third of its time, for a kind that is known."""
    k, v, seqlens, page_table, batch_idx, k_new, v_new = cache
    batch, _, _, head_dim = q.shape
    device = q.device
    for table in (seqlens, page_table, batch_idx):
        if table is not None and not (
            table.dtype is _int32
            and table.device == device
            and table.shape[0] == batch
            and table.stride(-1) == 1
            and type(table) is torch.Tensor
        ):
            return False
    if k_new is not None or v_new is not None:
        if k_new is None or v_new is None or k_new.shape[1] != v_new.shape[1]:
            return False
        if not (_new_fit(k_new, k, batch) and _new_fit(v_new, v, batch)):
            return False
    return (
        k.dtype is v.dtype is q.dtype
        and k.device == v.device == device
        and type(k) is type(v) is torch.Tensor
        and k.shape[:3] == v.shape[:3]
        and k.shape[3] == head_dim
        and seqlens.dim() == 1
        and (batch_idx is None or (batch_idx.dim() == 1 and page_table is None))
        and (k.shape[0] == batch or batch_idx is not None or page_table is not None)
        and (page_table is None or page_table.dim() == 2)
        and q.numel() > 0
        and k.numel() > 0
        and cache.capacity > 0
    )


def _new_fit(new: torch.Tensor, old: torch.Tensor, batch: int) -> bool:
    return (
        new.dim() == 4
        and new.shape[0] == batch
        and new.shape[2:] == old.shape[2:]
        and new.dtype is old.dtype
        and new.device == old.device
        and type(new) is torch.Tensor
        and 0 not in old.stride()
        and not new.is_neg()
        and not new.requires_grad
    )


def autocast(q: Any, cache: Cache) -> tuple[Any, Cache]:
    """q and the new keys as autocast casts what goes with a cache of another dtype; the caches stay what they are."""
    k_new, v_new = _to_go_with(cache.k_new, cache.k), _to_go_with(cache.v_new, cache.v)
    return _to_go_with(q, cache.k), cache._replace(k_new=k_new, v_new=v_new)


def _to_go_with(new: Any, cached: Any) -> Any:
    if not isinstance(new, torch.Tensor) or not isinstance(cached, torch.Tensor) or new.dtype == cached.dtype:
        return new
    return request.cast(new, torch.get_autocast_dtype(new.device.type)) if request.is_autocast(new.device) else new


def check(q: torch.Tensor, cache: Cache, values: bool = True) -> None:
    """A TypeError, ValueError or UnsupportedError that names the value and the rule; what is on the device is not read.

    Tensors without values (meta) are refused where `values` are needed.
    """
    k, v = cache.k, cache.v
    request.check_cache(q, k, v, values)
    _check_table("cache_seqlens", cache.seqlens, q, 1)
    if cache.page_table is not None:
        _check_table("page_table", cache.page_table, q, 2)
        if cache.batch_idx is not None:
            raise ValueError("page_table= and cache_batch_idx= exclude each other: a table names each row's pages")
    elif cache.batch_idx is not None:
        _check_table("cache_batch_idx", cache.batch_idx, q, 1)
    elif k.shape[0] != q.shape[0]:
        rows = f"k_cache has {k.shape[0]} rows for a batch of {q.shape[0]}"
        raise ValueError(f"{rows}: cache_batch_idx= says which are meant, page_table= if it is paged")
    if request.needs_grad(q, k, v):
        raise UnsupportedError("attention_kvcache has no gradients: call it under torch.no_grad() or inference_mode()")
    if cache.k_new is not None or cache.v_new is not None:
        _check_new(q, cache)


def _check_new(q: torch.Tensor, cache: Cache) -> None:
    k_new, v_new = cache.k_new, cache.v_new
    if k_new is None or v_new is None:
        raise ValueError("k_new= and v_new= are given together or not at all")
    if q.numel() == 0 and q.shape[0]:
        raise ValueError(f"k_new= needs query rows to go with it, and q has shape {tuple(q.shape)}")
    for name, new, old in (("k_new", k_new, cache.k), ("v_new", v_new, cache.v)):
        if not isinstance(new, torch.Tensor) or request.has_no_memory(new):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(new).__name__}")
        request.refuse_layout(name, new)
        if new.dim() != 4 or new.shape[0] != q.shape[0] or new.shape[2:] != old.shape[2:]:
            expected = f"({q.shape[0]}, new keys, {old.shape[2]}, {old.shape[3]})"
            raise ValueError(f"{name} must be {expected}, got shape {tuple(new.shape)}")
        if new.dtype != old.dtype or new.device != old.device:
            raise TypeError(f"{name} must be {old.dtype} on {old.device} as its cache, got {new.dtype} on {new.device}")
        if any(size > 1 and stride == 0 for size, stride in zip(old.shape, old.stride(), strict=True)):
            layout = f"of shape {tuple(old.shape)} and strides {old.stride()}"
            raise ValueError(
                f"{name} cannot be written into an expanded cache: {layout}, keys of it share their memory"
            )
        if new.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                "attention_kvcache has no gradients: call it under torch.no_grad() or inference_mode()"
            )
    if k_new.shape[1] != v_new.shape[1]:
        raise ValueError(f"k_new and v_new must have as many keys, got {k_new.shape[1]} and {v_new.shape[1]}")


def check_splits(num_splits: Any, batch_invariant: Any) -> bool:
    """-> batch_invariant, as a bool."""
    invariant = request.flag("batch_invariant", batch_invariant)
    if num_splits is None or isinstance(num_splits, torch.SymInt):
        return invariant
    if not isinstance(num_splits, numbers.Integral) or isinstance(num_splits, bool):
        raise TypeError(f"num_splits must be an integer or None, got {type(num_splits).__name__}")
    if num_splits < 1:
        raise ValueError(f"num_splits={num_splits}: at least 1, and None leaves the choice here")
    if invariant:
        raise ValueError("num_splits= and batch_invariant=True exclude each other: shares have a fixed length there")
    return invariant


def _faults(name: str, cache: torch.Tensor) -> tuple[str, ...]:
    """Alignment faults of a cache, which is never copied."""
    return tuple(fault.replace(": copied, ", ": ", 1) for fault in alignment_faults(name, cache, ROW_BYTES))


def describe(q: torch.Tensor, cache: Cache, options: Options, device: Device | None = None) -> Problem:
    problem = request.describe(q, cache.k, cache.v, options, device)
    rows = q.shape[1] * problem.group
    few_rows = next((few for few in CACHE_FEW if rows <= few), 0)
    return replace(
        problem,
        form=CACHE,
        page_size=cache.page_size,
        chosen=cache.batch_idx is not None,
        appends=cache.appends,
        few_rows=few_rows,
        unaligned=tuple(
            fault for name, x in (("k_cache", cache.k), ("v_cache", cache.v)) for fault in _faults(name, x)
        ),
        short=False,
        small=False,
        deterministic=False,
    )


def without_right(options: Options, seqlen_q: int) -> Options:
    """A single query row stands at the end: no key is to the right of it."""
    if seqlen_q != 1:
        return options
    left = options.window[0] if options.window else None
    return replace(options, causal=False, window=None if left is None else (left, None))


def decide(q: torch.Tensor, cache: Cache, options: Options, device: Device | None) -> Decision:
    """For `explain`."""
    options = without_right(options, q.shape[1])
    decision = dispatch.choose(describe(q, cache, options, device), options.backend)
    return replace(decision, copies=request.scale_copy(options.scale))


class CacheCall:
    """One kind of call, ready."""

    __slots__ = (
        "_aligns", "_allocate", "_heads_kv", "_kernel", "_nothing", "_options", "_rows", "_scratch", "_sharing",
        "_spreads", "_tile_m", "_tile_n", "anywhere", "scale",
    )  # fmt: skip

    def __init__(self, problem: Problem, q: torch.Tensor, options: Options) -> None:
        decision, self._kernel = launch.ready(problem, options.backend, q.device)
        # is it what runs however a cache of the kind lies?
        self.anywhere = (
            not problem.unaligned or decision.plan == dispatch.choose(_aligned(problem), options.backend).plan
        )
        site = launch.site_of(q.device, q.dtype, decision)
        self._allocate = launch.outputs_of(site, problem.head_dim_v, options.return_lse)
        self._heads_kv, self._rows = problem.heads_kv, problem.group
        tile = decision.plan.tile
        assert tile is not None  # every backend with caches has tiles
        self._tile_m, self._tile_n, self._options = tile.tile_m, tile.tile_n, options
        self._sharing = sharing_of(decision.plan, problem.device.sm_count)
        self._spreads = decision.backend.spreads and not problem.mask.left
        self._aligns = decision.backend.row_alignment > 0
        scratch = decision.backend.scratch(decision.plan)
        self._scratch = scratch if isinstance(scratch, ScratchRule) else None
        self._nothing = q.new_empty(0, dtype=torch.float32)
        self.scale = request.default_scale(problem.head_dim)

    def __call__(
        self, q: torch.Tensor, cache: Cache, numbers: Numbers, num_splits: int | None, batch_invariant: bool
    ) -> Outputs:
        batch, seqlen_q = q.shape[0], q.shape[1]
        capacity, split_keys = cache.capacity, 0
        if batch_invariant:
            # Two at least: merging rounds, and a row must not tell whether its cache has room for another share.
            split_keys, splits = INVARIANT_SPLIT_KEYS, max(2, -(-capacity // INVARIANT_SPLIT_KEYS))
        elif num_splits is None:
            splits, split_keys = self._shares(batch, seqlen_q, capacity)
        else:  # shares are whole key tiles: more of them than there may be tiles would be empty, and want memory
            splits = max(1, min(num_splits, -(-capacity // self._tile_n)))
        out, lse = outputs = self._allocate(q, batch, seqlen_q)
        k, v, *tables = cache
        appends = cache.appends
        if not appends:
            tables[-2:] = None, None  # none of new keys is None
        operands = (q, k, v, out, lse, *tables, splits, split_keys, *numbers)
        if self._scratch is not None:
            memory = self._nothing
            if splits > 1:
                elements = splits * self._scratch.elements(batch if split_keys >= 0 else 1, q.shape[2], seqlen_q)
                memory = memory.new_empty(elements)
            operands += (memory,)
        try:
            self._kernel(*operands)
        except ValueError as objection:
            mended, call = self._mended(objection, q, cache)
            return call(*mended, numbers, num_splits, batch_invariant)
        if appends:
            written = [x for x in (k, v) if not x.is_inference()]
            torch.autograd.graph.increment_version(written)  # whoever saved a cache for its backward is told
        return outputs

    def _shares(self, batch: int, seqlen_q: int, capacity: int) -> tuple[int, int]:
        """(splits, split_keys) where nobody says."""
        tiles, (programs, keys) = self._heads_kv * -(-seqlen_q * self._rows // self._tile_m), self._sharing
        groups = row_groups(batch, tiles, capacity, programs) if self._spreads else 1
        return (2 * groups, -groups) if groups > 1 else (cache_splits(batch * tiles, capacity, programs, keys), 0)

    def _mended(
        self, objection: ValueError, q: torch.Tensor, cache: Cache
    ) -> tuple[tuple[torch.Tensor, Cache], "CacheCall"]:
        """The kernel's own checks objected, and nothing was launched: small operands are copied, a cache that does not
        lie as the kernel wants goes to a backend that takes it. If nothing is misaligned, the checks are right."""
        named = (("q", q), ("k_new", cache.k_new), ("v_new", cache.v_new))
        small = {name: x for name, x in named if x is not None}
        faults = {name: alignment_faults(name, x, ROW_BYTES) for name, x in small.items()}
        copied = {n: x.clone(memory_format=torch.contiguous_format) for n, x in small.items() if faults[n]}
        unaligned = describe(q, cache, self._options).unaligned
        if not self._aligns or not (unaligned or copied):
            raise objection
        for sentence in (*(fault for found in faults.values() for fault in found), *unaligned):
            report.say("dispatch", sentence)
        q = copied.pop("q", q)
        return (q, cache._replace(**copied)), call_of(q, cache, self._options) if unaligned else self


_elsewhere: dict[tuple[Any, ...], CacheCall] = {}  # of caches that do not lie as a backend wants that would run else


def _aligned(problem: Problem) -> Problem:
    return replace(problem, unaligned=())


def call_of(q: torch.Tensor, cache: Cache, options: Options) -> CacheCall:
    """The call of this kind, or, if it is not for `anywhere`, of those of the kind that lie as badly: the next one that
    a warm key finds may lie well."""
    problem = describe(q, cache, options)
    if not problem.unaligned:
        return CacheCall(problem, q, options)
    key = (_aligned(problem), options.backend, settings.generation)
    return _elsewhere.get(key) or ops.remember(_elsewhere, key, CacheCall(problem, q, options))
