"""attention as an operator: torch.compile, torch.export, fake tensors, checkpoints. All on CPU, by the reference."""

import functools
import io
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cute_flash
from cute_flash import attention
from cute_flash.runtime import ops

from .. import oracle
from ..fakes import HostDslBackend

pytestmark = pytest.mark.usefixtures("office")

FORWARD, BACKWARD = torch.ops.cute_flash.attention, torch.ops.cute_flash.attention_backward
WORDS = (True, 9, None, 0.3, 5.0, False, None)  # causal, left, right, scale, softcap, deterministic, backend


def qkv(batch=2, seqlen_q=37, seqlen_k=53, dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(batch + seqlen_q + seqlen_k)
    shapes = (batch, seqlen_q, 6, 16), (batch, seqlen_k, 3, 16), (batch, seqlen_k, 3, 24)
    return tuple(torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(requires_grad) for shape in shapes)


class Graphs:
    """A torch.compile backend that keeps what it is handed: a graph a compilation, and what autograd makes of it."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd

        self.traced, self.forwards, self.backwards = 0, [], []
        self._compile = aot_autograd(
            fw_compiler=functools.partial(self._keep, self.forwards),
            bw_compiler=functools.partial(self._keep, self.backwards),
        )

    @staticmethod
    def _keep(shelf, graph, example_inputs):
        from functorch.compile import make_boxed_func

        shelf.append(graph)
        return make_boxed_func(graph.forward)

    def __call__(self, graph, example_inputs):
        self.traced += 1
        return self._compile(graph, example_inputs)


def operators(graph) -> list[str]:
    """Ours among the nodes of a graph."""
    return [str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("cute_flash.")]


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def everything(function, inputs, *options):
    """(out, lse, dq, dk, dv) of function(q, k, v, *options) -> (out, lse)."""
    out, lse = function(*inputs, *options)
    weights = torch.cos(torch.arange(out.numel()).view_as(out)).to(out), torch.ones_like(lse)
    return out, lse, *torch.autograd.grad((out, lse), inputs, weights)


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------------------------------------------------ compile


def test_one_graph_serves_every_size_and_every_bound(graphs):
    """fullgraph: a graph break raises. The second graph is dynamo's: sizes 2 and 3 of the first call looked alike."""

    def call(q, k, v, left, softcap):
        return attention(q, k, v, causal=True, window=(left, None), softcap=softcap, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    for batch, seqlen_q, seqlen_k, left in ((2, 37, 53, 9), (5, 41, 77, 3), (4, 90, 90, 70), (2, 30, 1100, 500)):
        inputs = qkv(batch, seqlen_q, seqlen_k)
        assert same(everything(compiled, inputs, left, 5.0), everything(call, inputs, left, 5.0))
    assert graphs.traced <= 2
    assert operators(graphs.forwards[0]) == ["attention"]
    assert operators(graphs.backwards[0]) == ["attention_backward"]


def test_sizes_that_change_compile_twice_by_default(graphs):
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend=graphs)
    for batch, seqlen in ((2, 37), (2, 41), (2, 77), (5, 41), (4, 1030)):
        q, k, v = qkv(batch, seqlen, seqlen, requires_grad=False)
        assert torch.equal(compiled(q, k, v), attention(q, k, v, causal=True))
    assert graphs.traced <= 3  # static, seqlen symbolic, batch symbolic too


def test_a_graph_guards_little_of_this_library(graphs):
    """Each value that is looked up while tracing is compared at every call: twice as many took 10 us more."""
    ours: list[str] = []

    def keep_all(entries):
        ours.extend(entry.name for entry in entries if "cute_flash" in entry.name)
        return [True] * len(entries)

    def call(q, k, v):
        return cute_flash.attention(q, k, v, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager", options={"guard_filter_fn": keep_all})
    with torch.no_grad():
        compiled(*qkv(requires_grad=False))
    assert 0 < len(ours) < 70, ours


def test_gradients_of_a_graph_are_right(graphs):
    compiled = torch.compile(functools.partial(attention, return_lse=True), fullgraph=True, backend=graphs)
    inputs = qkv()
    for options in ({"causal": True, "scale": -0.3}, {"window": [3, 8], "softcap": 4}, {"scale": 0.0}):
        out, lse = compiled(*inputs, **options)
        right = oracle.forward(*inputs, **options)
        assert oracle.relative_error(out, right.out) < 1e-12 and oracle.lse_excess(lse, right.lse) <= 1
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
        for grad, expected in zip(grads, oracle.backward(*inputs, dout, dlse, **options), strict=True):
            assert torch.linalg.vector_norm(grad - expected) < 1e-11 * (1 + torch.linalg.vector_norm(expected))


def test_inference_asks_for_no_lse_and_training_for_one(graphs):
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend=graphs)
    asked = []
    for requires_grad in (False, True):
        compiled(*qkv(requires_grad=requires_grad))
        (node,) = (n for n in graphs.forwards[-1].graph.nodes if str(n.target).startswith("cute_flash."))
        asked.append(node.args[3])
    with torch.no_grad():
        compiled(*qkv())
    assert asked == [False, True] and operators(graphs.forwards[-1]) == ["attention"]


def test_attention_itself_and_decorated_attention_compile(graphs):
    """functools.wraps copies the attributes of what it wraps: a compiler that followed them would skip the wrapper."""

    @functools.wraps(attention)
    def heads_first(q, k, v, **options):
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    inputs = qkv(requires_grad=False)
    turned = [x.transpose(1, 2) for x in inputs]
    expected = attention(*inputs, causal=True)
    assert torch.equal(torch.compile(attention, fullgraph=True, backend=graphs)(*inputs, causal=True), expected)
    for call in (heads_first, lambda *args, **options: heads_first(*args, **options)):
        compiled = torch.compile(call, fullgraph=True, backend=graphs)
        assert torch.equal(compiled(*turned, causal=True).transpose(1, 2), expected)


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (lambda q, k, v: (q, k[:1], v), {}, "q, k and v must have one batch size, got 2, 1 and 2"),
        (lambda q, k, v: (q, k, v.float()), {}, "q, k and v must have one dtype, got q torch.float64"),
        (lambda q, k, v: (q, k, v), {"window": (-1, 0)}, "None (not -1) means unbounded"),
        (lambda q, k, v: (q, k, v), {"sink": 1}, "sink= is not built yet"),
        (lambda q, k, v: (q, k, v), {"is_causal": True}, "attention() has no argument is_causal= (here: causal=)"),
    ],
)
def test_a_graph_is_refused_in_the_words_of_eager_mode(graphs, change, options, sentence):
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **options), fullgraph=True, backend=graphs)
    with pytest.raises(Exception) as caught:
        compiled(*change(*qkv(requires_grad=False)))
    assert sentence in str(caught.value)


