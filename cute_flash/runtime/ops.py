"""attention as torch.library operators: what torch.compile, torch.export and FakeTensorMode see in its place.

    cute_flash::attention           (q, k, v, lse, WORDS) -> (out, lse)          lse has no elements where lse=False
    cute_flash::attention_backward  (dout, dlse, q, k, v, out, lse, WORDS) -> (dq, dk, dv)

WORDS are the options of a call as primitives: whether a bound exists is static, its value may be symbolic, and so may
every size. Eager calls do not come through here, as long as nobody follows what torch computes (request.is_recorded):
a dispatcher's round trip costs more than their whole warm path.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from ..spec import settings
from ..spec.problem import SHORT_KEYS, small_rows
from . import autograd, flops, launch, request
from .launch import Backward, Call
from .request import Options

NAMESPACE = "cute_flash"
WORDS = "bool causal, SymInt? left, SymInt? right, float? scale, float? softcap, bool deterministic, str? backend"
_TABLE_MAX = 4096  # calls that a table remembers; bounded because keys hold settings.generation

Value = TypeVar("Value")

_forwards: dict[tuple[Any, ...], Call] = {}
_backwards: dict[tuple[Any, ...], Backward] = {}


class Words(NamedTuple):
    """The options of a call, as an operator takes them."""

    causal: bool
    left: int | None
    right: int | None
    scale: float | None  # above 0; None = head_dim ** -0.5
    softcap: float | None
    deterministic: bool
    backend: str | None

    def options(self, lse: bool) -> Options:
        """Checked: an operator may be called by hand."""
        spelled = request.spell(self.causal, (self.left, self.right), self.softcap)
        return Options(
            causal=spelled.causal, window=spelled.window, scale=self.scale, softcap=spelled.softcap,
            return_lse=lse, deterministic=self.deterministic, backend=self.backend,
        )  # fmt: skip

    def split(self, head_dim: int) -> tuple[request.Kind, tuple[float, ...]]:
        """(what a kernel depends on, the numbers that it takes after its tensors)."""
        scale = request.default_scale(head_dim) if self.scale is None else self.scale
        if not request.SCALE_MIN <= scale <= request.SCALE_MAX:
            raise ValueError(
                f"scale={scale}: the operator takes 2**-100 to 2**16; attention() folds a sign or 0 into q"
            )
        if self.left is self.right is self.softcap is None:
            return self.causal, (scale,)
        kind, bounds = request.bounds(self.causal, (self.left, self.right), self.softcap)
        return kind, (scale, *bounds)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Any:
    """attention() as a graph holds it, for options that are checked; tensors are checked by the operator."""
    q, k, v = request.autocast(q, k, v)
    lse = options.return_lse or request.graph_needs_lse(q, k, v)
    q, words = words_of(q, options)
    out, lse_out = torch.ops.cute_flash.attention(q, k, v, lse, *words)
    return (out, lse_out) if options.return_lse else out


def words_of(q: torch.Tensor, options: Options) -> tuple[torch.Tensor, Words]:
    """(q, with the sign of the scale in it, WORDS)."""
    scale = options.scale
    if scale is not None and scale <= 0:
        q, scale = request.positive_scale(q, scale)
    left, right = options.window or (None, None)
    return q, Words(options.causal, left, right, scale, options.softcap, options.deterministic, options.backend)


# ---------------------------------------------------------------------------------------------------------- running


Sizes = tuple[int, int, int]  # batch, seqlen_q, seqlen_k
Dims = tuple[int, int, int, int]  # heads_q, heads_kv, head_dim, head_dim_v


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Sizes, Dims, bool]:
    """(sizes, dims, do they fit). No kernel compares shapes; the first call of a kind is checked in full. A shape is
    taken once and in whole: a look at one size costs 0.2 us."""
    try:
        batch, seqlen_q, heads_q, head_dim = q.shape
        batch_k, seqlen_k, heads_k, head_dim_k = k.shape
        batch_v, seqlen_v, heads_v, head_dim_v = v.shape
    except ValueError:
        request.check_tensors(q, k, v)
        raise
    fit = batch == batch_k == batch_v and seqlen_k == seqlen_v and heads_k == heads_v and head_dim == head_dim_k
    return (batch, seqlen_q, seqlen_k), (heads_q, heads_k, head_dim, head_dim_v), fit


def split(q: torch.Tensor, dims: Dims, words: Words) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    """(what a kernel depends on but for batch and lengths: the key of a table, the numbers that it takes)."""
    kind, numbers = words.split(dims[2])
    key = (
        q.dtype, q.device, dims, kind, words.deterministic or torch.are_deterministic_algorithms_enabled(),
        words.backend, settings.generation, request.ieee_float32(q.dtype),
    )  # fmt: skip
    return key, numbers


def dims_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Dims:
    return q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]


def remember(table: dict[tuple[Any, ...], Value], key: tuple[Any, ...], value: Value) -> Value:
    if len(table) >= _TABLE_MAX:
        table.clear()
    table[key] = value
    return value


def _prepare(key: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Call:
    with torch.no_grad():  # gradients are the operator's affair
        return remember(_forwards, key, launch.prepare(q, k, v, options))


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool, *given: Any) -> Any:
    words = Words(*given)
    sizes, dims, fit = _sizes(q, k, v)
    of, numbers = split(q, dims, words)
    batch, seqlen_q, seqlen_k = sizes
    key = (of, seqlen_k <= SHORT_KEYS, batch * seqlen_q * dims[0] <= small_rows(of[3]), lse)
    call = _forwards.get(key)
    if call is None or not fit:
        request.check_tensors(q, k, v)
    out: torch.Tensor
    lse_out: torch.Tensor | None
    if 0 in sizes:
        out, lse_out = autograd.empty_outputs(q, v)
    else:
        call = call or _prepare(key, q, k, v, words.options(lse))
        try:
            out, lse_out = call.forward(q, k, v, numbers, *sizes)
        except Exception:
            request.check_tensors(q, k, v)
            raise
    return out, no_lse(q) if lse_out is None or not lse else lse_out


def _backward(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> Any:
    q, k, v, out, lse, *given = rest
    words = Words(*given)
    sizes, dims, fit = _sizes(q, k, v)
    of, numbers = split(q, dims, words)
    batch, seqlen_q, seqlen_k = sizes
    key = (of, seqlen_k <= SHORT_KEYS, batch * seqlen_q * dims[0] <= small_rows(of[3]), dlse is not None)
    backward = _backwards.get(key)
    if backward is None or not fit:
        request.check_tensors(q, k, v)
    if 0 in sizes:
        return tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    with torch.no_grad():
        if backward is None:
            with_lse = words.options(dlse is not None)
            backward = remember(_backwards, key, launch.prepare_backward(q, k, v, with_lse))
        return backward(dout, q, k, v, out, lse, dlse if dlse is None else dlse.contiguous(), *numbers)


def no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=request.lse_dtype(q.dtype))


# ---------------------------------------------------------------------------------------------------------- tracing


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool, *words: Any) -> Any:
    """Shapes alone; every check of a size becomes a guard or, for export, a condition on its inputs."""
    request.check_tensors(q, k, v)
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty(batch, seqlen_q, heads_q, v.shape[3])
    return out, q.new_empty(batch, heads_q, seqlen_q, dtype=request.lse_dtype(q.dtype)) if lse else no_lse(q)


def _fake_backward(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> Any:
    return tuple(tensor.new_empty(tensor.shape) for tensor in rest[:3])


# --------------------------------------------------------------------------------------------------------- autograd


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """There is no second derivative to keep anything for."""


def _refuse_twice(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(autograd.ONCE)


Gradient = tuple[Callable[..., None], Callable[..., Any]]  # (what to keep, how to differentiate)


def _gradient_of(name: str, lengths: tuple[str, ...]) -> Gradient:
    """Of an operator of define_attention."""
    tensors = sum(each.startswith("Tensor ") for each in lengths)  # they come first

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, k, v, *rest = inputs
        ctx.has_lse = rest.pop(len(lengths))
        ctx.save_for_backward(q, k, v, *output, *rest[:tensors])
        ctx.primitives = rest[tensors:]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        rest += ctx.primitives
        nothing = (None,) * (1 + len(rest))
        if not ctx.has_lse:  # traced where no gradient was wanted, and differentiated all the same
            dlse = None
            detached = (x.detach() for x in (q, k, v))
            operator = getattr(torch.ops.cute_flash, name)
            out, lse = operator(*detached, *rest[: len(lengths)], True, *rest[len(lengths) :])
        if dout is None and dlse is None:
            return (None, None, None, *nothing)
        if dout is None:
            dout = torch.zeros_like(out)
        grads = getattr(torch.ops.cute_flash, f"{name}_backward")(dout, dlse, q, k, v, out, lse, *rest)
        kept = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad[:3], strict=True))
        return (*kept, *nothing)

    return keep, differentiate


# ------------------------------------------------------------------------------------------------------- registering

_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
# No mode, fake tensor, lazy sign or transform has a say below autograd: the next kernel is the operator's own.
_PLAIN = frozenset(
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
)


class Library(torch.library.Library):
    """Operators whose kernel for autograd goes straight on to what runs, where nothing is recorded and nobody traces.

    The kernel that torch makes hands its arguments to the dispatcher once more: 8 of 24 us of a call, on a CPU with
    launches that do nothing. A torch that registered it in another way would keep those.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(NAMESPACE, kind)
        self.running: dict[str, Callable[..., Any]] = {}

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **how: Any) -> None:
        if dispatch_key == "Autograd" and op_name in self.running and how.get("with_keyset"):
            fn = _straight(self.running[op_name], fn)
        super().impl(op_name, fn, dispatch_key, **how)


