"""FlashAttention's functions over ours: each of its words means what it means there."""

import inspect
import itertools

import pytest
import torch

from cute_flash import UnsupportedError, attention, attention_kvcache, attention_varlen
from cute_flash.integrations import flash_attn as ours
from cute_flash.runtime import request

from .. import oracle

pytestmark = pytest.mark.usefixtures("office")


def qkv(seqlen_q=37, seqlen_k=53, heads_kv=2, requires_grad=False):
    torch.manual_seed(0)
    shapes = (2, seqlen_q, 4, 24), (2, seqlen_k, heads_kv, 24), (2, seqlen_k, heads_kv, 24)
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad) for shape in shapes)


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"window_size": (-1, -1), "softcap": 0.0, "dropout_p": 0.0}, {}),
        ({"window_size": (5, -1)}, {"window": (5, None)}),
        ({"window_size": (-1, 3)}, {"window": (None, 3)}),
        ({"window_size": (0, 0)}, {"window": (0, 0)}),
        ({"window_size": (5, -1), "causal": True}, {"window": (5, 0)}),
        (
            {"window_size": [7, 2], "softcap": 3.0, "softmax_scale": 0.4},
            {"window": (7, 2), "softcap": 3.0, "scale": 0.4},
        ),
    ],
)
def test_every_option_against_the_oracle(words, meaning):
    q, k, v = qkv()
    out, lse, probabilities = ours.flash_attn_func(q, k, v, return_attn_probs=True, **words)
    right = oracle.forward(q, k, v, **meaning)
    assert oracle.relative_error(out, right.out) < 1e-12 and oracle.lse_excess(lse, right.lse) <= 1
    assert probabilities is None
    assert torch.equal(out, ours.flash_attn_func(q, k, v, **words))


def test_arguments_may_be_given_by_place():
    """In FlashAttention 2's order, and after packed tensors too."""
    q, k, v = qkv(37, 37, heads_kv=4, requires_grad=True)
    given = (0.0, 0.4, True, (9, -1), 3.0, None, True, True)
    expected, lse = attention(
        q, k, v, scale=0.4, causal=True, window=(9, None), softcap=3.0, deterministic=True, return_lse=True
    )
    packed = ours.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), *given)
    half_packed = ours.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), *given)
    grads = torch.autograd.grad(expected.sum(), (q, k, v), retain_graph=True)
    for result in (ours.flash_attn_func(q, k, v, *given), packed, half_packed):
        assert torch.equal(result[0], expected) and torch.equal(result[1], lse) and result[2] is None
        again = torch.autograd.grad(result[0].sum(), (q, k, v), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))