def test_inductor_runs_the_same_operator():
    if not _has_compiler():
        pytest.skip("Inductor needs a C++ compiler, none is installed here")
    inputs = qkv()
    compiled = torch.compile(lambda q, k, v: attention(q * 2, k, v, causal=True, return_lse=True), fullgraph=True)
    assert same(
        everything(compiled, inputs),
        everything(lambda q, k, v: attention(q * 2, k, v, causal=True, return_lse=True), inputs),
    )


def _has_compiler() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


IMPORTS = """
import sys, torch
{before}import cute_flash
assert ('torch._dynamo' in sys.modules) == {loaded}
import torch._dynamo
assert torch._dynamo.__spec__.loader is torch._dynamo.__loader__ and 'SourceFile' in str(torch._dynamo.__loader__)
compiled = torch.compile(cute_flash.attention, fullgraph=True, backend='eager')
q = torch.randn(1, 5, 2, 16)
assert torch.equal(compiled(q, q, q), cute_flash.attention(q, q, q))
"""


@pytest.mark.parametrize("before", ["", "import torch._dynamo\n"])
def test_the_compiler_learns_of_attention_whoever_is_imported_first(before):
    """And importing this package does not import the compiler."""
    program = IMPORTS.format(before=before, loaded=bool(before))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


# ----------------------------------------------------------------------------------------------------------- autocast


