"""The public call on CPU tensors: numbers against the oracle, gradients, layouts, refusals, and the warm path."""

import math
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import cute_flash
from cute_flash import UnsupportedError, attention
from cute_flash.runtime import launch, request
from cute_flash.spec import settings
from cute_flash.spec.problem import SHORT_KEYS, SMALL_ROWS, SMALL_ROWS_FULL

from .. import oracle
from ..fakes import FakeBackend, nothing

pytestmark = pytest.mark.usefixtures("office")

ROOT = Path(__file__).resolve().parents[2]


def qkv(batch=2, seqlen_q=37, seqlen_k=53, heads=(4, 2), dims=(24, 40), dtype=torch.float64, requires_grad=True):
    torch.manual_seed(0)
    shapes = (
        (batch, seqlen_q, heads[0], dims[0]),
        (batch, seqlen_k, heads[1], dims[0]),
        (batch, seqlen_k, heads[1], dims[1]),
    )
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes)


def check(q, k, v, *, with_lse=True, **options):
    """Output, LSE and gradients, all against the oracle in float64."""
    out, lse = attention(q, k, v, return_lse=True, **options)
    right = oracle.forward(q, k, v, **options)
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.is_contiguous() and out.dtype == q.dtype
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert oracle.relative_error(out, right.out) < 1e-12
    assert oracle.lse_excess(lse, right.lse) <= 1
    dout = torch.randn_like(out)
    dlse = torch.randn_like(lse) if with_lse else None
    outputs, weights = ([out, lse], [dout, dlse]) if with_lse else ([out], [dout])
    grads = torch.autograd.grad(outputs, (q, k, v), weights)
    for grad, expected in zip(grads, oracle.backward(q, k, v, dout, dlse, **options), strict=True):
        # absolute where the right answer is 0 (one visible key: dq and dk vanish)
        assert torch.linalg.vector_norm(grad - expected) < 1e-11 * (1 + torch.linalg.vector_norm(expected))


# --------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(37, 53), (53, 37), (1, 1), (1, 64), (64, 1)])
def test_output_lse_and_gradients(causal, lengths):
    check(*qkv(seqlen_q=lengths[0], seqlen_k=lengths[1]), causal=causal)
    check(*qkv(seqlen_q=lengths[0], seqlen_k=lengths[1]), causal=causal, with_lse=False)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (7, 1), (8, 1)])
def test_grouped_heads(heads):
    check(*qkv(heads=heads), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, 3, -0.125, -1, 0.0, 0])
def test_any_scale_is_computed_right(causal, scale):
    check(*qkv(seqlen_q=40, seqlen_k=33), causal=causal, scale=scale)


def test_scale_zero_is_the_mean_and_negative_is_minus_k():
    q, k, v = qkv(seqlen_q=4, seqlen_k=4, heads=(1, 1), dims=(64, 64), requires_grad=False)
    out, lse = attention(q, k, v, causal=True, scale=0, return_lse=True)
    for i in range(4):
        assert torch.allclose(out[:, i], v[:, : i + 1].mean(1))
    assert torch.allclose(lse[0, 0], torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).log())
    assert torch.equal(attention(q, k, v, causal=True, scale=-0.125), attention(q, -k, v, causal=True, scale=0.125))


def test_lse_is_natural():
    q = torch.zeros(1, 2, 1, 8)
    k = torch.randn(1, 8, 1, 8)
    assert torch.allclose(attention(q, k, k, return_lse=True)[1], torch.tensor(math.log(8)))


def test_causal_is_aligned_bottom_right():
    q, v = torch.zeros(1, 2, 1, 8), torch.eye(5, 8)[None, :, None]
    out = attention(q, torch.zeros(1, 5, 1, 8), v, causal=True)[0, :, 0, :5]
    assert torch.allclose(out, torch.tensor([[0.25] * 4 + [0], [0.2] * 5]))


def test_a_window_of_another_option_never_changes_the_next_call():
    q, k, v = qkv(requires_grad=False)
    first = attention(q, k, v, scale=0.1)
    assert not torch.equal(attention(q, k, v, scale=0.2), first)
    assert torch.equal(attention(q, k, v, scale=0.1), first)


