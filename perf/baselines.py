"""The contestants: one function each, all asked the same question in the layout each of them likes best.

A contestant's function gets a Point and returns `attend(q, k, v) -> out`, or raises Unavailable with the reason. Set-up
that a user does once (block masks, torch.compile, context managers) happens outside of `attend`: `context` is entered
around warm-up, capture and host-cost loops, never inside a timed call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .machine import version_of
from .points import Point

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """Why a contestant does not run a point; written to the CSV in place of a number."""


@contextlib.contextmanager
def _no_context() -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Contestant:
    name: str
    build: Callable[[Point, torch.device], Attend]
    version: Callable[[], str]
    heads_first: bool = False  # takes (batch, heads, seqlen, dim); the others (batch, seqlen, heads, dim)
    context: Callable[[], contextlib.AbstractContextManager[object]] = field(default=_no_context)
    plan: Callable[[Attend, tuple[Tensor, Tensor, Tensor]], str] = field(default=lambda attend, inputs: "")

    def arrange(self, tensor: Tensor) -> Tensor:
        """A (batch, seqlen, heads, dim) tensor as this contestant takes it: a view, no copy (its own inverse)."""
        return tensor.transpose(1, 2) if self.heads_first else tensor


def _import(module: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken install is a reason, not the end of a table
        text = str(error).strip().splitlines()
        raise Unavailable(f"import {module}: {type(error).__name__}: {text[0] if text else ''}") from error


def _need_cuda(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        raise Unavailable(f"needs a CUDA GPU, the tensors are on {device.type}")
    return torch.cuda.get_device_capability(device)


def _own_backend(device: torch.device) -> str | None:
    """Named where this GPU has kernels of its own, so that a fallback is an error and never a number; else None."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    return {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}.get(capability)


def ours(backend: str | None, deterministic: bool = False) -> Callable[[Point, torch.device], Attend]:
    """cute_flash.attention, through the given backend or the one made for this GPU."""

    def build(point: Point, device: torch.device) -> Attend:
        package = _import("cute_flash")
        if not hasattr(package, "attention"):
            raise Unavailable("cute_flash has no attention() here")
        if deterministic and point.direction == "fwd":
            raise Unavailable("not asked: the forward is deterministic anyway")
        if backend == "triton":
            _need_cuda(device)
        named = backend or _own_backend(device)
        chosen: dict[str, object] = {"backend": named} if named else {}
        chosen |= {"deterministic": True} if deterministic else {}
        chosen |= {} if point.left is None else {"window": (point.left, 0)}
        return functools.partial(package.attention, causal=point.causal, **chosen)

    return build


def _own_plan(attend: Attend, inputs: tuple[Tensor, Tensor, Tensor]) -> str:
    """What the dispatcher runs for these inputs, in a word that fits a CSV cell."""
    try:
        decision = _import("cute_flash").explain(*inputs, **attend.keywords)  # type: ignore[attr-defined]
    except Exception:  # a description: it must not cost the number
        return ""
    backward = getattr(decision, "backward", None)
    return str(getattr(backward or decision, "plan", ""))


def fa3(point: Point, device: torch.device) -> Attend:
    """FlashAttention-3, the fa3_fwd wheel: forward only, built without float16 kernels and without windows."""
    if _need_cuda(device)[0] != 9:
        raise Unavailable("its kernels are measured on compute capability 9.0 only")
    if point.direction == "bwd":
        raise Unavailable("this build is forward only")
    if point.dtype != "bf16":
        raise Unavailable(f"this build has no {point.dtype} kernels")
    if point.left is not None:
        raise Unavailable("this build has no windows")
    return functools.partial(_import("fa3_fwd_interface").flash_attn_func, causal=point.causal)


def fa4(point: Point, device: torch.device) -> Attend:
    """FlashAttention-4 (flash_attn.cute); it returns (out, lse)."""
    _need_cuda(device)
    if point.dtype not in ("bf16", "fp16"):
        raise Unavailable(f"it has no {point.dtype} kernels")
    window = (None, None) if point.left is None else (point.left, 0)
    flash = functools.partial(_import("flash_attn.cute").flash_attn_func, causal=point.causal, window_size=window)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(q, k, v)[0]

    return attend


def sdpa(point: Point, device: torch.device) -> Attend:
    """torch's scaled_dot_product_attention; the contestant's context picks the backend."""
    if point.left is not None:
        raise Unavailable("SDPA's fused kernels take no window")
    call = torch.nn.functional.scaled_dot_product_attention
    if not point.causal or point.seqlen_q == point.seqlen_k:
        options: dict[str, object] = {"is_causal": point.causal}
    else:
        from torch.nn.attention.bias import causal_lower_right

        options = {"attn_mask": causal_lower_right(point.seqlen_q, point.seqlen_k)}
    if point.heads_q != point.heads_kv:
        options["enable_gqa"] = True
    return functools.partial(call, **options)  # type: ignore[arg-type]


