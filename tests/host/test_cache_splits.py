"""How many programs share a cache's keys: the host's rules, and what kernels are told."""

import pytest

import cute_flash
from cute_flash import attention_kvcache
from cute_flash.spec import splits
from cute_flash.spec.splits import CACHE_SPLIT_KEYS, INVARIANT_SPLIT_KEYS, cache_splits, row_groups, sharing_of
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


def test_into_how_many_runs_a_batch_is_cut():
    assert row_groups(16, 8, 8192, 132) == 16
    assert row_groups(256, 1, 2048, 132) == 132 and row_groups(256, 1, 2047, 132) == 1
    assert row_groups(4, 8, 16384, 132) == 16 and row_groups(4, 8, 16383, 132) == 1  # a small cache
    assert row_groups(1, 8, 8192, 132) == 1  # nothing to be uneven with
    assert row_groups(512, 8, 8192, 132) == 16 and row_groups(513, 8, 8192, 132) == 1
    assert row_groups(2, 66, 8192, 132) == 2 and row_groups(2, 67, 8192, 132) == 1
    assert row_groups(2, 1000, 8192, 132) == 1
    assert row_groups(512, 8, 1 << 27, 132) == 16 and row_groups(512, 8, (1 << 27) + 1, 132) == 1


@pytest.mark.parametrize(
    ("able", "options", "batch", "expected"),
    [
        (True, {}, 2, (16, -8)),
        (True, {}, 1, (8, 0)),
        (True, {"num_splits": 3}, 2, (3, 0)),
        (True, {"batch_invariant": True}, 2, (16, 512)),
        (True, {"window": (5, 0)}, 2, (4, 0)),
        (False, {}, 2, (4, 0)),
    ],
)
def test_who_cuts_batches_into_runs(monkeypatch, simulated, able, options, batch, expected):
    told = []
    simulated((9, 0), sm_count=8)
    monkeypatch.setattr(splits, "GROUPED_LEAST", 2 * 2 * 8192)
    inputs = make_inputs(CacheCase((5,) * batch, capacity=8192, heads_q=2, heads_kv=2, dtype="float32"))
    from cute_flash.arch.reference.backend import BACKEND

    monkeypatch.setattr(BACKEND, "spreads", able)
    monkeypatch.setattr(BACKEND, "build", lambda plan: lambda *operands: told.append(operands[10:12]))
    attention_kvcache(*inputs.qkv, **inputs.tables, backend="reference", **options)
    assert told == [expected]