def _straight(run: Callable[..., Any], recording: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() or (keyset & _BELOW_AUTOGRAD).raw_repr() not in _PLAIN:
            request.refuse_transforms()  # torch's own words are of a Function that nobody here wrote
            return recording(keyset, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*args)

    return kernel


def define(
    library: Library, schema: str, run: Callable[..., Any], fake: Callable[..., Any],
    gradient: Gradient | None = None,
) -> None:  # fmt: skip
    """An operator; its operands as they lie: a copy into another layout would be one that eager calls do not make."""
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    if gradient is not None:
        library.running[name] = run
        keep, differentiate = gradient
        torch.library.register_autograd(f"{NAMESPACE}::{name}", differentiate, setup_context=keep, lib=library)


def define_attention(
    library: Library, name: str, lengths: tuple[str, ...], words: str,
    running: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]], pairs: flops.Pairs,
) -> None:  # fmt: skip
    """An operator and its gradient, once differentiable; running = (forward, its fake, backward), pairs = what counts:

        name           (q, k, v, LENGTHS, lse, WORDS) -> (out, lse)
        name_backward  (dout, dlse, q, k, v, out, lse, LENGTHS, WORDS) -> (dq, dk, dv)

    lengths, words: the schemas of what is between and after, tensors of the lengths first.
    """
    run, fake, run_backward = running
    head = "Tensor q, Tensor k, Tensor v"
    forward = ", ".join((head, *lengths, "bool lse", words))
    backward = ", ".join((f"Tensor dout, Tensor? dlse, {head}, Tensor out, Tensor lse", *lengths, words))
    define(library, f"{name}({forward}) -> (Tensor, Tensor)", run, fake, _gradient_of(name, lengths))
    once = _keep_nothing, _refuse_twice
    define(library, f"{name}_backward({backward}) -> (Tensor, Tensor, Tensor)", run_backward, _fake_backward, once)
    flops.register(name, pairs, flops.FORWARD)
    flops.register(f"{name}_backward", pairs, flops.BACKWARD)


def _register() -> Library:
    library = Library("DEF")
    define_attention(library, "attention", (), WORDS, (_forward, _fake_forward, _backward), flops.dense)
    return library


_library = _register()  # the operators live as long as it does
