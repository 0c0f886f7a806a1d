"""SDPA over ours: the same numbers as torch's wherever ours runs, torch's own everywhere else, and said once."""

import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from cute_flash import StrictFallbackError
from cute_flash.integrations import sdpa
from cute_flash.spec import settings

from ..fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("office")

SAID = "scaled_dot_product_attention is torch's: "


def qkv(seqlen_q=9, seqlen_k=13, heads_kv=2, dtype=torch.float64, requires_grad=True):
    torch.manual_seed(0)
    shapes = (2, 4, seqlen_q, 16), (2, heads_kv, seqlen_k, 16), (2, heads_kv, seqlen_k, 24)
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes)


@pytest.fixture
def ours(monkeypatch):
    """The patch on the reference; torch's own raises, so that nothing goes there unnoticed."""

    def forbidden(*args, **options):
        raise AssertionError("went to torch's")

    torchs = sdpa.TORCH
    monkeypatch.setattr(sdpa, "TORCH", forbidden)
    with sdpa.patch(backend="reference"):
        yield torchs
    F.scaled_dot_product_attention = torchs  # the monkeypatched one was put there


def both(torchs, inputs, *args, **options):
    """Outputs and gradients of ours and of torch's: (ours, torch's) a pair each."""
    results = []
    for call in (F.scaled_dot_product_attention, torchs):
        out = call(*inputs, *args, **options)
        weights = torch.cos(torch.arange(out.numel())).view(out.shape).to(out)
        results.append((out, *torch.autograd.grad(out, inputs, weights)))
    return zip(*results, strict=True)


@pytest.mark.parametrize("lengths", list(itertools.product((1, 9, 13), (1, 9, 13))))
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_and_causal_masks_are_torchs(ours, lengths, is_causal):
    """Causal is aligned top-left in SDPA, bottom-right in ours."""
    inputs = qkv(*lengths)
    for mine, theirs in both(ours, inputs, None, 0.0, is_causal, scale=0.3, enable_gqa=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 13), (13, 9)])
def test_causal_biases_are_torchs(capsys, make, lengths):
    """torch's own tells them by the name that is patched: under another they are plain tensors, of nothing."""
    q, k, v = qkv(*lengths, heads_kv=4, requires_grad=False)
    warnings.filterwarnings("ignore", "Lower right causal bias")  # of rows that see no key
    theirs = F.scaled_dot_product_attention(q, k, v, make(*lengths))
    with sdpa.patch(backend="reference"):
        mine = F.scaled_dot_product_attention(q, k, v, make(*lengths))
        on_cpu = sdpa.patch()
        passed_on = F.scaled_dot_product_attention(q, k, v, make(*lengths))
        on_cpu.remove()
        with pytest.raises(RuntimeError, match="is_causal"):
            F.scaled_dot_product_attention(q, k, v, make(*lengths), is_causal=True)
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(passed_on, theirs, rtol=1e-10, atol=1e-12, equal_nan=True)
    went = "see no key" in capsys.readouterr().err
    assert went == (make is causal_lower_right and lengths == (13, 9))


def test_signature_is_torchs():
    """As the documentation has it; torch's is built in and has none to compare with."""
    parameters = inspect.signature(sdpa.scaled_dot_product_attention).parameters
    assert [(p.name, p.default) for p in parameters.values()][3:] == [
        ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False)
    ]  # fmt: skip
    for function in (sdpa.scaled_dot_product_attention, sdpa.TORCH):
        with pytest.raises(TypeError, match="positional arguments"):
            function(*qkv(), None, 0.0, False, 0.3)


