"""attention_kvcache on CPU tensors: numbers against float64, the append, refusals, the warm path, graphs."""

import math

import pytest
import torch

import cute_flash
from cute_flash import UnsupportedError, attention_kvcache, kvcache
from cute_flash.runtime import caches, request
from tests import oracle
from tests.cached import CacheCase, cases, exact, make_inputs

pytestmark = [pytest.mark.usefixtures("office"), pytest.mark.usefixtures("poisoned_empty")]


def check(case: CacheCase, inputs, result) -> None:
    out, lse = result
    right = exact(case, inputs)
    assert out.dtype == inputs.q.dtype and out.is_contiguous()
    assert oracle.relative_error(out, right.out) <= (1e-12 if case.dtype == "float64" else 1e-5)
    assert oracle.lse_excess(lse, right.lse) <= 1


@pytest.mark.parametrize("case", cases(), ids=str)
def test_numbers(case):
    inputs = make_inputs(case)
    check(case, inputs, attention_kvcache(*inputs.qkv, **inputs.tables, **case.options, return_lse=True))


def test_a_backward_that_saved_the_cache_is_told_of_an_append():
    q, new = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16)
    k, v = (torch.randn(1, 8, 2, 16) for _ in range(2))
    weight = torch.randn(1, 8, 2, 16, requires_grad=True)
    before = (weight * k).sum()
    attention_kvcache(q, k, v, cache_seqlens=torch.tensor([3], dtype=torch.int32), k_new=new, v_new=new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


@pytest.mark.parametrize("head_dims", [(24, 40), (128, 64)])
def test_float32_and_other_widths(head_dims):
    case = CacheCase((3, 40), 2, 6, 2, *head_dims, dtype="float32", page_size=16)
    inputs = make_inputs(case)
    result = attention_kvcache(*inputs.qkv, **inputs.tables, return_lse=True)
    check(case, inputs, result)
    assert torch.equal(attention_kvcache(*inputs.qkv, **inputs.tables), result[0])


@pytest.mark.parametrize("scale", [-0.3, 0, 0.7])
def test_scales(scale):
    case = CacheCase((30, 5))
    inputs = make_inputs(case)
    out = attention_kvcache(*inputs.qkv, **inputs.tables, scale=scale)
    for row, length in enumerate(case.lens):
        right = oracle.forward(inputs.q[row, None], *inputs.keys_of(row, length), scale=float(scale))
        assert oracle.relative_error(out[row, None], right.out) <= 1e-12


def test_strided_caches():
    """Heads before positions, and K and V side by side in one tensor."""
    case = CacheCase((30, 5), 2)
    inputs = make_inputs(case)
    side_by_side = torch.stack([inputs.k, inputs.v], dim=2).transpose(1, 3).contiguous().transpose(1, 3)
    out = attention_kvcache(inputs.q, *side_by_side.unbind(2), **inputs.tables)
    assert torch.equal(out, attention_kvcache(*inputs.qkv, **inputs.tables))


def test_a_row_depends_on_itself_alone():
    case = CacheCase((30, 5, 77), 2, page_size=16)
    inputs = make_inputs(case)
    together = attention_kvcache(*inputs.qkv, **inputs.tables, batch_invariant=True)
    for row in range(3):
        one = slice(row, row + 1)
        tables = {"cache_seqlens": inputs.cache_seqlens[one], "page_table": inputs.page_table[one, :5].contiguous()}
        alone = attention_kvcache(inputs.q[one], inputs.k, inputs.v, **tables, batch_invariant=True)
        assert torch.equal(alone, together[one])


# ---------------------------------------------------------------------------------------------------------- append


@pytest.mark.parametrize("new", [0, 1, 3, 20])
@pytest.mark.parametrize("fields", [{}, {"chosen": True}, {"page_size": 16}, {"page_size": 1}], ids=str)
def test_append(fields, new):
    """The caches hold what the rows had and then the new keys; nothing else changed."""
    case = CacheCase((0, 5, 31, 100), 2, causal=True, capacity=128, **fields)
    full = CacheCase(tuple(n + new for n in case.lens), 2, causal=True, capacity=128, **fields)
    whole = make_inputs(full)
    part = make_inputs(full)
    seqlens = torch.tensor(case.lens, dtype=torch.int32)
    k_new, v_new = (torch.empty(4, new, 2, 16, dtype=torch.float64) for _ in range(2))
    for row, length in enumerate(case.lens):
        k, v = whole.keys_of(row, length + new)
        k_new[row], v_new[row] = k[0, length:], v[0, length:]
        _erase(part, row, length, length + new)
    tables = {**part.tables, "cache_seqlens": seqlens}
    result = attention_kvcache(*part.qkv, **tables, k_new=k_new, v_new=v_new, causal=True, return_lse=True)
    assert torch.equal(part.k.nan_to_num(nan=9.0), whole.k.nan_to_num(nan=9.0))
    assert torch.equal(part.v.nan_to_num(nan=9.0), whole.v.nan_to_num(nan=9.0))
    assert torch.equal(seqlens, torch.tensor(case.lens, dtype=torch.int32))  # the caller's
    check(full, whole, result)


def _erase(inputs, row: int, first: int, last: int) -> None:
    for position in range(first, last):
        place = inputs.place_of(row, position)
        inputs.k[place], inputs.v[place] = math.nan, math.nan


@pytest.mark.parametrize("length", [5, 8, 9, 10])
def test_what_there_is_no_room_for_is_dropped(length):
    """Ten keys fit: the first new ones are written, and no key that was there changes."""
    torch.manual_seed(0)
    k, v = (torch.randn(1, 10, 1, 16, dtype=torch.float64) for _ in range(2))
    new = [torch.randn(1, 3, 1, 16, dtype=torch.float64) for _ in range(2)]
    expected = [torch.cat([x[:, :length], n], dim=1)[:, :10] for x, n in zip((k, v), new, strict=True)]
    q = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    seqlens = torch.tensor([length], dtype=torch.int32)
    out = attention_kvcache(q, k, v, cache_seqlens=seqlens, k_new=new[0], v_new=new[1])
    kept = min(10, length + 3)
    assert torch.equal(k[:, :kept], expected[0][:, :kept]) and torch.equal(v[:, :kept], expected[1][:, :kept])
    assert oracle.relative_error(out, oracle.forward(q, k[:, :kept], v[:, :kept]).out) <= 1e-12


def test_generation_step_by_step_is_causal_attention():
    """Paged, 16 tokens at once and then one by one: what causal attention of the whole says."""
    torch.manual_seed(0)
    total, page = 37, 8
    q, k, v = (torch.randn(2, total, h, 16, dtype=torch.float64) for h in (4, 2, 2))
    whole = cute_flash.attention(q, k, v, causal=True)
    pages = torch.randperm(10).view(2, 5).int()
    k_cache, v_cache = (torch.full((10, page, 2, 16), math.nan, dtype=torch.float64) for _ in range(2))
    seqlens = torch.zeros(2, dtype=torch.int32)
    steps, out = [16] + [1] * (total - 16), []
    for start, count in zip([0, *range(16, total)], steps, strict=True):
        now = slice(start, start + count)
        new = {"k_new": k[:, now], "v_new": v[:, now]}
        step = attention_kvcache(
            q[:, now], k_cache, v_cache, cache_seqlens=seqlens, page_table=pages, causal=True, **new
        )
        out.append(step)
        seqlens += count
    assert oracle.relative_error(torch.cat(out, dim=1), whole) <= 1e-12


# --------------------------------------------------------------------------------------------------------- refusals


def call(**changes):
    inputs = make_inputs(CacheCase((5, 7), 2, dtype="float32", capacity=10))
    arguments = {"q": inputs.q, "k_cache": inputs.k, "v_cache": inputs.v, **inputs.tables, **changes}
    return attention_kvcache(arguments.pop("q"), arguments.pop("k_cache"), arguments.pop("v_cache"), **arguments)


LENS = torch.tensor([5, 7], dtype=torch.int32)
NEW = torch.zeros(2, 3, 2, 16)
ROWS_SHARED = torch.zeros(1, 10, 2, 16).expand(2, -1, -1, -1)
NESTED = torch.nested.nested_tensor([torch.zeros(1, 2, 16)] * 2)
HEADS_SHARED = torch.zeros(2, 10, 1, 16).expand(-1, -1, 2, -1)
BAD = [
    ({"q": torch.zeros(2, 4, 16)}, ValueError, r"q must be 4-D \(batch, seqlen, heads, dim\)"),
    ({"v_cache": torch.zeros(2, 9, 2, 16)}, ValueError, "k_cache and v_cache must be alike but for"),
    ({"q": torch.zeros(2, 2, 4, 24)}, ValueError, "q and k_cache must have one head_dim, got 24 and 16"),
    ({"q": torch.zeros(2, 2, 3, 16)}, ValueError, "heads_q=3 and heads_kv=2"),
    ({"q": torch.zeros(2, 2, 4, 16).double()}, TypeError, "one dtype, got q torch.float64, k_cache"),
    ({"q": torch.zeros(3, 2, 4, 16), "cache_seqlens": torch.zeros(3).int()}, ValueError, "2 rows for a batch of 3"),
    ({"cache_seqlens": [5, 7]}, TypeError, "cache_seqlens must be a torch.Tensor, got list"),
    ({"cache_seqlens": LENS.long()}, TypeError, "cache_seqlens must be int32, got int64"),
    ({"cache_seqlens": LENS[:1]}, ValueError, r"cache_seqlens must be \(batch,\) for a batch of 2, got shape \(1,\)"),
    ({"cache_seqlens": LENS.to("meta")}, ValueError, "on the device of q, cpu, got meta"),
    ({"cache_seqlens": LENS + 4}, ValueError, "cache_seqlens must be 0 to the 10 keys .*, got 11"),
    ({"cache_seqlens": LENS - 6}, ValueError, "cache_seqlens must be 0 to .*, got -1"),
    ({"cache_seqlens": LENS[0]}, ValueError, r"cache_seqlens must be \(batch,\) for a batch of 2, got shape \(\)"),
    ({"v_cache": torch.zeros(10, 2, 16)}, ValueError, r"v_cache must be 4-D .*, got shape \(10, 2, 16\)"),
    (
        {"cache_seqlens": LENS.to_sparse()},
        TypeError,
        "cache_seqlens must be a plain strided tensor, got torch.sparse_coo",
    ),
    ({"q": NESTED}, TypeError, "q must be a plain strided tensor, got a nested tensor"),
    ({"k_cache": torch.zeros(2, 10, 2, 16).to_sparse()}, TypeError, "k_cache must be a plain strided tensor"),
    ({"k_new": NESTED, "v_new": NEW}, TypeError, "k_new must be a plain strided tensor, got a nested tensor"),
    ({"cache_batch_idx": LENS}, ValueError, "cache_batch_idx must be 0 to 1, got 5"),
    ({"cache_batch_idx": LENS.float()}, TypeError, "cache_batch_idx must be int32, got float32"),
    ({"page_table": LENS}, ValueError, r"page_table must be \(batch, pages\) for a batch of 2, got shape \(2,\)"),
    ({"page_table": LENS[:, None]}, ValueError, "page_table must be 0 to 1, got 5"),
    ({"page_table": LENS[:, None], "cache_batch_idx": LENS}, ValueError, "exclude each other"),
    ({"page_table": torch.zeros(3, 2).int().t()}, ValueError, "last stride of page_table must be 1, got 2"),
    ({"k_new": NEW}, ValueError, "k_new= and v_new= are given together"),
    ({"k_new": NEW, "v_new": NEW[:, :2]}, ValueError, "as many keys, got 3 and 2"),
    ({"k_new": NEW[:1], "v_new": NEW}, ValueError, r"k_new must be \(2, new keys, 2, 16\), got shape \(1, 3, 2, 16\)"),
    ({"k_new": NEW[0, 0, 0, 0], "v_new": NEW}, ValueError, r"k_new must be \(2, new keys, 2, 16\), got shape \(\)"),
    (
        {"k_new": NEW, "v_new": NEW, "k_cache": ROWS_SHARED},
        ValueError,
        r"k_new .* expanded cache: .* \(0, 32, 16",
    ),
    (
        {"k_new": NEW, "v_new": NEW, "v_cache": HEADS_SHARED},
        ValueError,
        r"v_new .* expanded cache: .* \(160, 16",
    ),
    ({"k_new": NEW, "v_new": NEW.double()}, TypeError, "v_new must be torch.float32 on cpu"),
    ({"k_new": NEW, "v_new": NEW, "q": torch.zeros(2, 0, 4, 16)}, ValueError, "k_new= needs query rows"),
    ({"k_cache": torch._neg_view(torch.zeros(2, 10, 2, 16))}, ValueError, "must not carry a lazy sign"),
    ({"num_splits": 0}, ValueError, "num_splits=0: at least 1"),
    ({"num_splits": 2.0}, TypeError, "num_splits must be an integer or None, got float"),
    ({"num_splits": 2, "batch_invariant": True}, ValueError, "exclude each other"),
    ({"batch_invariant": None}, TypeError, "batch_invariant must be True or False"),
    ({"sink": torch.zeros(4)}, UnsupportedError, "sink= is not built yet: attention_kvcache serves"),
    ({"deterministic": True}, TypeError, r"attention_kvcache\(\) has no argument deterministic="),
    ({"q": torch.zeros(2, 2, 4, 16, requires_grad=True)}, UnsupportedError, "has no gradients"),
    ({"window": (-1, 0)}, ValueError, "a bound is >= 0"),
    ({"backend": "sm90"}, UnsupportedError, "sm90: runs on compute capability 9.0"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("changes", "error", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_input_is_refused(changes, error, sentence, warm):
    if warm:
        call()
    with pytest.raises(error, match=sentence):
        call(**changes)


def test_a_refused_append_writes_nothing():
    cache = torch.zeros(2, 10, 2, 16)
    with pytest.raises(ValueError, match="exclude each other"):
        call(k_cache=cache, v_cache=cache, k_new=NEW + 1, v_new=NEW + 1, num_splits=2, batch_invariant=True)
    assert not cache.any()


@pytest.mark.parametrize("pages", [[0, 0, 9], [9, 0, 0], [0, 0, -1]])
def test_an_append_to_pages_that_do_not_exist_writes_nothing(pages):
    """Neither of that row, whichever page it is, nor of the row before."""
    k, v = torch.zeros(8, 2, 2, 16), torch.zeros(8, 2, 2, 16)
    table = torch.tensor([[1, 2, 3], pages], dtype=torch.int32)
    seqlens = torch.tensor([2, 3], dtype=torch.int32)
    q, new = torch.ones(2, 1, 2, 16), torch.ones(2, 2, 2, 16)
    with pytest.raises(ValueError, match="page_table must be 0 to 7"):
        attention_kvcache(q, k, v, cache_seqlens=seqlens, page_table=table, k_new=new, v_new=new)
    assert not k.any() and not v.any()


@pytest.mark.parametrize(
    ("fields", "table", "sentence"),
    [
        ({"chosen": True}, {"cache_batch_idx": [2, 2]}, "rows 0 and 1 would both be written to place 5 of cache row 2"),
        ({"page_size": 4}, {"page_table": [[0, 1, 2], [3, 1, 4]]}, "rows 0 and 1 .* to place 1 of page 1"),
    ],
    ids=str,
)
def test_two_rows_that_append_to_one_place_are_refused(fields, table, sentence):
    inputs = make_inputs(CacheCase((5, 5), 2, dtype="float32", capacity=12, **fields))
    tables = {**inputs.tables, **{name: torch.tensor(rows, dtype=torch.int32) for name, rows in table.items()}}
    before = inputs.k.clone()
    new = torch.zeros(2, 3, 2, 16)
    with pytest.raises(ValueError, match=sentence):
        attention_kvcache(*inputs.qkv, **tables, k_new=new, v_new=new)
    assert torch.equal(before.nan_to_num(nan=9.0), inputs.k.nan_to_num(nan=9.0))
    attention_kvcache(*inputs.qkv, **tables)  # to read one place twice is fine


def test_an_expanded_cache_that_is_only_read():
    out = call(k_cache=ROWS_SHARED + 1, v_cache=HEADS_SHARED + 1)
    torch.testing.assert_close(out, torch.ones_like(out))
    assert torch.equal(out, call(k_cache=(ROWS_SHARED + 1)[:1].expand(2, -1, -1, -1), v_cache=HEADS_SHARED + 1))


@pytest.mark.parametrize("paged", [False, True])
def test_an_empty_batch(paged):
    """With new keys too: there are none."""
    table = {"page_table": torch.zeros(0, 3, dtype=torch.int32)} if paged else {}
    cache, new = torch.zeros(4 if paged else 0, 8, 2, 16), torch.zeros(0, 3, 2, 16)
    tables = {"cache_seqlens": torch.zeros(0, dtype=torch.int32), **table}
    for fresh in ({}, {"k_new": new, "v_new": new}):
        out, lse = attention_kvcache(torch.zeros(0, 1, 4, 16), cache, cache, **tables, **fresh, return_lse=True)
        assert out.shape == (0, 1, 4, 16) and lse.shape == (0, 4, 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_q_and_new_keys_to_the_caches(compiled):
    inputs = make_inputs(CacheCase((5, 7), 2, dtype="float32", capacity=10))
    caches_16, copies = ([x.bfloat16() for x in (inputs.k, inputs.v)] for _ in range(2))
    right = attention_kvcache(inputs.q.bfloat16(), *caches_16, **inputs.tables)
    torch._dynamo.reset()
    call_it = torch.compile(attention_kvcache, fullgraph=True, backend="eager") if compiled else attention_kvcache
    new = torch.randn(2, 2, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call_it(inputs.q, *caches_16, **inputs.tables), right)
        appended = call_it(inputs.q, *caches_16, **inputs.tables, k_new=new, v_new=new.bfloat16())
        with pytest.raises(TypeError, match=r"v_cache must be a torch\.Tensor, got NoneType"):
            attention_kvcache(inputs.q, caches_16[0], None, **inputs.tables)
        with pytest.raises(TypeError, match=r"k_new must be torch\.bfloat16 on cpu as its cache, got torch\.float64"):
            attention_kvcache(inputs.q, *caches_16, **inputs.tables, k_new=new.double(), v_new=new)
    new = new.bfloat16()
    expected = attention_kvcache(inputs.q.bfloat16(), *copies, **inputs.tables, k_new=new, v_new=new)
    assert torch.equal(appended, expected) and appended.dtype == torch.bfloat16
    for cache, copy in zip(caches_16, copies, strict=True):
        assert torch.equal(cache.nan_to_num(), copy.nan_to_num())
    with pytest.raises(TypeError, match=r"one dtype, got q torch\.float32, k_cache torch\.bfloat16"):
        attention_kvcache(inputs.q, *caches_16, **inputs.tables)


def test_a_call_that_autocast_cast_is_another_kind_than_one_it_left_alone(monkeypatch):
    """Both have a float32 q: only the caches' dtypes tell them apart."""
    inputs = make_inputs(CacheCase((5, 7), 2, dtype="float32"))
    asked = []
    describe = request.describe
    monkeypatch.setattr(request, "describe", lambda q, *rest: asked.append(q.dtype) or describe(q, *rest))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            attention_kvcache(inputs.q, inputs.k.bfloat16(), inputs.v.bfloat16(), **inputs.tables)
            out = attention_kvcache(*inputs.qkv, **inputs.tables)
    assert asked == [torch.bfloat16, torch.float32]
    assert torch.equal(out, attention_kvcache(*inputs.qkv, **inputs.tables))


def test_explain():
    inputs = make_inputs(CacheCase((5, 7), 2, page_size=16, dtype="bfloat16"))
    decision = cute_flash.explain(*inputs.qkv, **inputs.tables, causal=True, arch="9.0", num_splits=3)
    assert "cache page_size=16" in str(decision.problem) and "page_size=16" in str(decision.plan)
    assert decision.plan.backend == "sm90"
    blackwell = cute_flash.explain(*inputs.qkv, **inputs.tables, causal=True, arch="10.0")
    assert "key-value caches (attention_kvcache) are not built yet" in str(blackwell)
    with pytest.raises(TypeError, match="a cache needs cache_seqlens="):
        cute_flash.explain(*inputs.qkv, page_table=inputs.page_table)


# -------------------------------------------------------------------------------------------------- the office's side


def test_a_single_row_needs_no_right_bound():
    """Another kernel for each spelling would be one too many."""
    inputs = make_inputs(CacheCase((5, 7)))
    problems = [
        cute_flash.explain(*inputs.qkv, **inputs.tables, **options).problem
        for options in ({}, {"causal": True}, {"window": (None, 3)}, {"window": (None, 0), "causal": True})
    ]
    assert len(set(problems)) == 1
    left = cute_flash.explain(*inputs.qkv, **inputs.tables, window=(4, 3)).problem
    assert left.mask.left and not left.mask.right


def test_warm_calls_of_any_batch_and_length_describe_nothing(monkeypatch):
    inputs = make_inputs(CacheCase((5, 7), causal=True))
    cold = attention_kvcache(*inputs.qkv, **inputs.tables, causal=True)
    monkeypatch.setattr(request, "describe", None)
    monkeypatch.setattr(caches, "check", None)
    assert torch.equal(attention_kvcache(*inputs.qkv, **inputs.tables, causal=True), cold)
    other = CacheCase((5, 7, 130), capacity=200)
    more = make_inputs(other)
    out, lse = attention_kvcache(*more.qkv, **more.tables, causal=True), None
    assert lse is None and oracle.relative_error(out, exact(other, more).out) <= 1e-12
    assert len(kvcache._warm) == 1


@pytest.mark.parametrize("fields", [{}, {"page_size": 16}, {"chosen": True}], ids=str)
def test_compiled_as_one_operator(fields):
    case = CacheCase((5, 60), 2, causal=True, capacity=64, **fields)
    torch._dynamo.reset()  # eight recompilations are allowed, other tests' among them
    compiled = torch.compile(attention_kvcache, fullgraph=True, backend="aot_eager")
    inputs, again = make_inputs(case), make_inputs(case)
    new = {"k_new": torch.ones(2, 2, 2, 16, dtype=torch.float64), "v_new": torch.ones(2, 2, 2, 16, dtype=torch.float64)}
    for options in ({}, {"return_lse": True}, new):
        result = compiled(*inputs.qkv, **inputs.tables, causal=True, **options)
        expected = attention_kvcache(*again.qkv, **again.tables, causal=True, **options)
        for value, right in zip(result, expected, strict=True):
            assert torch.equal(value, right)
    assert torch.equal(inputs.k.nan_to_num(), again.k.nan_to_num())


@pytest.mark.parametrize("fields", [{}, {"page_size": 4}, {"chosen": True}], ids=str)
@pytest.mark.parametrize("append", [False, True])
def test_opcheck(fields, append):
    """With NaN behind the keys, which opcheck would not take for equal, replaced."""
    inputs = make_inputs(CacheCase((5, 7), 2, capacity=12, dtype="float32", **fields))
    tables = inputs.cache_seqlens, inputs.page_table, inputs.cache_batch_idx
    caches_now = inputs.k.nan_to_num(), inputs.v.nan_to_num()
    new = (torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)) if append else ()
    operator = torch.ops.cute_flash.attention_kvcache_append if append else torch.ops.cute_flash.attention_kvcache
    for lse, num_splits, invariant, words in (
        (True, None, False, (True, 5, None, 0.3, 4.0, False, None)),
        (False, 3, False, (False, None, None, None, None, False, "reference")),
        (False, None, True, (True, None, None, None, None, False, None)),
    ):
        torch.library.opcheck(
            operator.default, (inputs.q, *caches_now, *tables, *new, num_splits, invariant, lse, *words)
        )


def test_one_graph_serves_every_batch_and_length():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_kvcache, fullgraph=True, dynamic=True, backend=counter)
    for batch, capacity, new in ((2, 40, 2), (3, 64, 5), (5, 48, 3), (4, 90, 7)):
        case = CacheCase(tuple(range(7, 7 + batch)), 3, causal=True, capacity=capacity)
        inputs, again = make_inputs(case), make_inputs(case)
        keys = torch.randn(batch, new, 2, 16, dtype=torch.float64)
        out = compiled(*inputs.qkv, **inputs.tables, k_new=keys, v_new=keys, causal=True)
        assert torch.equal(out, attention_kvcache(*again.qkv, **again.tables, k_new=keys, v_new=keys, causal=True))
        assert torch.equal(inputs.k.nan_to_num(), again.k.nan_to_num())
    assert counter.frame_count <= 2


def test_a_graph_of_appends_copies_no_cache():
    """Inductor writes into the caches it is given, however often: a copy a step would cost more than attention does."""
    from torch._inductor.utils import run_and_get_code

    def steps(q, new, k, v, seqlens, later):
        first = attention_kvcache(q, k, v, cache_seqlens=seqlens, k_new=new, v_new=new)
        return attention_kvcache(first, k, v, cache_seqlens=later, k_new=new, v_new=new)

    inputs = make_inputs(CacheCase((5, 7), capacity=64, dtype="float32"))
    k, v = inputs.k.nan_to_num(), inputs.v.nan_to_num()
    copies, new = (k.clone(), v.clone()), torch.randn(2, 1, 2, 16)
    seqlens = inputs.cache_seqlens, inputs.cache_seqlens + 1
    torch._dynamo.reset()
    out, (code,) = run_and_get_code(torch.compile(steps, fullgraph=True), inputs.q, new, k, v, *seqlens)
    assert torch.equal(out, steps(inputs.q, new, *copies, *seqlens))
    assert torch.equal(k, copies[0]) and torch.equal(v, copies[1])
    body = code[code.index("def call(") :]
    assert body.count("torch.ops.cute_flash.attention_kvcache_append.default(") == 2
    assert "empty_strided" not in body and "copy" not in body and "clone" not in body


def test_fake_tensors_take_the_operator_and_its_checks():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, cache = torch.empty(2, 3, 4, 16), torch.empty(2, 10, 2, 16)
        seqlens = torch.empty(2, dtype=torch.int32)
        out, lse = attention_kvcache(q, cache, cache, cache_seqlens=seqlens, return_lse=True)
        assert out.shape == (2, 3, 4, 16) and lse.shape == (2, 4, 3)
        with pytest.raises(TypeError, match="cache_seqlens must be int32"):
            attention_kvcache(q, cache, cache, cache_seqlens=seqlens.long())
        words = (False, None, None, None, None, False, None)
        with pytest.raises(ValueError, match="k_cache has 2 rows for a batch of 1"):
            torch.ops.cute_flash.attention_kvcache(
                q[:1], cache, cache, seqlens[:1], None, None, None, False, False, *words
            )