def cudnn(point: Point, device: torch.device) -> Attend:
    """cuDNN through SDPA."""
    _need_cuda(device)
    return sdpa(point, device)


def flex(point: Point, device: torch.device) -> Attend:
    """FlexAttention, compiled for the point's shape, with a block mask where keys are hidden (dense off CUDA)."""
    module = _import("torch.nn.attention.flex_attention")
    shift = point.seqlen_k - point.seqlen_q

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + shift

    def sliding(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + shift) & (key >= row + shift - (point.left or 0))

    options: dict[str, object] = {"enable_gqa": True} if point.heads_q != point.heads_kv else {}
    if point.causal:
        lengths = (point.seqlen_q, point.seqlen_k)
        rule = causal if point.left is None else sliding
        options["block_mask"] = module.create_block_mask(rule, None, None, *lengths, device=device)
    if device.type != "cuda":
        return functools.partial(module.flex_attention, **options)
    _prepare_compiler()
    return functools.partial(torch.compile(module.flex_attention, dynamic=False, fullgraph=True), **options)


def _prepare_compiler() -> None:
    """A fresh torch.compile for each shape (the recompile limit would end in eager), and repeatable backwards."""
    functorch = _import("torch._functorch.config")
    if hasattr(functorch, "donated_buffer"):
        setattr(functorch, "donated_buffer", False)  # noqa: B010 (mypy); donated buffers forbid retain_graph=True
    torch._dynamo.reset()


@contextlib.contextmanager
def _sdpa_context(backend: SDPBackend) -> Iterator[None]:
    """Only this backend; SDPA says why not in warnings and then raises a bare "No available kernel"."""
    with sdpa_kernel(backend), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            reasons = [str(w.message).split(" (Triggered internally")[0] for w in said]
            kept = [reason for reason in reasons if "not used because" not in reason and "UserWarning" not in reason]
            raise Unavailable("SDPA refuses: " + ("; ".join(kept) or "no kernel")) from error


def _torch_version() -> str:
    return torch.__version__


def _cudnn_version() -> str:
    return str(torch.backends.cudnn.version() or "")


def _own_version() -> str:
    return version_of("cute-flash") or "checkout"


def compiled(build: Callable[[Point, torch.device], Attend]) -> Callable[[Point, torch.device], Attend]:
    """The same call as a graph of torch.compile: what the operator and the guards cost the host."""

    def build_compiled(point: Point, device: torch.device) -> Attend:
        # Cases of a table share one code object, and so one limit of graphs.
        setattr(torch._dynamo.config, "recompile_limit", 64)  # noqa: B010 (mypy)
        return torch.compile(build(point, device), fullgraph=True, dynamic=True)

    return build_compiled


CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant("ours", ours(None), _own_version, plan=_own_plan),
        Contestant("ours-deterministic", ours(None, deterministic=True), _own_version, plan=_own_plan),
        Contestant("ours-triton", ours("triton"), _own_version, plan=_own_plan),
        Contestant("ours-again", ours(None), _own_version, plan=_own_plan),
        Contestant("ours-compiled", compiled(ours(None)), _own_version),
        Contestant(
            "fa2-compiled", compiled(sdpa), _torch_version, True, lambda: _sdpa_context(SDPBackend.FLASH_ATTENTION)
        ),
        Contestant("fa3", fa3, functools.partial(version_of, "fa3-fwd")),
        Contestant("fa4", fa4, functools.partial(version_of, "flash-attn-4")),
        Contestant("cudnn", cudnn, _cudnn_version, True, lambda: _sdpa_context(SDPBackend.CUDNN_ATTENTION)),
        Contestant("flex", flex, _torch_version, True),
        Contestant("fa2", sdpa, _torch_version, True, lambda: _sdpa_context(SDPBackend.FLASH_ATTENTION)),
    )
}
# The same as ours: how far two equal contestants are apart is the noise of a ratio. Compiled: for host_cost.py.
ON_REQUEST = ("ours-again", "ours-compiled", "fa2-compiled")


def select(names: str) -> list[Contestant]:
    """The contestants of a comma-separated list ("" = all that race); an unknown name lists the known ones."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    wanted = wanted or [name for name in CONTESTANTS if name not in ON_REQUEST]
    unknown = [name for name in wanted if name not in CONTESTANTS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such contestant; there are {', '.join(CONTESTANTS)}")
    return [CONTESTANTS[name] for name in wanted]
