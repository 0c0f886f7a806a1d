"""Key-value caches on the GPU: every backend that has them against float64, beside plain attention's error."""

import pytest
import torch

import cute_flash
from cute_flash import attention_kvcache
from cute_flash.spec import settings
from tests import oracle
from tests.cached import CacheCase, cases, exact, make_inputs
from tests.device.gpu import DEVICE
from tests.host.test_serving_docs import LOOP
from tests.runner import ALLOWED_RATIO, HALF_ULP


def _serves(name: str) -> bool:
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    try:
        cute_flash.explain(q, q, q, cache_seqlens=torch.zeros(1, dtype=torch.int32, device=DEVICE), backend=name)
    except cute_flash.UnsupportedError:
        return False
    return True


BACKENDS = [name for name in ("sm100", "sm90", "triton", "reference") if _serves(name)]
FAST = [name for name in BACKENDS if name != "reference"]

GRID = [
    *cases(head_dim=128, head_dim_v=128, dtype="bfloat16", heads_q=8, heads_kv=2),
    *cases(head_dim=64, head_dim_v=64, dtype="float16", heads_q=7, heads_kv=1)[::4],
    *cases(head_dim=192, head_dim_v=128, dtype="bfloat16", heads_q=4, heads_kv=4)[1::5],
    # a key of a page is less than TMA's 128 bytes, or no multiple of it
    *(
        CacheCase((0, 1, 65, 130), 1, 4, 2, *dims, page_size=page, capacity=200, dtype="bfloat16")
        for *dims, page in ((8, 256, 1), (24, 16, 2), (96, 96, 1), (224, 40, 1))
    ),
    CacheCase((5000, 1, 0, 8191), 1, 32, 8, 128, 128, capacity=8192, dtype="bfloat16"),
    CacheCase((5000, 1, 0, 8191), 4, 32, 8, 128, 128, capacity=8192, page_size=64, causal=True, dtype="bfloat16"),
    CacheCase((300, 20), 130, 4, 2, 128, 128, capacity=512, causal=True, dtype="bfloat16"),  # a chunk of a prompt
]


def check(case: CacheCase, inputs, out, lse) -> None:
    right = exact(case, inputs)
    plain = exact(case, inputs, oracle.plain_16bit)
    limit = max(ALLOWED_RATIO * oracle.relative_error(plain.out, right.out), HALF_ULP[inputs.q.dtype])
    assert oracle.relative_error(out, right.out) <= limit
    assert oracle.lse_excess(lse, right.lse) <= 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", [{}, {"num_splits": 1}, {"num_splits": 7}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_against_float64(case, how, backend):
    inputs = make_inputs(case).to(DEVICE)
    options = {**case.options, **inputs.tables, **how, "backend": backend, "return_lse": True}
    check(case, inputs, *attention_kvcache(*inputs.qkv, **options))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("splits", [2, 3, 5, 8, 12, 13, 16, 17, 40])