def test_bounds_and_caps_are_run_time_values_of_one_plan():
    q, k, v = qkv(requires_grad=False)
    asked = [{"window": window, "softcap": cap} for window in ((1, 0), (9, 0)) for cap in (2.0, 30)]
    plans = {cute_flash.explain(q, k, v, **options).plan for options in asked}
    assert len(plans) == 1
    assert str(plans.pop().mask) == "window(left,0)"
    kinds = {(None, 0): "causal", (4, None): "window(left,None)", (None, 4): "window(None,right)"}
    for window, name in kinds.items():
        assert str(cute_flash.explain(q, k, v, window=window).plan.mask) == name
        assert str(cute_flash.explain(q, k, v, window=window).problem.mask) == name
    assert str(cute_flash.explain(q, k, v, window=(4, 2), causal=True).plan.mask) == "window(left,0)"
    assert not cute_flash.explain(q, k, v, softcap=0).plan.softcap


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"window": (3, 0)}, {"window": [3, None], "causal": True}),
        ({"window": (3, 0)}, {"window": (3, 7), "causal": True}),
        ({"window": (None, 0)}, {"causal": True}),
        ({"window": (10**12, 4)}, {"window": (None, 4)}),
        ({"softcap": 3}, {"softcap": 3.0}),
    ],
    ids=str,
)
def test_spellings_of_one_request_agree(one, other):
    q, k, v = qkv(requires_grad=True)
    first, second = attention(q, k, v, **one), attention(q, k, v, **other)
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (first, second)]
    assert torch.equal(first, second) and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# ----------------------------------------------------------------------------------------------------------- empty


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_give_zero_minus_infinity_and_zero_gradients(causal):
    q, k, v = qkv(2, 64, 0, (4, 4), (64, 64))
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 64, 4, 64, dtype=out.dtype)) and (lse == -math.inf).all()
    for grad, tensor in zip(torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == tensor.shape and not grad.any()


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"heads": (0, 0)}, {"heads": (0, 2)}], ids=str)
def test_nothing_asked_gives_nothing_back(shape):
    q, k, v = qkv(**shape)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    attention(q, k, v).sum().backward()
    assert all(not t.grad.any() and t.grad.shape == t.shape for t in (q, k, v))


def test_an_empty_call_is_refused_where_a_full_one_is(backends):
    backends(FakeBackend("sm90", refusals=("no such luck",)))
    q, k, v = qkv(seqlen_k=0)
    with pytest.raises(UnsupportedError, match="no such luck"):
        attention(q, k, v)


def test_kernels_never_see_an_empty_dimension(backends):
    seen = []
    backends(FakeBackend("sm90", kernel=lambda *operands: seen.append(operands)))
    full = qkv(requires_grad=False)
    attention(*full)
    for empty in (qkv(batch=0), qkv(seqlen_q=0), qkv(seqlen_k=0), qkv(heads=(0, 0))):
        attention(*(t.detach() for t in empty))
    assert len(seen) == 1


# ------------------------------------------------------------------------------------------------------- gradients


def test_only_the_inputs_that_need_gradients_get_them():
    for needy in range(3):
        inputs = list(qkv(requires_grad=False))
        inputs[needy].requires_grad_()
        attention(*inputs).sum().backward()
        assert [t.grad is not None for t in inputs] == [number == needy for number in range(3)]


def test_a_gradient_through_lse_alone():
    q, k, v = qkv()
    _, lse = attention(q, k, v, causal=True, return_lse=True)
    dlse = torch.randn_like(lse)
    zero = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    expected = oracle.backward(q, k, v, zero, dlse, causal=True)
    for grad, right in zip(torch.autograd.grad(lse, (q, k, v), dlse), expected, strict=True):
        assert oracle.relative_error(grad, right) < 1e-11


@pytest.mark.parametrize("how", ["sum", "transposed", "cat", "expanded lse"])
def test_gradients_that_arrive_in_odd_layouts(how):
    q, k, v = qkv()

    def loss(out, lse):
        if how == "sum":
            return out.sum()
        if how == "transposed":
            return (out.transpose(1, 2) * torch.arange(40.0, dtype=out.dtype)).sum()
        if how == "cat":
            return (torch.cat([out.flatten(2), out.flatten(2)], -1) ** 2).sum()
        return out.sum() + lse.sum()

    out, lse = attention(q, k, v, return_lse=True)
    leaves = [out.detach().requires_grad_(), lse.detach().requires_grad_()]
    dout, dlse = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
    expected = oracle.backward(q, k, v, dout.contiguous(), dlse)
    for grad, right in zip(torch.autograd.grad(loss(out, lse), (q, k, v)), expected, strict=True):
        assert oracle.relative_error(grad, right) < 1e-11


def test_double_backward_is_an_error_and_create_graph_alone_is_not():
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    (plain,) = torch.autograd.grad(attention(q, k, v).sum(), q)
    assert torch.equal(grad.detach(), plain)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        grad.sum().backward()


def test_forward_mode_derivatives_are_refused_and_not_lost():
    q, k, v = qkv(requires_grad=False)
    expected = attention(q, k, v)  # a warm call must notice too
    with forward_ad.dual_level():
        assert torch.equal(attention(q, k, v), expected)
        with pytest.raises(UnsupportedError, match="v carries a tangent: forward-mode derivatives are not built"):
            attention(q, k, forward_ad.make_dual(v, torch.ones_like(v)))


