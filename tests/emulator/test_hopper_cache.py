"""Our Hopper kernels over key-value caches, emulated, against float64: lengths, pages, groups, splits, appends.

Every run: half of the cases, each under one schedule, rotating by day. scripts/test --all: each case under all of them.
"""

import contextlib
import math
from unittest import mock

import pytest
import torch

import cute_flash
from cute_flash import attention_kvcache
from cute_flash.arch.sm90.cached.tiles import SMEM_OF_TWO
from cute_flash.emulator import host
from cute_flash.runtime import compiler, launch
from cute_flash.spec import device as device_facts
from cute_flash.spec import settings, splits

from .. import oracle
from ..cached import CacheCase, exact, lens_of, make_inputs, same, taken_out
from ..runner import ALLOWED_RATIO, HALF_ULP
from .hopper import ARCH, Schedule, way_of_today

SEEDS = (Schedule("late", "random", 1), Schedule("random", "priority", 2), Schedule("late", "round_robin", 3))
LENS = (0, 1, 63, 64, 65, 200)


def case(lens, heads=(4, 2), dims=128, **fields) -> CacheCase:
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    fields.setdefault("capacity", max(*lens, 100))
    return CacheCase(lens, fields.pop("rows", 1), *heads, *dims, **{"dtype": "bfloat16", **fields})


ALONE, SHARED, INVARIANT = {"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True}
SLIDING = {"causal": True, "window": (70, None)}
# Neighbours share a kernel: a process compiles each once.
CASES = (
    (case(LENS), ALONE),
    (case(LENS, heads=(7, 1)), SHARED),
    (case((5, 700), heads=(1, 1)), INVARIANT),
    (case((300, 64), heads=(32, 1)), {}),
    (case((1, 0, 700), heads=(8, 1)), {"num_splits": 16}),
    (case((130, 1)), {"num_splits": 40}),  # more shares than tiles, and than a warp has lanes
    (case(LENS, rows=3, causal=True), ALONE),
    (case(LENS, rows=5, causal=True, heads=(8, 2)), SHARED),
    (case((3, 90), rows=16, causal=True, heads=(7, 1)), SHARED),  # 112 rows: two tiles; 13 tokens see no key
    (case((33, 0, 100), chosen=True), SHARED),
    (case((500, 40), dims=64, dtype="float16"), ALONE),  # eight tiles through a ring of seven
    *((case(lens_of(page), page_size=page, capacity=2 * page + 9), SHARED) for page in (16, 64, 128, 256, 1)),
    (case((65, 3000), page_size=16, heads=(2, 2)), ALONE),  # page numbers of more than a register
    (case(lens_of(64), rows=4, causal=True, page_size=64, capacity=131), INVARIANT),
    (case((0, 3, 50, 200, 300), rows=4, **SLIDING), SHARED),  # of 200 keys the last row sees all but one of a tile
    (case((3, 140, 300), rows=2, window=(40, 3), page_size=32, softcap=1.5), SHARED),
    (case((100, 7), dims=(192, 128)), SHARED),
    (case((130,), dims=(256, 256)), SHARED),
    (case((66, 9), dims=(96, 40)), ALONE),
    # rows of a page that are narrower than TMA's 128 bytes, two of them, and wider ones that are no multiple of it
    (case((66, 9), dims=(8, 104), page_size=1), SHARED),
    (case((66, 9), dims=(24, 16), page_size=2), ALONE),
    (case((66, 9), dims=(96, 96), page_size=1), ALONE),
)
APPENDS = (
    (case((5, 64, 100), rows=2, causal=True), 2),
    (case((5, 66, 100), page_size=16), 5),
    (case((3, 70), chosen=True), 3),
    (case((3, 70), heads=(5, 5), dims=(136, 40)), 2),  # 110 vectors a key: some threads have none
    (case((3, 70), heads=(6, 3), dims=256), 2),  # 192: a CTA and a half
)


@contextlib.contextmanager
def emulated(seed: Schedule, sms: int = 132):
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(device_facts._SM_COUNTS, {device_facts.ARCHES[ARCH]: sms}))
        stack.enter_context(settings.override(cache_dir=None, backend=None, strict=False))
        yield stack.enter_context(cute_flash.emulate(ARCH, **seed.knobs))


def attend(inputs, seed: Schedule, **options):
    """-> ((out, lse), launches)"""
    with emulated(seed) as emulation:
        result = attention_kvcache(*inputs.qkv, **options, return_lse=True, backend="sm90")
        return result, list(emulation.launches)


def check(case: CacheCase, inputs, out, lse) -> None:
    right, plain = exact(case, inputs), exact(case, inputs, oracle.plain_16bit)
    limit = max(ALLOWED_RATIO * oracle.relative_error(plain.out, right.out), HALF_ULP[inputs.q.dtype])
    assert oracle.relative_error(out, right.out) <= limit
    assert oracle.lse_excess(lse, right.lse) <= 1