def masks(seqlen_q=9, seqlen_k=13):
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda q, k, v: (q, k, v), {"attn_mask": masks()}, "attn_mask is a tensor"),
        (lambda q, k, v: (q[0], k[0], v[0]), {}, "not all 4-D"),
        (lambda q, k, v: (q, k[:1], v[:1]), {}, "batch sizes are broadcast"),
        (lambda q, k, v: (q[..., :4], k[..., :4], v), {}, "head_dim is outside 8..256"),
        (lambda q, k, v: (q[:, :, :0], k, v), {}, "query or key is empty"),
        (lambda q, k, v: (q, k[:, :1], v[:, :1]), {}, "enable_gqa does not explain how"),
        (lambda q, k, v: (q, k, v), {"dropout_p": 0.5}, "dropout_p is above 0"),
        (lambda q, k, v: (q, k, v), {"scale": torch.tensor(0.3)}, "scale is a tensor"),
        (lambda q, k, v: (q, k, v), {"scale": 2.0**-120}, "scale is neither 0 nor from"),
    ],
)
def test_the_rest_goes_to_torchs_and_is_said_once(capsys, change, options, reason):
    inputs = change(*qkv(heads_kv=4))
    with sdpa.patch(backend="reference"):
        for _ in range(2):
            torch.manual_seed(1)
            mine = F.scaled_dot_product_attention(*inputs, **options)
            torch.manual_seed(1)
            assert torch.equal(mine, sdpa.TORCH(*inputs, **options))
    said = capsys.readouterr().err
    assert said.count(SAID) == 1 and reason in said


def test_errors_are_torchs():
    q, k, v = qkv(heads_kv=4)
    with sdpa.patch(backend="reference"), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[..., :8], v)


def test_a_backend_that_cannot_leaves_it_to_torchs(backends, capsys):
    backends(FakeBackend("sm90", refusals=("no luck today",)))
    q, k, v = qkv(heads_kv=4)
    with sdpa.patch(backend="sm90"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), sdpa.TORCH(q, k, v))
    assert "no luck today" in capsys.readouterr().err


def test_strict_raises_where_a_fallback_would_run(backends):
    backends(FakeBackend("sm90", refusals=("no luck today",)), FakeBackend("reference", is_native=False))
    q, k, v = qkv(heads_kv=4)
    with settings.override(strict=True, emulate="sm_90a"), sdpa.patch(), pytest.raises(StrictFallbackError):
        F.scaled_dot_product_attention(q, k, v)


def test_on_a_cpu_torchs_own_is_left_alone(capsys):
    q, k, v = qkv(heads_kv=4)
    with sdpa.patch():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), sdpa.TORCH(q, k, v))
    assert "on cpu ours is the plain reference" in capsys.readouterr().err


def test_patches_overlap_and_end_in_any_order():
    torchs = F.scaled_dot_product_attention
    first = sdpa.patch(backend="reference")
    second = sdpa.patch(deterministic=True)
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    first.remove()
    first.remove()
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    second.remove()
    assert F.scaled_dot_product_attention is torchs
    with pytest.raises(ValueError, match="backend='sm80' is not one of"):
        sdpa.patch(backend="sm80")
    with pytest.raises(KeyError), sdpa.patch():
        raise KeyError
    assert F.scaled_dot_product_attention is torchs


def test_a_patch_may_be_entered_again():
    patch = sdpa.patch(backend="reference")
    for _ in range(2):
        with patch as entered:
            assert entered is patch and F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        assert F.scaled_dot_product_attention is sdpa.TORCH


def test_modules_of_torch_use_it(ours):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 11, 32, dtype=torch.float64, requires_grad=True)
    mine, _ = layer(x, x, x, need_weights=False)
    with torch.no_grad():
        sdpa._open.clear()
        F.scaled_dot_product_attention = ours
        theirs, _ = layer(x, x, x, need_weights=False)
    torch.testing.assert_close(mine, theirs)


def test_it_compiles_whole_on_both_ways(capsys):
    torch._dynamo.reset()
    q, k, v = qkv(requires_grad=False)

    def call(mask, is_causal):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with sdpa.patch(backend="reference"):
        for mask, is_causal in ((None, True), (masks(), False)):
            assert torch.equal(compiled(mask, is_causal), call(mask, is_causal))
    assert capsys.readouterr().err.count(SAID) == 1
