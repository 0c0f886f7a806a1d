"""The public functions. A warm call is one dictionary lookup, the outputs, and the launch."""

from typing import Any

import torch
from torch.autograd import forward_ad

from . import kvcache, varlen
from .runtime import autograd, dispatch, launch, ops, report, request, substitution
from .runtime.dispatch import Decision
from .runtime.launch import Call
from .runtime.request import SCALE_MAX, SCALE_MIN, Options
from .spec import device as device_facts
from .spec import settings
from .spec.problem import SHORT_KEYS, small_rows

# (what a kernel depends on, shapes and strides left out) -> Call.
# The types keep out DTensor, FakeTensor and their like: their data pointer is null, and a kernel would follow it.
# `is True` asks nothing of a symbolic length: a traced call ends in the cold path without a guard on it.
_warm: dict[tuple[Any, ...], Call] = {}

_is_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_modes = request.modes
_apply = autograd.apply
_deterministic = torch.are_deterministic_algorithms_enabled
_float32, _float32_kind = torch.float32, request.float32_kind


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Exact attention: softmax(scale * q k^T, masked) v, computed in tiles with memory linear in the sequence.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). Of tensors laid out for SDPA: x.transpose(1, 2), nothing is copied.
        k: (batch, seqlen_k, heads_kv, head_dim). heads_q is a multiple of heads_kv (MHA, GQA, MQA).
        v: (batch, seqlen_k, heads_kv, head_dim_v). head_dim and head_dim_v are 8 to 256 and may differ.
            q, k and v share a device and a dtype: bfloat16, float16, float32 or float64. Any strides are right,
            expanded tensors too; what a kernel cannot read in place is copied, and `explain` says so.
        causal: row i sees keys j <= i + seqlen_k - seqlen_q (aligned bottom-right). A row that sees no key gives
            output 0, LSE -inf and zero gradients.
        window: (left, right): row i sees keys from left before its diagonal i + seqlen_k - seqlen_q to right after it,
            both ends included; None = unbounded, negative numbers are refused. Causal caps right at 0: a causal
            sliding window of n keys is (n - 1, 0). Another window never recompiles.
        scale: multiplies the scores: a real number, 0 or from 2**-100 to 2**16 in magnitude; default head_dim ** -0.5.
        softcap: scores become softcap * tanh(scale * q k^T / softcap); None or 0 = none. Between 2**-16 and 2**10.
        return_lse: also return the natural-log LSE, float32 (float64 for float64), (batch, heads_q, seqlen_q).
        deterministic: gradients are bitwise repeatable. torch.use_deterministic_algorithms(True) implies it.
        backend: "sm90", "sm100", "triton" or "reference": use this one or raise. Default: the best that can.
        sink, alibi_slopes, score_mod, mask_mod, block_mask: not built yet; anything but None is refused.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v), contiguous, in q's dtype; or (out, lse) with return_lse=True.
        Both are differentiable in q, k and v, once.

    Raises:
        ValueError, TypeError: a bad input, naming the value and the rule.
        UnsupportedError: no backend, or not the one asked for, can run this; every refusal is listed.
        BackendBuildError: a kernel failed to compile.
    """
    key, call = None, None
    if sink is alibi_slopes is score_mod is mask_mod is block_mask is None and not unknown:
        try:
            kind, bounds = (causal, ()) if window is softcap is None else request.bounds(causal, window, softcap)
            batch, seqlen_q, heads_q, head_dim = q.shape
            batch_k, seqlen_k, heads_k, head_dim_k = k.shape
            batch_v, seqlen_v, heads_v, head_dim_v = v.shape
            dtype, device, few = q.dtype, q.device, small_rows(kind)
            lazy = q.is_neg() or k.is_neg() or v.is_neg()  # DLPack would drop the sign: the cold path makes it real
            grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
            key = (
                dtype, device, type(q), type(k), type(v), heads_q, heads_k, head_dim, head_dim_v, kind, return_lse,
                (seqlen_k <= SHORT_KEYS) is True, (batch * heads_q * seqlen_q <= few) is True, grad, backend,
                settings.generation, deterministic or _deterministic(), dtype is not _float32 or _float32_kind(device),
            )  # fmt: skip
            call = _warm.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError):  # RuntimeError: of a nested tensor's shape
            key = None  # not three 4-D tensors, or a bad or unhashable option: the cold path says what is wrong
    if (
        call is not None
        and batch == batch_k == batch_v and seqlen_k == seqlen_v and heads_k == heads_v and head_dim == head_dim_k
        and batch and seqlen_q and seqlen_k and not lazy
        and forward_ad._current_level < 0 and not _functorch_active() and not _modes()
        and (scale is None or (type(scale) is float and SCALE_MIN <= scale <= SCALE_MAX))
        and (causal is False or causal is True) and (return_lse is False or return_lse is True)
        and (deterministic is False or deterministic is True)  # 1.0 has True's hash, and is refused
    ):  # fmt: skip
        try:
            numbers = (scale or call.scale,) + bounds  # noqa: RUF005  half of unpacking's time
            if grad:
                return _apply(q, k, v, (call, numbers, batch, seqlen_q, seqlen_k))
            out, lse = call.forward(q, k, v, numbers, batch, seqlen_q, seqlen_k)
            return (out, lse) if return_lse else out
        except Exception as error:  # of k and v only shapes were looked at
            _unless_special(error, q, k, v)
    arguments = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sink": sink,
        "alibi_slopes": alibi_slopes, "score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask,
        "return_lse": return_lse, "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    return _cold(q, k, v, request.check_options(arguments, unknown, dispatch.backend_names()), key)


def _unless_special(error: Exception, *qkv: Any) -> None:
    """Raise what a warm call came upon: the launch refuses another dtype, device or layout; a cold one has words."""
    if not request.is_special(*qkv):
        request.check_tensors(*qkv)
        raise error


def _cold(q: Any, k: Any, v: Any, options: Options, key: tuple[Any, ...] | None) -> Any:
    """The first call of a kind, and every call that is out of the ordinary: checked in full, then as the warm path."""
    if request.is_special(q, k, v):
        if request.is_recorded(q, k, v):
            return ops.attention(q, k, v, options)
        return attention(*request.autocast(q, k, v), **vars(options))
    request.check_tensors(q, k, v)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if key is None:  # an option was spelled in another way (attn_mask=None): once more, in the plain spelling
        return attention(q, k, v, **vars(options))
    for sentence in request.scale_copy(options.scale):
        report.say("dispatch", sentence)
    q, scale = request.positive_scale(q, options.scale)
    if request.is_empty(q, k):
        dispatch.choose(request.describe(q, k, v, options), options.backend)  # what is refused is refused empty too
        out, lse = autograd.Empty.apply(q, k, v)
        return (out, lse) if options.return_lse else out
    call = _warm.get(key)
    if call is None:
        call = ops.remember(_warm, key, launch.prepare(q, k, v, options))
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    numbers = (scale, *request.bounds(options.causal, options.window, options.softcap)[1])
    if call.grad:
        return _apply(q, k, v, (call, numbers, batch, seqlen_q, seqlen_k))
    out, lse = call.forward(q, k, v, numbers, batch, seqlen_q, seqlen_k)
    return (out, lse) if options.return_lse else out


_OPTIONS = frozenset(attention.__kwdefaults__ or ())


def _checked(given: dict[str, Any]) -> Options:
    """Of the keyword arguments that were given."""
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    unknown = {name: value for name, value in given.items() if name not in _OPTIONS}
    return request.check_options(options, unknown, settings.BACKEND_NAMES)


def _in_graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """What torch.compile traces in place of attention: the operator. Checked by the same rules."""
    return ops.attention(q, k, v, _checked(options))


substitution.substitute(attention, _in_graph)


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, arch: str | None = None, **options: Any) -> Decision:
    """What `attention` would run on these inputs and options, and why each better backend does not.

    With cu_seqlens_q= among the options, what `attention_varlen` would, and with cache_seqlens=, `attention_kvcache`.
    Nothing is compiled and no kernel runs. print() the result to read the walk; `.plan`, `.refusals`, `.copies`,
    `.fallback` and, for inputs that need gradients, `.backward` hold the same facts; `.facts()` is a dictionary.
    Raises what `attention` raises, except that meta tensors are taken: for this machine's first GPU, else its CPU.

    arch: explain for this GPU instead, present or not: "9.0", or a compile target such as "sm_90a".
    """
    device = None
    if arch is not None:
        device = device_facts.imagined(device_facts.capability_of(arch), "simulated")
    elif isinstance(q, torch.Tensor) and q.device.type == "meta":
        device = device_facts.first()
    if any(name in options for name in varlen.LENGTHS):
        return varlen.explain(q, k, v, device, options)
    if any(name in options for name in kvcache.TABLES):
        return kvcache.explain(q, k, v, device, options)
    checked = _checked(options)
    request.check_tensors(q, k, v, values=False)
    return launch.decide(q, k, v, checked, device)