def test_no_grad_keeps_no_graph():
    q, k, v = qkv()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert attention(q, k, v).requires_grad


def test_lse_is_neither_allocated_nor_written_unless_somebody_needs_it(backends):
    seen = []
    (backend,) = backends(FakeBackend("sm90", kernel=lambda *operands: seen.append(operands[4])))
    q, k, v = qkv(requires_grad=False)
    attention(q, k, v)
    attention(q, k, v, return_lse=True)
    attention(q.requires_grad_(), k, v)
    assert [plan.lse for plan in backend.built] == [False, True]
    assert seen[0] is None and all(lse.dtype == torch.float64 for lse in seen[1:])


def test_the_backward_is_told_of_every_option(backends):
    (backend,) = backends(FakeBackend("sm90"))
    q, k, v = qkv(dtype=torch.bfloat16)
    attention(q, k, v, causal=True, deterministic=True, return_lse=True)[0].sum().backward()
    attention(q, k, v, causal=True, return_lse=True)[1].sum().backward()
    backward = [plan for plan in backend.built if plan.direction == "backward"]
    assert [plan.lse_grad for plan in backward] == [False, True]
    assert all(plan.mask.causal and (plan.head_dim, plan.head_dim_v) == (24, 40) for plan in backward)
    assert [plan.deterministic for plan in backward] == [True, False]


def test_the_backward_gets_the_scale_of_the_forward(backends):
    scales = []
    backends(FakeBackend("sm90", kernel=lambda *operands: scales.append(operands[-1])))
    q, k, v = qkv()
    attention(q, k, v, scale=0.7).sum().backward()
    attention(q, k, v).sum().backward()
    assert scales == [0.7, 0.7, 24**-0.5, 24**-0.5]


# --------------------------------------------------------------------------------------------------------- layouts


def test_strided_and_expanded_inputs_give_the_same_bits():
    q, k, v = qkv(requires_grad=False)
    expected = attention(q, k, v, causal=True)
    views = {
        "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "batch inside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "every second": lambda t: torch.stack([t, t], 2).flatten(1, 2)[:, ::2],
        "last dim strided": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    }
    for name, view in views.items():
        for odd in ((view(q), k, v), (q, view(k), v), (q, k, view(v))):
            assert torch.equal(attention(*odd, causal=True), expected), name
    one = k[:1, :, :1].expand(2, -1, 2, -1)
    assert torch.equal(attention(q, one, v), attention(q, one.contiguous(), v))


def test_gradients_of_an_expanded_input_sum():
    q, k, v = qkv()
    shared = k.detach()[:, :, :1].clone().requires_grad_()
    attention(q, shared.expand(-1, -1, 2, -1), v).sum().backward()
    separate = shared.detach().repeat(1, 1, 2, 1).requires_grad_()
    attention(q, separate, v).sum().backward()
    assert torch.allclose(shared.grad, separate.grad.sum(2, keepdim=True))


class Picky(FakeBackend):
    """Demands 16-byte rows and answers through the reference: what the office does to the operands must not show."""

    def __init__(self):
        super().__init__("sm90", exports=False, row_alignment=16)

    def build(self, plan):
        from cute_flash.arch.reference.backend import BACKEND
        from cute_flash.arch.reference.tiles import TILE

        inner = BACKEND.build(replace(plan, tile=TILE))

        def kernel(*operands):
            for operand in operands:
                if (
                    isinstance(operand, torch.Tensor)
                    and operand.dim() == 4
                    and request.alignment_faults("x", operand, 16)
                ):
                    raise ValueError("Misaligned Tensor data")
            inner(*operands)

        return kernel


@pytest.mark.parametrize("dims", [(9, 9), (20, 33), (40, 33), (33, 40)])
def test_padding_an_odd_head_dim_shows_nowhere(backends, dims):
    backends(Picky())
    check(*qkv(dims=dims), causal=True)


