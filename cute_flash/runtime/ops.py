"""attention as torch.library operators: what torch.compile, torch.export and FakeTensorMode see in its place.

    cute_flash::attention           (q, k, v, lse, WORDS) -> (out, lse)          lse has no elements where lse=False
    cute_flash::attention_backward  (dout, dlse, q, k, v, out, lse, WORDS) -> (dq, dk, dv)

WORDS are the options of a call as primitives: whether a bound exists is static, its value may be symbolic, and so may
every size. Eager calls do not come through here: a dispatcher's round trip costs more than their whole warm path.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..spec import settings
from ..spec.problem import SHORT_KEYS
from . import autograd, launch, request
from .launch import Backward, Call
from .request import Options

NAMESPACE = "cute_flash"
WORDS = "bool causal, SymInt? left, SymInt? right, float? scale, float? softcap, bool deterministic, str? backend"
_TABLE_MAX = 4096  # entries of a table below; bounded because keys hold settings.generation

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

    def numbers(self, head_dim: int) -> tuple[float, ...]:
        """What a kernel takes after its tensors."""
        scale = request.default_scale(head_dim) if self.scale is None else self.scale
        if not request.SCALE_MIN <= scale <= request.SCALE_MAX:
            raise ValueError(
                f"scale={scale}: the operator takes 2**-100 to 2**16; attention() folds a sign or 0 into q"
            )
        return (scale, *request.bounds(self.causal, (self.left, self.right), self.softcap)[1])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Any:
    """attention() as a graph holds it, for options that are checked; tensors are checked by the operator."""
    q, k, v = request.autocast(q, k, v)
    lse = options.return_lse or request.needs_grad(q, k, v)
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


def _fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """As far as shapes go, which no kernel compares; the first call of a kind was checked in full."""
    return k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]


def kind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: Words) -> tuple[Any, ...]:
    """What a kernel depends on, sizes along batch and sequence left out: the key of a table."""
    return (
        q.dtype, q.device, q.shape[2:], k.shape[2], v.shape[3],
        request.bounds(words.causal, (words.left, words.right), words.softcap)[0],
        words.deterministic or torch.are_deterministic_algorithms_enabled(), words.backend,
        settings.generation, request.ieee_float32(q.dtype),
    )  # fmt: skip


def remember(table: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> Any:
    if len(table) >= _TABLE_MAX:
        table.clear()
    table[key] = value
    return value


def _prepare(key: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Call:
    with torch.no_grad():  # gradients are the operator's affair
        call: Call = remember(_forwards, key, launch.prepare(q, k, v, options))
    return call


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool, *given: Any) -> Any:
    words = Words(*given)
    key = (*kind(q, k, v, words), k.shape[1] <= SHORT_KEYS, lse)
    call = _forwards.get(key)
    if call is None or not _fit(q, k, v):
        request.check_tensors(q, k, v)
    numbers = words.numbers(q.shape[3])
    out: torch.Tensor
    lse_out: torch.Tensor | None
    if request.is_empty(q, k):
        out, lse_out = autograd.empty_outputs(q, v)
    else:
        call = call or _prepare(key, q, k, v, words.options(lse))
        try:
            out, lse_out = call.forward(q, k, v, numbers, q.shape[0], q.shape[1], k.shape[1])
        except Exception:
            request.check_tensors(q, k, v)
            raise
    return out, no_lse(q) if lse_out is None or not lse else lse_out


def _backward(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> Any:
    q, k, v, out, lse, *given = rest
    words = Words(*given)
    key = (*kind(q, k, v, words), k.shape[1] <= SHORT_KEYS, dlse is not None)
    backward = _backwards.get(key)
    if backward is None or not _fit(q, k, v):
        request.check_tensors(q, k, v)
    numbers = words.numbers(q.shape[3])
    if request.is_empty(q, k):
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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.has_lse, *ctx.words = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    q, k, v, out, lse = ctx.saved_tensors
    nothing = (None,) * (1 + len(ctx.words))
    if not ctx.has_lse:  # traced where no gradient was wanted, and differentiated all the same
        dlse = None
        out, lse = torch.ops.cute_flash.attention(q.detach(), k.detach(), v.detach(), True, *ctx.words)
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.cute_flash.attention_backward(dout, dlse, q, k, v, out, lse, *ctx.words)
    kept = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad[:3], strict=True))
    return tuple(itertools.chain(kept, nothing))


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """There is no second derivative to keep anything for."""


def _refuse_twice(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(autograd.ONCE)


ONCE = (_keep_nothing, _refuse_twice)  # of a backward: it has no gradient


def define(library: torch.library.Library, name: str, schema: str) -> None:
    """Operands as they lie: a copy into another layout would be one that eager calls do not make."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


def implement(
    library: torch.library.Library,
    name: str,
    running: tuple[Callable[..., Any], Callable[..., Any]],
    gradient: tuple[Callable[..., Any], Callable[..., Any]],
) -> None:
    """running = (the operator, its fake kernel), gradient = (what to keep, how to differentiate)."""
    run, fake = running
    keep, differentiate = gradient
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", differentiate, setup_context=keep, lib=library)


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    head = "Tensor q, Tensor k, Tensor v"
    given = f"Tensor dout, Tensor? dlse, {head}, Tensor out, Tensor lse"
    define(library, "attention", f"({head}, bool lse, {WORDS}) -> (Tensor, Tensor)")
    define(library, "attention_backward", f"({given}, {WORDS}) -> (Tensor, Tensor, Tensor)")
    implement(library, "attention", (_forward, _fake_forward), (_keep, _differentiate))
    implement(library, "attention_backward", (_backward, _fake_backward), ONCE)
    return library


_library = _register()  # the operators live as long as it does