def cast_by_sdpa(q, k, v):
    """Does SDPA return 16 bits for these? In its own layout, heads made equal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v[..., :16]).dtype


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_what_sdpa_casts(graphs, compiled):
    call = torch.compile(attention, fullgraph=True, backend=graphs) if compiled else attention
    single, half = (qkv(dtype=dtype, requires_grad=False) for dtype in (torch.float32, torch.bfloat16))
    mixtures = [single, (single[0], half[1], half[2]), (half[0], single[1], half[2]), half]
    for inputs in (*mixtures, *mixtures):  # twice: cold, then warm
        with torch.autocast("cpu", torch.bfloat16):
            out = call(*inputs)
            assert out.dtype == cast_by_sdpa(*inputs) == torch.bfloat16
        assert torch.equal(out, attention(*(x.bfloat16() for x in inputs)))
    assert call(*single).dtype == torch.float32  # outside, nothing is cast
    double = qkv(requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*double).dtype == torch.float64  # nor is float64 ever, there as here


@pytest.mark.parametrize("needy", [0, 1, 2])
def test_autocast_gradients_come_back_in_the_dtype_of_the_inputs(needy):
    inputs = [x.detach() for x in qkv(dtype=torch.float32)]
    inputs[1 if needy == 0 else 0] = inputs[1 if needy == 0 else 0].bfloat16()
    inputs[needy].requires_grad_()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*inputs, causal=True)
        (grad,) = torch.autograd.grad(out.float().sum(), inputs[needy])
        expected = oracle.backward(*inputs, torch.ones_like(out), causal=True)[needy]
        assert grad.dtype == inputs[needy].dtype and oracle.relative_error(grad, expected) < 0.02


def test_mixed_dtypes_are_refused_outside_autocast():
    single, half = (qkv(dtype=dtype, requires_grad=False) for dtype in (torch.float32, torch.bfloat16))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"one dtype, got q torch.float32, k torch.bfloat16"):
            attention(single[0], *half[1:])
        attention(*single)


# ------------------------------------------------------------------------------------------------- checkpoint, export


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(graphs, use_reentrant, compiled):
    def block(q, k, v):
        return attention(q.sin(), k, v, causal=True)

    def checkpointed(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=use_reentrant)

    call = torch.compile(checkpointed, fullgraph=True, backend=graphs) if compiled else checkpointed
    inputs = qkv()
    call(*inputs).sum().backward()  # the reentrant kind takes no other way
    assert same((x.grad for x in inputs), torch.autograd.grad(block(*inputs).sum(), inputs))
    if compiled:  # recomputed in the backward: both operators stand there
        assert operators(graphs.backwards[0]) == ["attention", "attention_backward"]


def test_selective_checkpointing_keeps_attention_out_of_the_recomputation(graphs):
    policy = functools.partial(create_selective_checkpoint_contexts, [FORWARD.default])

    def call(q, k, v):
        return checkpoint(lambda *x: attention(*x).cos(), q, k, v, use_reentrant=False, context_fn=policy)

    assert CheckpointPolicy.MUST_SAVE  # what a list of operators means
    inputs = qkv()
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    grads = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    assert same(grads, torch.autograd.grad(attention(*inputs).cos().sum(), inputs))
    assert operators(graphs.backwards[0]) == ["attention_backward"]


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q * 2, k, v, causal=True, window=(200, None))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_export_keeps_the_operator_and_every_length(strict, warm):
    model = Model()
    inputs = qkv(requires_grad=False)
    if warm:
        model(*inputs)
    batch, seqlen_q, seqlen_k = (torch.export.Dim(name, min=2, max=5000) for name in ("b", "m", "n"))
    sizes = {0: batch, 1: seqlen_q}, {0: batch, 1: seqlen_k}, {0: batch, 1: seqlen_k}
    program = torch.export.export(model, inputs, dynamic_shapes=sizes, strict=strict)
    assert operators(program) == ["attention"]
    file = io.BytesIO()
    torch.export.save(program, file)
    program = torch.export.load(io.BytesIO(file.getvalue()))
    for lengths in ((2, 37, 53), (3, 2, 2000), (2, 300, 300)):
        other = qkv(*lengths, requires_grad=False)
        assert torch.equal(program.module()(*other), model(*other))


def test_an_exported_model_can_be_differentiated_though_its_inputs_needed_no_gradient():
    inputs = qkv(requires_grad=False)
    program = torch.export.export(Model(), inputs)
    needy = [x.requires_grad_() for x in inputs]
    grads = (torch.autograd.grad(model(*needy).sum(), needy) for model in (program.module(), Model()))
    assert same(*grads)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("exports", [False, True])
def test_fake_tensors_take_the_operator(backends, exports, warm):
    """An exporting kernel takes tensors through their memory, the reference through torch: both notice."""
    if exports:
        pytest.importorskip("cutlass")
        backends(HostDslBackend())
    q = torch.randn(2, 37, 4, 64, dtype=torch.bfloat16)
    if warm:
        attention(q, q, q, return_lse=True)
    mode = FakeTensorMode()
    fake = mode.from_tensor(q)
    out, lse = attention(fake, fake, fake, return_lse=True)
    assert isinstance(out, FakeTensor) and out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (2, 4, 37) and lse.dtype == torch.float32


@pytest.mark.parametrize("exports", [False, True])
def test_tensors_without_memory_of_their_own_are_refused(backends, exports):
    """A kernel would follow their null pointer. DTensor is such a one; TwoTensor needs no process group."""
    from torch.testing._internal.two_tensor import TwoTensor

    if exports:
        pytest.importorskip("cutlass")
        backends(HostDslBackend())
    q = torch.randn(1, 5, 2, 64, dtype=torch.bfloat16)
    for _ in range(2):  # cold, then warm
        with pytest.raises(TypeError, match=r"q is a TwoTensor: kernels read plain tensors.*to_local"):
            attention(TwoTensor(q, q), TwoTensor(q, q), TwoTensor(q, q))
        for name, inputs in (("k", (q, TwoTensor(q, q), q)), ("v", (q, q, TwoTensor(q, q)))):
            with pytest.raises(TypeError, match=f"{name} is a TwoTensor: kernels read plain tensors"):
                attention(*inputs)
        attention(q, q, q)
        with torch.no_grad():
            assert torch.equal(attention(torch.nn.Parameter(q), q, q), attention(q, q, q))


@pytest.mark.parametrize("which", ["dout", "dlse"])
def test_gradients_without_memory_of_their_own_are_refused(which):
    from torch.testing._internal.two_tensor import TwoTensor

    q, k, v = qkv(1, 5, 5, requires_grad=True)
    out, lse = attention(q, k, v, return_lse=True)
    result = out if which == "dout" else lse
    with pytest.raises(TypeError, match=f"{which} is a TwoTensor: kernels read plain tensors"):
        torch.autograd.grad(result, q, TwoTensor(torch.ones_like(result), torch.ones_like(result)))


# ---------------------------------------------------------------------------------------------------- the operators


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("words", [WORDS, (False, None, 2, None, None, True, "reference")])
def test_opcheck_of_the_forward(requires_grad, lse, words):
    torch.library.opcheck(FORWARD, (*qkv(2, 7, 9, requires_grad=requires_grad), lse, *words))


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_of_the_backward(with_dlse):
    q, k, v = qkv(2, 7, 9, requires_grad=False)
    out, lse = FORWARD(q, k, v, True, *WORDS)
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(BACKWARD, (torch.randn_like(out), dlse, q, k, v, out, lse, *WORDS))


def test_operators_are_attention(poisoned_empty):
    inputs = qkv()
    options = {"causal": True, "window": (9, None), "scale": 0.3, "softcap": 5.0}
    ours = everything(lambda *x: FORWARD(*x, True, *WORDS), inputs)
    assert same(ours, everything(functools.partial(attention, return_lse=True, **options), inputs))


@pytest.mark.parametrize("recording", [False, True])
def test_operators_of_nothing_and_of_lazy_signs(recording):
    q, k, v = qkv(requires_grad=False)
    with torch.set_grad_enabled(recording):
        out, lse = FORWARD(q, k[:, :0], v[:, :0], True, *WORDS)
        assert not out.any() and bool((lse == -torch.inf).all())
        assert not any(x.any() for x in BACKWARD(out, None, q, k[:, :0], v[:, :0], out, lse, *WORDS))
        plain, lazy = FORWARD(-q, k, v, False, *WORDS), FORWARD(torch._neg_view(q), k, v, False, *WORDS)
        assert torch.equal(plain[0], lazy[0]) and lazy[1].numel() == 0


def test_an_operator_in_a_graph_enters_python_once():
    """Gradients off, as a graph runs it: autograd's kernel calls what runs. Else it asks the dispatcher again."""
    q, k, v = qkv(requires_grad=False)
    out, lse = FORWARD(q, k, v, True, *WORDS)
    for operator, arguments in (
        (FORWARD.default, (q, k, v, True, *WORDS)),
        (BACKWARD.default, (out, lse, q, k, v, out, lse, *WORDS)),
    ):
        for grad in (False, True):
            entered: list[str] = []
            with torch.set_grad_enabled(grad):
                sys.setprofile(lambda frame, event, _, entered=entered: entered.append(frame.f_code.co_name))
                try:
                    operator(*arguments)
                finally:
                    sys.setprofile(None)
            assert ("redispatch" in entered) is grad