def test_misaligned_inputs_and_gradients_are_copied_for_a_backend_that_needs_it(backends):
    backends(Picky())
    q, k, v = qkv(dims=(24, 40), dtype=torch.float32, requires_grad=False)
    odd = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t).requires_grad_() for t in (q, k, v)]
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    dout = torch.randn(2, 40, 4, 37).transpose(1, 3)  # last dimension strided
    out, expected = attention(*odd), attention(*plain)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out, odd, dout), torch.autograd.grad(expected, plain, dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_kernel_of_another_gpu_is_launched_under_its_device(monkeypatch):
    """TVM-FFI switches devices by itself; others are wrapped, and pay only where the current device differs."""
    current, entered = [0], []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    kernel = launch.on_device(lambda x: x + 1, torch.device("cuda", 1), exports=False)
    assert kernel(1) == 2 and entered == [1]
    current[0] = 1
    assert kernel(1) == 2 and entered == [1]
    assert launch.on_device(nothing, torch.device("cuda", 1), exports=True) is nothing


def test_return_arity():
    q, k, v = qkv(requires_grad=False)
    assert isinstance(attention(q, k, v), torch.Tensor)
    for _ in range(2):
        pair = attention(q, k, v, return_lse=True)
        assert isinstance(pair, tuple) and len(pair) == 2


def test_torch_deterministic_implies_deterministic(backends):
    (backend,) = backends(FakeBackend("sm90"))
    q, k, v = qkv(requires_grad=False)
    attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    attention(q, k, v, deterministic=True)
    attention(q, k, v)
    assert [plan.deterministic for plan in backend.built] == [False, True]


@pytest.mark.parametrize("how", ["older name", "newer name"])
def test_float32_is_ieee_unless_torch_allows_tf32(backends, how):
    """In a process of its own: torch refuses to mix its two names for the switch, for good."""
    allow = {
        "older name": "torch.backends.cuda.matmul.allow_tf32 = True",
        "newer name": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    }[how]
    code = f"""
import torch
from cute_flash import attention
import cute_flash.arch as arch
from tests.fakes import FakeBackend
backend = FakeBackend("triton")
arch.BACKENDS = (backend,)
q = torch.zeros(1, 3, 2, 8)
attention(q, q, q)
{allow}
attention(q, q, q)
assert [plan.ieee_float32 for plan in backend.built] == [True, False], backend.built
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------- warm path


def test_new_sizes_stay_warm_and_new_kinds_do_not(backends, monkeypatch):
    backends(FakeBackend("sm90"))
    cold = []
    prepare = launch.prepare
    monkeypatch.setattr(launch, "prepare", lambda *arguments: cold.append(arguments) or prepare(*arguments))
    monkeypatch.setattr(request, "check_tensors", lambda *_: None)

    def call(batch=1, seqlen=8, dtype=torch.bfloat16, **options):
        q = torch.zeros(batch, seqlen, 2, 16, dtype=dtype)
        return attention(q, q, q, **options)

    call()
    for batch in range(1, 5):
        for seqlen in (1, 8, 1000, 1001):
            call(batch, seqlen)
            call(batch, seqlen, scale=0.25)
    assert len(cold) == 1
    for options in ({"causal": True}, {"return_lse": True}, {"dtype": torch.float16}, {"backend": "sm90"}):
        call(**options)
    call(1, SHORT_KEYS + 1)
    call(SMALL_ROWS_FULL // (2 * 64), 64)  # two heads: as many rows as count as few
    call(SMALL_ROWS // (2 * 64), 64, causal=True)
    assert len(cold) == 6
    call(SMALL_ROWS_FULL // (2 * 64), 65)
    assert len(cold) == 7


def test_a_change_of_settings_is_seen_at_once(backends):
    first, second = backends(FakeBackend("sm90"), FakeBackend("triton"))
    q, k, v = qkv(requires_grad=False)
    attention(q, k, v)
    with settings.override(backend="triton"):
        attention(q, k, v)
    assert len(first.built) == len(second.built) == 1


def test_many_threads_may_call_at_once(backends):
    (backend,) = backends(FakeBackend("sm90", kernel=lambda q, k, v, out, lse, scale: out.copy_(q)))
    q, k, v = qkv(dims=(24, 24), requires_grad=False)
    right = []
    threads = [threading.Thread(target=lambda: right.append(torch.equal(attention(q, k, v), q))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8 and len(backend.built) == 1


# ---------------------------------------------------------------------------------------------------------- import

_BARE = """
import sys, time, torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "triton", "tvm_ffi", "cuda"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Block())
for name in [n for n in sys.modules if n.split(".")[0] in ("cutlass", "triton", "tvm_ffi", "cuda")]:
    del sys.modules[name]
start = time.process_time()
import cute_flash
seconds = time.process_time() - start
q = torch.randn(1, 4, 2, 8, requires_grad=True)
cute_flash.attention(q, q, q).sum().backward()
assert q.grad is not None
print(cute_flash.explain(q, q, q))
assert seconds < 0.3, seconds
"""


def test_import_works_with_no_compiler_and_is_cheap():
    done = subprocess.run([sys.executable, "-c", _BARE], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "runs: reference" in done.stdout


def test_the_shop_window():
    assert all(hasattr(cute_flash, name) for name in cute_flash.__all__)
    assert cute_flash.attention.__doc__ and "seqlen_k - seqlen_q" in cute_flash.attention.__doc__
