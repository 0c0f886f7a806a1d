"""What torch.utils.flop_counter.FlopCounterMode counts for the operators: as it counts SDPA, so that both compare.

Two matrix products forward and five backward, of every query row with every key: torch leaves masks out of the count.
Of packed sequences and caches the lengths count where they can be read, which waits for the GPU.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import substitution

MODULE = "torch.utils.flop_counter"

Pairs = Callable[..., int]  # (q, k, what an operator takes between v and its options) -> pairs of query row and key


class Pass(NamedTuple):
    """Operations of a pair are of_head_dim * head_dim + of_head_dim_v * head_dim_v, a head."""

    of_head_dim: int
    of_head_dim_v: int
    before: int  # arguments before q
    after_v: int  # arguments between v and what Pairs takes


FORWARD, BACKWARD = Pass(2, 2, 0, 0), Pass(6, 4, 2, 2)  # backward: (dout, dlse, q, k, v, out, lse, ...)


def _values(lengths: torch.Tensor) -> list[int] | None:
    if isinstance(lengths, FakeTensor) or lengths.device.type == "meta":
        return None
    values: list[int] = lengths.tolist()
    return values


def dense(q: torch.Tensor, k: torch.Tensor, *_: Any) -> int:
    return q.shape[0] * q.shape[1] * k.shape[1]


def packed(q: torch.Tensor, k: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, *_: Any) -> int:
    found_q, found_k = _values(starts_q), _values(starts_k)
    if found_q is None or found_k is None:
        return q.shape[0] * k.shape[0]  # at most: all in one sequence
    rows, keys = ([stop - start for start, stop in itertools.pairwise(of)] for of in (found_q, found_k))
    return sum(m * n for m, n in zip(rows, keys, strict=True))


def cached(q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor | None, *rest: Any) -> int:
    """rest: the index of the caches' rows, and k_new where there is one."""
    capacity = k.shape[1] * (1 if table is None else table.shape[1])
    found = _values(lengths) or [capacity] * q.shape[0]
    new = rest[1].shape[1] if len(rest) > 1 and isinstance(rest[1], torch.Tensor) else 0
    return q.shape[1] * sum(min(length + new, capacity) for length in found)


def _formula(pairs: Pairs, of: Pass) -> Callable[..., int]:
    def count(*args: Any, **_: Any) -> int:
        q, k, v = args[of.before : of.before + 3]
        rest = args[of.before + 3 + of.after_v :]
        return pairs(q, k, *rest) * q.shape[-2] * (of.of_head_dim * q.shape[-1] + of.of_head_dim_v * v.shape[-1])

    return count


def register(name: str, pairs: Pairs, of: Pass) -> None:
    """Of torch.ops.cute_flash.NAME, once it is defined; said as soon as somebody imports the counter."""

    def say() -> None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(getattr(torch.ops.cute_flash, name), get_raw=True)(_formula(pairs, of))

    substitution.when_imported(MODULE, say)