def test_modes_see_the_operator_where_no_gradient_is_recorded():
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    q, k, v = qkv(requires_grad=False)
    with torch.no_grad(), Seeing():
        out, _ = FORWARD(q, k, v, False, *WORDS)
    assert seen == ["cute_flash.attention.default"] and torch.equal(out, FORWARD(q, k, v, False, *WORDS)[0])


def test_operators_refuse_what_attention_refuses():
    q, k, v = qkv(requires_grad=False)
    out, lse = FORWARD(q, k, v, True, *WORDS)
    for _ in range(2):  # cold, then warm
        with pytest.raises(ValueError, match="one batch size, got 2, 1 and 2"):
            FORWARD(q, k[:1], v, False, *WORDS)
        with pytest.raises(ValueError, match="k and v must have one seqlen"):
            BACKWARD(out, None, q, k, v[:, :9], out, lse, *WORDS)
        with pytest.raises(TypeError, match="one dtype"):
            FORWARD(q, k.float(), v, False, *WORDS)
        FORWARD(q, k, v, False, *WORDS)
        BACKWARD(out, None, q, k, v, out, lse, *WORDS)
    for scale in (-1.0, 0.0, float("nan")):
        with pytest.raises(ValueError, match=rf"scale={scale}: the operator takes 2\*\*-100 to 2\*\*16"):
            FORWARD(q, k, v, False, True, None, None, scale, None, False, None)
    with pytest.raises(cute_flash.UnsupportedError, match="'sm90' was asked for"):
        FORWARD(q, k, v, False, True, None, None, None, None, False, "sm90")


def test_a_second_derivative_of_the_operator_raises():
    inputs = qkv()
    out, _ = FORWARD(*inputs, True, *WORDS)
    (dq,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        torch.autograd.grad(dq.sum(), inputs[0])


def test_tables_of_kernels_are_bounded(monkeypatch):
    monkeypatch.setattr(ops, "_TABLE_MAX", 2)
    q, k, v = qkv(requires_grad=False)
    for cap in (None, 1.0):
        for causal in (False, True):
            FORWARD(q, k, v, False, causal, None, None, None, cap, False, None)
            assert len(ops._forwards) <= 2
