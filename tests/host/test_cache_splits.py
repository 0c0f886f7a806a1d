"""How many programs share a cache's keys: the host's rules, and what kernels are told."""

import pytest

import cute_flash
from cute_flash import attention_kvcache
from cute_flash.spec.splits import CACHE_SPLIT_KEYS, INVARIANT_SPLIT_KEYS, cache_splits, sharing_of, spread_splits
from tests.cached import CacheCase, make_inputs

pytestmark = [pytest.mark.usefixtures("office"), pytest.mark.usefixtures("poisoned_empty")]


def test_split_counts():
    """As many programs as fill the GPU, none with fewer keys than worth it, from sizes on the host alone."""
    assert cache_splits(8, 128 * CACHE_SPLIT_KEYS, 264) == 33
    assert cache_splits(8, 4 * CACHE_SPLIT_KEYS, 264) == 4
    assert cache_splits(8, 1024, 132, 128) == 8
    assert cache_splits(1000, 1 << 20, 264) == 1
    assert cache_splits(8, 1, 264) == 1
    assert cache_splits(8, 1 << 20, 0) == 1
    inputs = make_inputs(CacheCase((5, 7), dtype="bfloat16"))
    plans = {
        name: cute_flash.explain(*inputs.qkv, **inputs.tables, arch="9.0", backend=name).plan
        for name in ("sm90", "triton")
    }
    assert sharing_of(plans["sm90"], 132) == (132, 128)
    assert sharing_of(plans["triton"], 132) == (264, CACHE_SPLIT_KEYS)


@pytest.mark.parametrize(
    ("options", "capacity", "expected"),
    [
        ({}, 3000, (8, 0)),
        ({"num_splits": 3}, 3000, (3, 0)),
        ({"num_splits": 10**20}, 3000, (12, 0)),  # as many as there are tiles of 256 keys: others would be empty
        ({"batch_invariant": True}, 3000, (-(-3000 // INVARIANT_SPLIT_KEYS), 512)),
        ({"batch_invariant": True}, 100, (2, 512)),  # as a longer cache's, whose shares are merged
    ],
)
def test_what_a_kernel_is_told_of_splits(monkeypatch, simulated, options, capacity, expected):
    told = []
    simulated((9, 0), sm_count=8)
    inputs = make_inputs(CacheCase((5,), capacity=capacity, heads_q=2, heads_kv=2, dtype="float32"))
    from cute_flash.arch.reference.backend import BACKEND

    monkeypatch.setattr(BACKEND, "build", lambda plan: lambda *operands: told.append(operands[10:12]))
    attention_kvcache(*inputs.qkv, **inputs.tables, backend="reference", **options)
    assert told == [expected]


def test_split_counts_of_batches_that_may_be_uneven():
    assert spread_splits(16, 8, 8192, 132) == 8
    assert spread_splits(64, 8, 8192, 132) == 4  # 2112 programs in all
    assert spread_splits(64, 8, 3000, 132) == 2  # of 1024 keys or more
    assert spread_splits(16, 8, 2047, 132) == 1
    assert spread_splits(1, 8, 8192, 132) == 1  # nothing to be uneven with
    assert spread_splits(512, 1, 8192, 132) == 4 and spread_splits(513, 1, 8192, 132) == 1
    assert spread_splits(2, 256, 8192, 132) == 4 and spread_splits(2, 257, 8192, 132) == 1
    assert spread_splits(512, 256, 8192, 132) == 1


@pytest.mark.parametrize(
    ("able", "options", "batch", "expected"),
    [
        (True, {}, 2, (8, -16)),
        (True, {}, 1, (8, 0)),
        (True, {"num_splits": 3}, 2, (3, 0)),
        (True, {"batch_invariant": True}, 2, (16, 512)),
        (True, {"window": (5, 0)}, 2, (4, 0)),
        (False, {}, 2, (4, 0)),
    ],
)
def test_who_shares_out_uneven_batches(monkeypatch, simulated, able, options, batch, expected):
    told = []
    simulated((9, 0), sm_count=8)
    inputs = make_inputs(CacheCase((5,) * batch, capacity=8192, heads_q=2, heads_kv=2, dtype="float32"))
    from cute_flash.arch.reference.backend import BACKEND

    monkeypatch.setattr(BACKEND, "spreads", able)
    monkeypatch.setattr(BACKEND, "build", lambda plan: lambda *operands: told.append(operands[10:12]))
    attention_kvcache(*inputs.qkv, **inputs.tables, backend="reference", **options)
    assert told == [expected]