OPTIONS = "dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
CACHED = (
    "q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, "
    "softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse"
)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (ours.flash_attn_func, f"q, k, v, {OPTIONS}"),
        (ours.flash_attn_qkvpacked_func, "qkv, args, options"),
        (ours.flash_attn_kvpacked_func, "q, kv, args, options"),
        (ours.flash_attn_varlen_func, f"q, k, v, {LENGTHS}, {OPTIONS}, block_table"),
        (ours.flash_attn_varlen_qkvpacked_func, "qkv, cu_seqlens, max_seqlen, args, options"),
        (ours.flash_attn_varlen_kvpacked_func, f"q, kv, {LENGTHS}, args, options"),
        (ours.flash_attn_with_kvcache, CACHED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_signatures_are_flash_attention_2s(function, names):
    """Where args stand for the rest, the rest is flash_attn_func's."""
    assert ", ".join(inspect.signature(function).parameters) == names
    assert function.__name__ in ours.__all__


STARTS = torch.tensor([0, 3, 9], dtype=torch.int32)


def test_packed_sequences():
    q, k, v = (x[0, :9] for x in qkv())
    out, lse, nothing = ours.flash_attn_varlen_func(
        q, k, v, STARTS, STARTS, 6, 6, causal=True, window_size=(4, -1), softcap=2.0, return_attn_probs=True
    )
    lengths = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    expected = attention_varlen(q, k, v, **lengths, window=(4, 0), softcap=2.0, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and nothing is None


def test_longest_lengths_that_lie_in_tensors_are_not_looked_at():
    q, k, v = (x[0, :9] for x in qkv())
    given = (q, k, v, STARTS, STARTS)
    meta = torch.empty((), dtype=torch.int32, device="meta")  # to read it raises
    assert torch.equal(ours.flash_attn_varlen_func(*given, meta, meta), ours.flash_attn_varlen_func(*given, None, None))


def test_packed_sequences_in_one_tensor():
    """Arguments by place, in FlashAttention's order."""
    q, k, v = (x[0, :9].detach() for x in qkv(37, 37, heads_kv=4))
    qkv_in_one, kv_in_one = (torch.stack(parts, 1).requires_grad_() for parts in ((q, k, v), (k, v)))
    given = (0.0, 0.4, True, (4, -1), 3.0, None, True, True)
    lengths = (STARTS, STARTS, 6, 6)
    right, lse, _ = ours.flash_attn_varlen_func(*(x.requires_grad_() for x in (q, k, v)), *lengths, *given)
    grads = torch.autograd.grad(right.sum(), (q, k, v))
    whole = ours.flash_attn_varlen_qkvpacked_func(qkv_in_one, STARTS, 6, *given)
    half = ours.flash_attn_varlen_kvpacked_func(q, kv_in_one, *lengths, *given)
    for out, lse_out, nothing in (whole, half):
        assert torch.equal(out, right) and torch.equal(lse_out, lse) and nothing is None
    assert torch.equal(torch.autograd.grad(whole[0].sum(), qkv_in_one)[0], torch.stack(grads, 1))
    assert torch.equal(torch.autograd.grad(half[0].sum(), kv_in_one)[0], torch.stack(grads[1:], 1))


@pytest.mark.parametrize("paged", [False, True])
def test_caches(paged):
    torch.manual_seed(0)
    q = torch.randn(2, 2, 4, 16)
    k, v = (torch.randn(2, 8, 2, 16) for _ in range(2))
    new = [torch.randn(2, 1, 2, 16) for _ in range(2)]
    table = {"page_table": torch.tensor([[1], [0]], dtype=torch.int32)} if paged else {}
    theirs = {"block_table": table["page_table"]} if paged else {}
    lens = torch.tensor([5, 5], dtype=torch.int32)
    caches, copies = (k.clone(), v.clone()), (k.clone(), v.clone())
    out, lse = ours.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=5, causal=True, return_softmax_lse=True, **theirs
    )
    expected = attention_kvcache(
        q, *copies, cache_seqlens=lens, k_new=new[0], v_new=new[1], causal=True, return_lse=True, **table
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(caches[0], copies[0]) and not torch.equal(caches[0], k)
    whole = attention_kvcache(q, k, v, cache_seqlens=torch.tensor([8, 8], dtype=torch.int32), **table)
    assert torch.equal(ours.flash_attn_with_kvcache(q, k, v, num_splits=0, **theirs), whole)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda q, k, v: ours.flash_attn_func(q, k, v, 0.1), UnsupportedError, "dropout_p= is not supported"),
        (lambda q, k, v: ours.flash_attn_func(q, k, v, alibi_slopes=q), UnsupportedError, "alibi_slopes= is not built"),
        (lambda q, k, v: ours.flash_attn_func(q, k, v, window_size=4), TypeError, r"a pair .*, got 4"),
        (lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, window_size=None), TypeError, "a pair .*, got None"),
        (lambda q, k, v: ours.flash_attn_qkvpacked_func(q), ValueError, r"\(batch, seqlen, 3, heads, head_dim\), got"),
        (
            lambda q, k, v: ours.flash_attn_kvpacked_func(q, k),
            ValueError,
            r"\(batch, seqlen_k, 2, heads_kv, head_dim\)",
        ),
        (
            lambda q, k, v: ours.flash_attn_varlen_qkvpacked_func(q, STARTS, 9),
            ValueError,
            r"qkv must be \(total, 3, heads, head_dim\), got",
        ),
        (
            lambda q, k, v: ours.flash_attn_varlen_kvpacked_func(q[0], k[0], STARTS, STARTS, 9, 9),
            ValueError,
            r"kv must be \(total_k, 2, heads_kv, head_dim\), got",
        ),
        (
            lambda q, k, v: ours.flash_attn_varlen_func(q[0], k[0], v[0], STARTS, STARTS, 9, 9, block_table=STARTS),
            UnsupportedError,
            "block_table= is not built yet",
        ),
        (lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, cache_leftpad=q), UnsupportedError, "cache_leftpad= is"),
        (lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, alibi_slopes=q), UnsupportedError, "alibi_slopes= is"),
        (
            lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, k, v),
            ValueError,
            "=None is the whole cache",
        ),
        (
            lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=5.7),
            TypeError,
            "or None, got float",
        ),
        (lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=True), TypeError, "or None, got bool"),
        (lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=[5, 7]), TypeError, "or None, got list"),
        (lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=54), ValueError, "=54: 0 to the 53 keys"),
        (lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=-1), ValueError, "=-1: 0 to the 53 keys"),
        (
            lambda q, k, v: ours.flash_attn_with_kvcache(q, k, v, block_table=STARTS),
            ValueError,
            r"page_table must be \(batch, pages\) .*, got shape \(3,\)",
        ),
    ],
)
def test_what_is_refused(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(*qkv())


def turned(x, cos, sin, first, interleaved, moving=True):
    """Plane by plane: dims (2p, 2p + 1), or (p, p + planes), of a token at position t turn by the angles of t."""
    out, planes = x.clone(), cos.shape[1]
    for row, token in itertools.product(range(x.shape[0]), range(x.shape[1])):
        place = int(first[row]) + (token if moving else 0)
        for plane in range(planes):
            i, j = (2 * plane, 2 * plane + 1) if interleaved else (plane, plane + planes)
            z = torch.complex(x[row, token, :, i], x[row, token, :, j]) * torch.complex(cos, sin)[place, plane]
            out[row, token, :, i], out[row, token, :, j] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("words", "moving"),
    [({"causal": True}, True), ({"window_size": (4, -1)}, True), ({"window_size": (-1, 2)}, True), ({}, False)],
    ids=["causal", "left window", "right window", "full"],
)
def test_new_keys_and_queries_are_rotated(words, moving, interleaved):
    """float64, against rotation written out by itself: up to the last position, and only the first dims of a head."""
    torch.manual_seed(0)
    q, new_k, new_v = (torch.randn(2, 3, heads, 24, dtype=torch.float64) for heads in (4, 2, 2))
    caches = torch.randn(2, 2, 16, 2, 24, dtype=torch.float64)
    lens, angle = torch.tensor([13, 4], dtype=torch.int32), torch.rand(16, 5, dtype=torch.float64) * 6
    cos, sin = angle.cos(), angle.sin()
    mine, theirs = caches.clone(), caches.clone()
    out = ours.flash_attn_with_kvcache(q, *mine, new_k, new_v, cos, sin, lens, rotary_interleaved=interleaved, **words)
    by_hand = turned(q, cos, sin, lens, interleaved, moving), turned(new_k, cos, sin, lens, interleaved)
    right = ours.flash_attn_with_kvcache(by_hand[0], *theirs, by_hand[1], new_v, cache_seqlens=lens, **words)
    assert oracle.relative_error(out, right) < 1e-14 and oracle.relative_error(mine, theirs) < 1e-14
    assert torch.equal(mine[0, 0, 13:, :, 10:], new_k[0, :, :, 10:])  # dims that do not turn, to the bit