@pytest.mark.parametrize("page_size", [0, 16])
def test_every_count_of_shares(page_size, splits, backend):
    """Uneven rows, of which some leave most shares without a key."""
    case = CacheCase((5000, 1, 0, 700), 1, 32, 8, 128, 128, capacity=5008, page_size=page_size, dtype="bfloat16")
    inputs = make_inputs(case).to(DEVICE)
    for _ in range(3):
        found = attention_kvcache(*inputs.qkv, **inputs.tables, num_splits=splits, backend=backend, return_lse=True)
        check(case, inputs, *found)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_graph_of_uneven_lengths_is_replayed_with_others(page_size, backend):
    """Rows whole, in two parts and in ten, and of few keys beside them: what a CTA has is found on the device."""
    even = CacheCase((8000,) * 40, 1, 32, 8, 128, 128, capacity=8192, page_size=page_size, dtype="bfloat16")
    inputs = make_inputs(even).to(DEVICE)
    lens = torch.zeros_like(inputs.cache_seqlens)
    uneven = [8000, 63, 0, 64, 1, 4000, 65, 2000] + [100] * 30 + [1000, 129]
    for rows in (4, 16, 40):
        q, table = inputs.q[:rows], inputs.page_table
        k, v = (inputs.k, inputs.v) if page_size else (inputs.k[:rows], inputs.v[:rows])
        tables = {"cache_seqlens": lens[:rows], "page_table": None if table is None else table[:rows]}
        attention_kvcache(q, k, v, **tables, return_lse=True, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attention_kvcache(q, k, v, **tables, return_lse=True, backend=backend)
        for given in ([8000] * 40, uneven, uneven[::-1], [1] * 39 + [8000], [0] * 40):
            lens.copy_(torch.tensor(given))
            for result in (out, lse):
                result.fill_(torch.nan)
            graph.replay()
            shared = attention_kvcache(q, k, v, **tables, return_lse=True, backend=backend, num_splits=3)
            for found, right in zip((out, lse), shared, strict=True):
                torch.testing.assert_close(found, right, rtol=2**-7, atol=1e-3)  # two neighbours in bfloat16


@pytest.mark.parametrize("backend", FAST)
def test_generation_loop_of_the_docs(backend):
    """Which asserts that its tokens are plain attention's; a backend that is named is used or refused."""
    names = {}
    with settings.override(backend=backend):
        exec(LOOP, names)
    assert names["generated"].is_cuda and names["k_pool"].dtype == torch.float16


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("page_size", [0, 64])
def test_a_row_depends_on_itself_alone(page_size, backend):
    """Bit for bit, whatever stands beside it and however long the cache is."""
    lens = (1, 511, 512, 513, 3000, 0, 2049)
    case = CacheCase(lens, 2, 8, 2, 128, 128, capacity=4096, page_size=page_size, dtype="bfloat16", causal=True)
    inputs = make_inputs(case).to(DEVICE)
    options = {"causal": True, "batch_invariant": True, "return_lse": True, "backend": backend}
    out, lse = attention_kvcache(*inputs.qkv, **inputs.tables, **options)
    for row in range(len(lens)):
        one = slice(row, row + 1)
        caches = inputs.k, inputs.v
        tables = {"cache_seqlens": inputs.cache_seqlens[one]}
        if page_size:
            tables["page_table"] = inputs.page_table[one, : 3072 // page_size]
        else:
            caches = tuple(x[one, :3072] for x in caches)
        alone = attention_kvcache(inputs.q[one], *caches, **tables, **options)
        assert torch.equal(alone[0], out[one]) and torch.equal(alone[1], lse[one])


@pytest.mark.parametrize("backend", FAST)
def test_a_row_does_not_depend_on_the_length_of_its_cache(backend):
    """Shares that hold no key are merged with those that do: a rounding that some of 300,000 elements would show."""
    lens = tuple(range(1, 65))
    case = CacheCase(lens, 1, 32, 8, 128, 128, capacity=3000, dtype="float16")
    inputs = make_inputs(case).to(DEVICE)
    options = {"batch_invariant": True, "return_lse": True, "backend": backend, **inputs.tables}
    whole = attention_kvcache(*inputs.qkv, **options)
    for capacity in (64, 512, 520, 1200):
        found = attention_kvcache(inputs.q, inputs.k[:, :capacity], inputs.v[:, :capacity], **options)
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True)), capacity


