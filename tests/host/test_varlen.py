"""attention_varlen on CPU tensors: numbers and gradients against float64, refusals, the warm path, graphs."""

import math
from fractions import Fraction

import pytest
import torch

import cute_flash
from cute_flash import UnsupportedError, attention_varlen, varlen
from cute_flash.runtime import packed, request
from cute_flash.spec import settings
from tests.packed import LENGTHS, PackedCase, cases, errors, make_inputs, same

pytestmark = [pytest.mark.usefixtures("office"), pytest.mark.usefixtures("poisoned_empty")]


def gradients(inputs, **options):
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = attention_varlen(*leaves, **inputs.lengths, return_lse=True, **options)
    # As attention's oracle has it, a row without keys passes no gradient through LSE.
    return (out, lse), torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])


@pytest.mark.parametrize("case", cases(heads_q=6, heads_kv=2, head_dim=24, head_dim_v=40), ids=str)
def test_numbers_and_gradients(case):
    inputs = make_inputs(case)
    forward, grads = gradients(inputs, **case.options)
    assert forward[0].is_contiguous() and forward[0].dtype == inputs.q.dtype
    for name, error in errors(case, inputs, forward, grads).items():
        assert error <= (1 if name == "lse" else 1e-11), (name, error)


def test_float32_and_one_output():
    case = PackedCase(*LENGTHS["unequal"], causal=True, dtype="float32")
    inputs = make_inputs(case)
    (out, lse), grads = gradients(inputs, **case.options)
    assert all(error <= 1e-5 for name, error in errors(case, inputs, (out, lse), grads).items() if name != "lse")
    alone = attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths, **case.options)
    assert torch.equal(alone, out)


def test_one_sequence_is_attention():
    inputs = make_inputs(same(50, causal=True))
    out, lse = attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths, causal=True, return_lse=True)
    dense, dense_lse = cute_flash.attention(
        *(x[None] for x in (inputs.q, inputs.k, inputs.v)), causal=True, return_lse=True
    )
    assert torch.equal(out, dense[0]) and torch.equal(lse, dense_lse[0])


def test_nan_of_one_sequence_stays_there():
    case = same(40, 30, 50, causal=False)
    inputs = make_inputs(case)
    clean, clean_grads = gradients(inputs)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout):
        tensor[40:70] = math.nan
    poisoned, grads = gradients(inputs)
    others = torch.cat([torch.arange(40), torch.arange(70, 120)])
    assert torch.equal(poisoned[0][others], clean[0][others])
    assert torch.equal(poisoned[1][:, others], clean[1][:, others])
    assert all(torch.equal(new[others], old[others]) for new, old in zip(grads, clean_grads, strict=True))


def test_strided_and_expanded_tensors():
    case = same(33, 20, heads_q=4, heads_kv=4, head_dim=16, head_dim_v=16)
    inputs = make_inputs(case)
    packed_qkv = torch.stack([inputs.q, inputs.k, inputs.v], dim=1)
    out = attention_varlen(*packed_qkv.unbind(1), **inputs.lengths)
    assert torch.equal(out, attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths))
    expanded = inputs.k[:, :1].expand(-1, 4, -1)
    same_keys = attention_varlen(inputs.q, expanded, inputs.v, **inputs.lengths)
    assert torch.equal(same_keys, attention_varlen(inputs.q, expanded.contiguous(), inputs.v, **inputs.lengths))