def test_rotation_of_what_has_no_room_and_in_half_precision():
    """Computed in float32 and rounded once; a key without room has no angle either, and is dropped."""
    torch.manual_seed(0)
    q, new_k, new_v = (torch.randn(2, 2, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    lens, angle = torch.tensor([7, 2], dtype=torch.int32), torch.rand(8, 8) * 6
    caches = torch.randn(2, 2, 8, 2, 16, dtype=torch.bfloat16)
    ours.flash_attn_with_kvcache(q, *caches, new_k, new_v, angle.cos(), angle.sin(), lens, causal=True)
    exact = turned(new_k.double(), angle.cos().double(), angle.sin().double(), lens.clamp(max=6), True)
    assert torch.equal(caches[0, 1, 2:4], exact[1].bfloat16())
    exact = turned(new_k[:1, :1].double(), angle.cos().double(), angle.sin().double(), lens[:1], True)
    assert torch.equal(caches[0, 0, 7], exact[0, 0].bfloat16())


ANGLES = torch.zeros(53, 12)


@pytest.mark.parametrize(
    ("more", "error", "sentence"),
    [
        ({"rotary_sin": None}, TypeError, "rotary_sin must be a tensor of floats, .* got NoneType"),
        ({"rotary_cos": None}, TypeError, "rotary_cos must be a tensor of floats, .* got NoneType"),
        ({"rotary_cos": ANGLES.int()}, TypeError, r"rotary_cos must be .* got torch\.int32"),
        ({"rotary_sin": ANGLES[:, :4]}, ValueError, r"alike, got shape \(53, 4\)"),
        (dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(53, 13)), ValueError, r"half of head_dim 24\), .* 13"),
        (dict.fromkeys(("rotary_cos", "rotary_sin"), ANGLES[:52]), ValueError, "52 positions for the 53 keys"),
        ({"k": None, "v": None}, ValueError, "go with k= and v="),
        ({"v": None}, ValueError, "given together or not at all"),
        ({"cache_seqlens": torch.tensor([5, 7])}, TypeError, "must be int32, got int64"),
    ],
)
def test_rotations_that_are_refused(more, error, sentence):
    q, k, v = (x.float() for x in qkv(1))
    given = {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": 40, "rotary_cos": ANGLES, "rotary_sin": ANGLES, **more}
    with pytest.raises(error, match=sentence):
        ours.flash_attn_with_kvcache(q, k, v, **given)


def test_rotation_compiles():
    torch._dynamo.reset()
    q, k, v = (x.float() for x in qkv(1))
    lens, angle = torch.tensor([40, 7], dtype=torch.int32), torch.rand(53, 12)
    given = (k[:, :1].clone(), v[:, :1].clone(), angle.cos(), angle.sin(), lens)
    eager = ours.flash_attn_with_kvcache(q, k.clone(), v.clone(), *given, causal=True)
    compiled = torch.compile(ours.flash_attn_with_kvcache, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k.clone(), v.clone(), *given, causal=True), eager)


def test_warm_calls_describe_nothing(monkeypatch):
    """Words of FlashAttention that say nothing (dropout_p=0.0, alibi_slopes=None) cost no look at the whole call."""
    q, k, v = qkv()
    calls = (
        lambda: ours.flash_attn_func(q, k, v),
        lambda: ours.flash_attn_varlen_func(q[0, :9], k[0, :9], v[0, :9], STARTS, STARTS, 6, 6),
        lambda: ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=40),
    )
    cold = [call() for call in calls]
    monkeypatch.setattr(request, "check_options", None)
    monkeypatch.setattr(request, "describe", None)
    assert all(torch.equal(call(), before) for call, before in zip(calls, cold, strict=True))


def test_it_compiles_to_the_operator():
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(ours.flash_attn_func, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, causal=True, window_size=(4, -1)), attention(q, k, v, window=(4, 0)))