@pytest.mark.parametrize("backend", FAST)
def test_more_new_keys_than_32_bits_count_by_vectors(backend):
    """2^24 + 1 of 8 heads, 2^32 + 256 vectors of 16 bytes, all of them one key; there is room for 130."""
    inputs = make_inputs(CacheCase((0,), 1, 8, 8, 128, 128, capacity=130, dtype="bfloat16")).to(DEVICE)
    k_new, v_new = (torch.randn(1, 1, 8, 128, device=DEVICE).bfloat16() for _ in range(2))
    new = {"k_new": k_new.expand(1, (1 << 24) + 1, 8, 128), "v_new": v_new.expand(1, (1 << 24) + 1, 8, 128)}
    out = attention_kvcache(*inputs.qkv, **inputs.tables, **new, backend=backend)
    assert torch.equal(inputs.k, k_new.expand_as(inputs.k)) and torch.equal(inputs.v, v_new.expand_as(inputs.v))
    assert oracle.relative_error(out, v_new.expand_as(out)) <= 4 * HALF_ULP[torch.bfloat16]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_graph_is_replayed_with_other_lengths(page_size, backend):
    """The append and the lengths' own increment are in the graph: each replay is a step of decoding."""
    case = CacheCase((70, 0, 30), 1, 8, 2, 128, 128, capacity=128, page_size=page_size, dtype="bfloat16")
    full = CacheCase((128,) * 3, 1, 8, 2, 128, 128, capacity=128, page_size=page_size, dtype="bfloat16")
    inputs = make_inputs(full).to(DEVICE)
    lens = torch.tensor(case.lens, dtype=torch.int32, device=DEVICE)
    tables = {**inputs.tables, "cache_seqlens": lens}
    new = {
        name: torch.empty(3, 1, 2, 128, dtype=torch.bfloat16, device=DEVICE).normal_() for name in ("k_new", "v_new")
    }

    def step():
        out = attention_kvcache(*inputs.qkv, **tables, **new, backend=backend)
        lens.add_(1)
        return out

    step()  # warm
    lens.copy_(torch.tensor(case.lens))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lens.copy_(torch.tensor(case.lens))
    for done in range(1, 40):
        for tensor in new.values():
            tensor.normal_()
        graph.replay()
        for row, length in enumerate(case.lens):
            k, v = inputs.keys_of(row, length + done)
            assert torch.equal(k[0, -1], new["k_new"][row, 0]) and torch.equal(v[0, -1], new["v_new"][row, 0])
            right = oracle.forward(inputs.q[row, None], k, v)
            assert oracle.relative_error(out[row, None], right.out) <= 4 * HALF_ULP[torch.bfloat16]


@pytest.mark.parametrize("backend", FAST)
def test_two_caches_merge_into_one(backend):
    """A shared beginning and each row's own rest, of which one row has none, one no beginning, and one neither."""
    case = CacheCase((300, 64, 200, 0), 2, 8, 2, 128, 128, capacity=320, dtype="bfloat16")
    inputs = make_inputs(case).to(DEVICE)
    q, k, v = inputs.qkv
    firsts, states = torch.tensor([64, 64, 0, 0], dtype=torch.int32, device=DEVICE), []
    rests = inputs.cache_seqlens - firsts
    shift = firsts.long()[:, None] + torch.arange(k.shape[1], device=DEVICE)
    rows = torch.arange(len(case.lens), device=DEVICE)[:, None]
    moved = [x[rows, shift.clamp(max=k.shape[1] - 1)] for x in (k, v)]
    for keys, lens in (((k, v), firsts), (moved, rests)):
        states += attention_kvcache(q, *keys, cache_seqlens=lens, return_lse=True, backend=backend)
    check(case, inputs, *cute_flash.merge_attention_states(*states))


@pytest.mark.parametrize("backend", FAST)
def test_nothing_waits_for_the_device(backend):
    case = CacheCase((70, 0, 30), 1, 8, 2, 128, 128, capacity=128, page_size=16, dtype="bfloat16")
    inputs = make_inputs(case).to(DEVICE)
    new = {name: torch.zeros(3, 1, 2, 128, dtype=torch.bfloat16, device=DEVICE) for name in ("k_new", "v_new")}
    attention_kvcache(*inputs.qkv, **inputs.tables, **new, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_kvcache(*inputs.qkv, **inputs.tables, **new, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", FAST)
def test_wild_lengths_and_pages_do_not_fault(backend):
    case = CacheCase((70, 0, 30), 2, 8, 2, 128, 128, capacity=128, page_size=16, dtype="bfloat16", causal=True)
    inputs = make_inputs(case).to(DEVICE)
    for seed in range(8):
        torch.manual_seed(seed)
        lens = torch.randint(-300, 5000, (3,), device=DEVICE, dtype=torch.int32)
        table = torch.randint(-5000, 5000, (3, 8), device=DEVICE, dtype=torch.int32)
        attention_kvcache(*inputs.qkv, cache_seqlens=lens, page_table=table, causal=True, backend=backend)
        torch.cuda.synchronize()