@pytest.mark.parametrize("scale", [-0.3, 0, 0.7])
def test_scales(scale):
    inputs = make_inputs(same(20, 9))
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = attention_varlen(*leaves, **inputs.lengths, scale=scale)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    for rows in (slice(0, 20), slice(20, 29)):
        part = [x[None, rows].detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        alone = cute_flash.attention(*part, scale=scale)
        torch.testing.assert_close(out[rows], alone[0], rtol=1e-12, atol=1e-12)
        right = torch.autograd.grad(alone, part, inputs.dout[None, rows])
        for grad, expected in zip(grads, right, strict=True):
            torch.testing.assert_close(grad[rows], expected[0], rtol=1e-11, atol=1e-11)


# -------------------------------------------------------------------------------------------------------- refusals


def call(**changes):
    inputs = make_inputs(same(5, 7, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32"))
    arguments = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.lengths, **changes}
    return attention_varlen(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


CU = torch.tensor([0, 5, 12], dtype=torch.int32)
BAD = [
    ({"q": torch.zeros(1, 12, 4, 16)}, ValueError, r"q must be 3-D \(total, heads, dim\), got shape \(1, 12, 4, 16\)"),
    ({"v": torch.zeros(11, 2, 16)}, ValueError, "k and v must have one total, got 12 and 11"),
    ({"q": torch.zeros(12, 3, 16)}, ValueError, "heads_q=3 and heads_kv=2"),
    ({"k": torch.zeros(12, 2, 24)}, ValueError, "q and k must have one head_dim, got 16 and 24"),
    ({"v": torch.zeros(12, 2, 16).double()}, TypeError, "one dtype"),
    ({"cu_seqlens_q": [0, 5, 12]}, TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
    ({"cu_seqlens_q": torch.nested.nested_tensor([CU])}, TypeError, "cu_seqlens_q must be a plain strided tensor"),
    ({"cu_seqlens_q": CU.long()}, TypeError, "cu_seqlens_q must be int32, got int64"),
    ({"cu_seqlens_k": CU[None]}, ValueError, r"cu_seqlens_k must be 1-D \(sequences \+ 1,\), got shape \(1, 3\)"),
    ({"cu_seqlens_k": CU[:0]}, ValueError, r"got shape \(0,\)"),
    ({"cu_seqlens_k": CU[::2]}, ValueError, "cu_seqlens_k must be contiguous, got stride 2"),
    ({"cu_seqlens_k": CU.to("meta")}, ValueError, "cu_seqlens_k must be on the device of q, cpu, got meta"),
    ({"cu_seqlens_k": CU[:2]}, ValueError, "must have one length, got 2 and 1 sequences"),
    ({"cu_seqlens_q": CU + 1}, ValueError, "cu_seqlens_q must start at 0, got 1"),
    ({"cu_seqlens_q": CU.flip(0) - 12}, ValueError, "cu_seqlens_q must never fall, got 0 and then -7 at 1"),
    ({"cu_seqlens_k": CU * 2}, ValueError, "cu_seqlens_k must end within the 12 rows it cuts, got 24"),
    ({"max_seqlen_q": 5.0}, TypeError, "max_seqlen_q must be an integer or None, got float"),
    ({"max_seqlen_k": True}, TypeError, "max_seqlen_k must be an integer or None, got bool"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k=-1: a length is >= 0"),
    ({"sink": torch.zeros(4)}, UnsupportedError, "sink= is not built yet: attention_varlen serves"),
    ({"dropout_p": 0.1}, UnsupportedError, "dropout_p= is not supported"),
    ({"page_table": CU}, TypeError, r"attention_varlen\(\) has no argument page_table="),
    ({"causal": 1.0}, TypeError, "causal must be True or False"),
    ({"backend": "sm90"}, UnsupportedError, "sm90: runs on compute capability 9.0"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("changes", "error", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_input_is_refused(changes, error, sentence, warm):
    if warm:
        call()
    with pytest.raises(error, match=sentence):
        call(**changes)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize(
    ("hint", "error", "sentence"),
    [
        (-1, ValueError, "=-1: a length is >= 0"),
        (torch.tensor(5), TypeError, " must be an integer or None, got Tensor"),
        (torch.tensor([5, 7]), TypeError, " must be an integer or None, got Tensor"),
        (Fraction(5), TypeError, " must be an integer or None, got Fraction"),
    ],
)
def test_hints_that_are_no_lengths_are_refused_where_their_kind_is_warm(name, hint, error, sentence):
    call(**{name: 5})
    with pytest.raises(error, match=name + sentence):
        call(**{name: hint})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("total_q", "total_k", "which"), [(0, 12, "q"), (12, 0, "k"), (0, 0, "q")])
def test_lengths_of_nothing_are_checked_too(total_q, total_k, which, compiled):
    """No kernel runs, and none looks at them."""
    q, k = torch.zeros(total_q, 4, 16), torch.zeros(total_k, 2, 16)
    zeros = torch.zeros(3, dtype=torch.int32)
    call_it = torch.compile(attention_varlen, fullgraph=True, backend="eager") if compiled else attention_varlen
    fine = {"cu_seqlens_q": CU if total_q else zeros, "cu_seqlens_k": CU if total_k else zeros}
    assert not call_it(q, k, k, **fine).any()
    with pytest.raises(ValueError, match=f"cu_seqlens_{which} must end within the 0 rows it cuts, got 12"):
        call_it(q, k, k, cu_seqlens_q=CU, cu_seqlens_k=CU)
    with pytest.raises(ValueError, match="cu_seqlens_q must start at 0, got 1"):
        call_it(q, k, k, **{**fine, "cu_seqlens_q": CU + 1})


def test_what_is_missing_is_named():
    inputs = make_inputs(same(5))
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        attention_varlen(inputs.q, inputs.k, inputs.v, cu_seqlens_q=inputs.cu_seqlens_q)
    with pytest.raises(TypeError, match="packed sequences need cu_seqlens_k="):
        cute_flash.explain(inputs.q, inputs.k, inputs.v, cu_seqlens_q=inputs.cu_seqlens_q)


def test_spelled_out_defaults_pass():
    assert torch.equal(call(dropout_p=0.0, attn_mask=None, sink=None), call())


@pytest.mark.parametrize("words", ["q", "k", "v"])
def test_functorch_and_lazy_signs(words):
    inputs = make_inputs(same(5, 6))
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    call_with = lambda t: attention_varlen(t["q"], t["k"], t["v"], **inputs.lengths)  # noqa: E731
    flipped = call_with({**tensors, words: torch._neg_view(tensors[words])})
    assert torch.equal(flipped, call_with({**tensors, words: -tensors[words]}))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(lambda x: call_with({**tensors, words: x}))(tensors[words][None])


# ------------------------------------------------------------------------------------------------- the office's side


def test_hints_choose_kernels_and_change_nothing():
    inputs = make_inputs(same(40, 3, 17))
    qkv = inputs.q, inputs.k, inputs.v
    plain = attention_varlen(*qkv, **inputs.lengths)
    for hints in ({"max_seqlen_q": 40, "max_seqlen_k": 40}, {"max_seqlen_q": 1}, {"max_seqlen_k": 0}):
        assert torch.equal(attention_varlen(*qkv, **inputs.lengths, **hints), plain)
        problem = cute_flash.explain(*qkv, **inputs.lengths, **hints).problem
        longest = hints.get("max_seqlen_q"), hints.get("max_seqlen_k")
        assert (problem.few_rows, problem.few_keys, problem.short) == packed.kind(longest, (60, 60), 4)
    kinds = [packed.kind((n, n), (10_000, 10_000), 4) for n in (0, 16, 17, 64, 65, 1024, 1025)]
    assert [few_rows for few_rows, *_ in kinds] == [16, 16, 32, 64, 0, 0, 0]
    assert all(few_rows == few_keys for few_rows, few_keys, _ in kinds)
    assert [short for *_, short in kinds] == [True] * 6 + [False]
    means = [packed.kind((None, None), (total, 192), starts) for total, starts in ((192, 4), (193, 4), (7, 1))]
    assert means == [(64, 64, False), (0, 64, False), (0, 0, False)]


def test_a_warm_call_describes_nothing(monkeypatch):
    inputs = make_inputs(same(40, 3, 17))
    qkv = inputs.q, inputs.k, inputs.v
    cold = attention_varlen(*qkv, **inputs.lengths, causal=True)
    monkeypatch.setattr(request, "describe", None)
    monkeypatch.setattr(packed, "check_lengths", None)
    assert torch.equal(attention_varlen(*qkv, **inputs.lengths, causal=True), cold)
    other = make_inputs(same(8, 1, 30, 2))
    attention_varlen(other.q, other.k, other.v, **other.lengths, causal=True)
    assert len(varlen._warm) == 1
    with pytest.raises(TypeError):  # another kind is described
        attention_varlen(*qkv, **inputs.lengths, causal=False)


def test_backends_without_it_are_passed_over():
    arch, own = "10.0", "sm100"
    inputs = make_inputs(same(40, 3, dtype="bfloat16"))
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    decision = cute_flash.explain(*leaves, **inputs.lengths, arch=arch)
    refused = [
        ("packed sequences (attention_varlen) are not built yet", decision),
        ("the backward of packed sequences (attention_varlen) is not built yet", decision.backward),
    ]
    for sentence, each in refused:
        assert each.plan.backend == "triton" and each.plan.form == "packed" and each.fallback
        assert each.refusals[own] == (sentence,)
    with pytest.raises(UnsupportedError, match="packed sequences"):
        cute_flash.explain(*leaves, **inputs.lengths, arch=arch, backend=own)


def test_hopper_has_it():
    inputs = make_inputs(same(200, 3, dtype="bfloat16"))
    qkv = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    plain = cute_flash.explain(*qkv, **inputs.lengths, arch="9.0").plan
    short = cute_flash.explain(*qkv, **inputs.lengths, max_seqlen_q=40, max_seqlen_k=40, arch="9.0").plan
    assert plain.backend == short.backend == "sm90" and plain.form == short.form == "packed" and plain.draws
    assert short.tile.tile_m == 64 and short.ctas == 2 * plain.ctas
    for deterministic in (False, True):
        backward = cute_flash.explain(*qkv, **inputs.lengths, deterministic=deterministic, arch="9.0").backward
        assert backward.plan.backend == "sm90" and backward.plan.form == "packed" and not backward.fallback
        assert backward.plan.deterministic == deterministic and backward.plan.tile.tile_m == 128
        few = {"max_seqlen_q": 64, "max_seqlen_k": 64, "deterministic": deterministic}
        assert cute_flash.explain(*qkv, **inputs.lengths, **few, arch="9.0").backward.plan.tile.tile_m == 64


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            same(40, 3, head_dim=192),
            "is built up to head dim 128, and for 129 to 192 with a head_dim_v of 65 to 192, not",
        ),
        (same(40, 3, head_dim=256, head_dim_v=256), "not for head_dim=256, head_dim_v=256"),
    ],
)
def test_what_hoppers_backward_lacks_is_said(case, sentence):
    inputs = make_inputs(case)
    qkv = [x.bfloat16().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    decision = cute_flash.explain(*qkv, **inputs.lengths, arch="9.0")
    assert decision.plan.backend == "sm90" and decision.backward.plan.backend == "triton"
    assert sentence in decision.backward.refusals["sm90"][0]


def test_emulated_calls_go_to_the_reference():
    """The emulator runs CuTe-DSL kernels, and Blackwell's have it not: what runs is said, and right."""
    case = same(20, 9, causal=True, dtype="float32")
    inputs = make_inputs(case)
    right = attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths, causal=True)
    half = [x.half() for x in (inputs.q, inputs.k, inputs.v)]
    with settings.override(emulate="sm_100a"), pytest.warns(cute_flash.FallbackWarning, match="packed sequences"):
        out = attention_varlen(*half, **inputs.lengths, causal=True)
    torch.testing.assert_close(out.float(), right, rtol=2e-2, atol=5e-3)


def test_lengths_that_changed_after_the_forward_are_refused():
    inputs = make_inputs(same(10, 20))
    q = inputs.q.clone().requires_grad_()
    out = attention_varlen(q, inputs.k, inputs.v, **inputs.lengths)
    inputs.cu_seqlens_q[1] = 15
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused():
    inputs = make_inputs(same(10, 20))
    q = inputs.q.clone().requires_grad_()
    out = attention_varlen(q, inputs.k, inputs.v, **inputs.lengths)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_autocast_casts_as_attention_does():
    inputs = make_inputs(same(10, 20, dtype="float32"))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths)
    assert out.dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_as_one_operator(return_lse):
    case = PackedCase(*LENGTHS["unequal"], causal=True, window=(30, None), head_dim=16, head_dim_v=24)
    inputs = make_inputs(case)
    compiled = torch.compile(attention_varlen, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in (0, 1):
        inputs = make_inputs(case, seed)
        leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        result = compiled(*leaves, **inputs.lengths, **case.options, return_lse=return_lse)
        out, lse = result if return_lse else (result, None)
        weights = [inputs.dout, inputs.dlse] if return_lse else [inputs.dout]
        grads = torch.autograd.grad([out, lse] if return_lse else [out], leaves, weights)
        if return_lse:
            found = errors(case, inputs, (out, lse), grads)
            assert all(error <= (1 if name == "lse" else 1e-11) for name, error in found.items()), found
        eager = attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths, **case.options)
        assert torch.equal(out, eager)


def test_exported_with_hints_that_are_read_from_the_lengths():
    class Module(torch.nn.Module):
        def forward(self, q, k, v, starts):
            longest = starts.diff().max().item()
            return attention_varlen(
                q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest
            )

    inputs = make_inputs(same(10, 5, head_dim=16, head_dim_v=16))
    arguments = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q
    exported = torch.export.export(Module(), arguments, strict=False).module()
    assert torch.equal(exported(*arguments), Module()(*arguments))


def test_one_graph_serves_all_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_varlen, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ((10, 5), (7, 9, 30), (3,) * 6, (64, 1, 2, 80)):
        inputs = make_inputs(same(*lengths))
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        out = compiled(inputs.q, inputs.k, inputs.v, **inputs.lengths, **longest, causal=True)
        assert torch.equal(out, attention_varlen(inputs.q, inputs.k, inputs.v, **inputs.lengths, causal=True))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_of_the_backward(with_dlse):
    inputs = make_inputs(same(10, 5, head_dim=16, head_dim_v=16))
    tensors, rest = (inputs.q, inputs.k, inputs.v), (*inputs.lengths.values(), None, None)
    words = (True, 5, None, 0.3, 4.0, False, None)
    out, lse = torch.ops.cute_flash.attention_varlen(*tensors, *rest, True, *words)
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(
        torch.ops.cute_flash.attention_varlen_backward.default,
        (torch.randn_like(out), dlse, *tensors, out, lse, *rest, *words),
    )


def test_opcheck():
    inputs = make_inputs(same(10, 5, head_dim=16, head_dim_v=16))
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    words = (True, 5, None, None, None, False, None)
    torch.library.opcheck(
        torch.ops.cute_flash.attention_varlen.default,
        (*leaves, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 10, None, True, *words),
    )


def test_the_operator_checks_what_it_is_given():
    inputs = make_inputs(same(10, 5))
    words = (True, None, None, None, None, False, None)
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32"):
        torch.ops.cute_flash.attention_varlen(
            inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q.long(), inputs.cu_seqlens_k, None, None, False, *words
        )