def runs(cases):
    """Every case under every seed; those whose turn it is not are slow."""
    for index, each in enumerate(cases):
        for number, seed in enumerate(SEEDS):
            due = way_of_today(index, 2, len(SEEDS)) == number
            name = f"{each[0]}-{each[1]}-{seed}"
            yield pytest.param(*each, seed, id=name, marks=[] if due else [pytest.mark.slow])


@pytest.mark.parametrize(("case", "how", "seed"), runs(CASES))
def test_right_under_every_seed(case, how, seed, poisoned_empty):
    inputs = make_inputs(case)
    result, launches = attend(inputs, seed, **case.options, **inputs.tables, **how)
    check(case, inputs, *result)
    if "num_splits" in how:
        shares = min(how["num_splits"], -(-case.capacity // 64))  # none without a key tile
        assert len(launches) == (2 if shares > 1 else 1)


@pytest.mark.parametrize(("case", "new", "seed"), runs(APPENDS))
def test_new_keys_are_written_and_seen(case, new, seed, poisoned_empty):
    whole, part = make_inputs(case), make_inputs(case)
    (k_new, v_new), before = taken_out(part, new)
    tables = {**part.tables, "cache_seqlens": before}
    result, _ = attend(part, seed, **case.options, **tables, k_new=k_new, v_new=v_new, num_splits=2)
    assert same(part.k, whole.k) and same(part.v, whole.v)
    check(case, whole, *result)


# (case, multiprocessors): rows whole and shared, of more groups than rows and fewer, some with nothing to do
BATCHES = (
    (case((1100, 70, 0, 500, 1), capacity=4096), 4),
    (case((300, 300, 300), capacity=4096), 24),
    (case((64, 64, 64, 64, 65, 65), heads=(2, 2), capacity=4096), 4),
    (case((0, 0, 0), heads=(8, 1), capacity=4096), 132),
    (case((1, *(64,) * 38, 900), heads=(1, 1), capacity=4096), 16),  # more rows than lanes, a row in eight groups
    (case((130, 1000, 3), rows=3, causal=True, heads=(8, 1), capacity=4096, page_size=64), 4),
    (case((700, 65, 320), heads=(4, 1), capacity=4096, page_size=16), 4),
    (case((40, 640, 20), rows=40, causal=True, heads=(2, 1), capacity=4096, chosen=True), 4),  # two query tiles
    (case((500, 3, 70), rows=2, causal=True, window=(None, 3), softcap=1.5, capacity=4096), 8),
)


def parts_as_documented(each: CacheCase, groups: int) -> list[tuple[int, int]]:
    """(slot, row of the batch) of what the scratch must hold: in groups, each with an equal run of all key tiles."""
    tiles = [max(1, -(-length // 64)) for length in each.lens]
    run, starts = -(-sum(tiles) // groups), [sum(tiles[:row]) for row in range(len(tiles))]
    found = []
    for row, (start, count) in enumerate(zip(starts, tiles, strict=True)):
        first, last = start // run, (start + count - 1) // run
        if first < last:
            found += [(2 * group + (group == first), row) for group in range(first, last + 1)]
    return sorted(found)


@pytest.mark.parametrize(("each", "sms", "seed"), runs(BATCHES))
def test_a_batch_is_cut_into_equal_runs(monkeypatch, each, sms, seed, poisoned_empty):
    """Whatever a row's length, a group has as many key tiles as another, and nothing else of the scratch is written."""
    monkeypatch.setattr(splits, "GROUPED_LEAST", 1)
    ready, given = launch.ready, []

    def watched(*asked):
        decision, kernel = ready(*asked)

        def run(*operands):
            given.append((*operands[10:12], operands[-1].fill_(math.nan)))
            kernel(*operands)

        return decision, run

    inputs = make_inputs(each)
    with emulated(seed, sms) as emulation, mock.patch.object(launch, "ready", watched):
        result = attention_kvcache(*inputs.qkv, **inputs.tables, **each.options, return_lse=True, backend="sm90")
    check(each, inputs, *result)
    tiles = each.heads_kv * -(-each.seqlen_q * each.heads_q // each.heads_kv // 64)
    (slots, split_keys, memory), groups = given[0], sms // tiles
    assert (slots, split_keys) == (2 * groups, -groups)
    assert emulation.launches[0]["grid"] == (groups * tiles, 1, 1)
    assert emulation.launches[0]["shared"] > SMEM_OF_TWO
    written = ~memory[-2 * slots * each.seqlen_q * each.heads_q :].view(slots, -1).isnan()
    assert (written == written[:, :1]).all()
    assert written[:, 0].nonzero().flatten().tolist() == [slot for slot, _ in parts_as_documented(each, groups)]


def test_appended_keys_are_part_of_the_runs(monkeypatch, poisoned_empty):
    monkeypatch.setattr(splits, "GROUPED_LEAST", 1)
    each = case((900, 66, 3), rows=2, causal=True, page_size=16, capacity=4096)
    whole, part = make_inputs(each), make_inputs(each)
    (k_new, v_new), before = taken_out(part, 3)
    with emulated(SEEDS[0], sms=4) as emulation:
        result = attention_kvcache(
            *part.qkv, **{**part.tables, "cache_seqlens": before}, k_new=k_new, v_new=v_new, causal=True,
            return_lse=True, backend="sm90",
        )  # fmt: skip
        assert len(emulation.launches) == 3
    assert same(part.k, whole.k) and same(part.v, whole.v)
    check(each, whole, *result)


def test_as_many_ctas_as_very_many_new_keys_need(monkeypatch):
    """2^24 + 1 keys of 8 heads are 2^32 + 256 vectors of 16 bytes. Launches are recorded, not run."""
    monkeypatch.setattr(host.Launch, "run", lambda launch: None)
    inputs, new = make_inputs(case((0,), heads=(8, 8))), (1 << 24) + 1
    k_new, v_new = (torch.ones(1, 1, 8, 128, dtype=torch.bfloat16).expand(1, new, 8, 128) for _ in range(2))
    with emulated(SEEDS[0]) as emulation:
        attention_kvcache(*inputs.qkv, **inputs.tables, k_new=k_new, v_new=v_new, backend="sm90")
    assert emulation.launches[0]["grid"] == (2 * new, 1, 1) and emulation.launches[0]["block"] == (128, 1, 1)


def test_what_there_is_no_room_for_is_dropped():
    """70 keys fit: of three new ones after 69 the first is written."""
    inputs = make_inputs(case((69, 70), heads=(2, 2), capacity=70))
    k, v = inputs.k.clone(), inputs.v.clone()
    k_new, v_new = (torch.randn(2, 3, 2, 128).bfloat16() for _ in range(2))
    attend(inputs, SEEDS[0], **inputs.tables, k_new=k_new, v_new=v_new)
    k[0, 69], v[0, 69] = k_new[0, 0], v_new[0, 0]
    assert torch.equal(inputs.k, k) and torch.equal(inputs.v, v)


def test_a_row_depends_on_itself_alone(poisoned_empty):
    """Bit for bit, whatever stands beside it and however long the cache is."""
    each = case((600, 3, 1100), page_size=64, capacity=1280)
    inputs = make_inputs(each)
    (out, lse), _ = attend(inputs, SEEDS[0], **inputs.tables, batch_invariant=True)
    tables = {"cache_seqlens": inputs.cache_seqlens[:1], "page_table": inputs.page_table[:1, :10].contiguous()}
    with emulated(SEEDS[1]):
        alone = attention_kvcache(
            inputs.q[:1], inputs.k, inputs.v, **tables, batch_invariant=True, return_lse=True, backend="sm90"
        )
    assert torch.equal(alone[0], out[:1]) and torch.equal(alone[1], lse[:1])


def test_wild_lengths_and_pages_touch_nothing_outside():
    each = case((70, 0, 30), rows=2, page_size=16, capacity=128, causal=True)
    inputs = make_inputs(each)
    for lens, pages in (((-300, 5000, 2**31 - 1), 5000), ((200, -(2**31), 77), -5000)):
        wild = {"cache_seqlens": torch.tensor(lens, dtype=torch.int32), "page_table": inputs.page_table + pages}
        attend(inputs, SEEDS[0], **wild, causal=True)


def test_other_sizes_splits_and_lengths_are_the_same_kernel():
    inputs = make_inputs(case((70, 30)))
    attend(inputs, SEEDS[0], **inputs.tables)
    before = compiler.stats.compiles
    more = make_inputs(case((170, 300, 2), heads=(6, 3)))
    attend(more, SEEDS[0], **more.tables, num_splits=4)
    assert compiler.stats.compiles == before


def test_a_misaligned_query_is_copied_and_a_misaligned_cache_refused():
    inputs = make_inputs(case((70, 30)))
    (out, _), _ = attend(inputs, SEEDS[0], **inputs.tables)
    shifted = torch.empty(inputs.q.numel() + 1, dtype=inputs.q.dtype)[1:].view(inputs.q.shape).copy_(inputs.q)
    with emulated(SEEDS[0]):
        assert torch.equal(attention_kvcache(shifted, inputs.k, inputs.v, **inputs.tables, backend="sm90"), out)
        k = torch.empty(inputs.k.numel() + 1, dtype=inputs.k.dtype)[1:].view(inputs.k.shape).copy_(inputs.k)
        with pytest.raises(cute_flash.UnsupportedError, match="k_cache: it starts 2 bytes past a multiple of 16"):
            attention_kvcache(inputs.q, k, inputs.v, **inputs.tables, backend="sm90")
