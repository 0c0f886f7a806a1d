"""From what the user typed to what the dispatcher reads: bad input and unbuilt options end here, in one sentence each.

Only the cold path comes through here. What passes is as the kernels want it: 4-D, one dtype, one device, scale > 0.
"""

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from ..spec.device import Device
from ..spec.errors import UnsupportedError
from ..spec.mask import Mask
from ..spec.problem import DENSE, FORWARD, HEAD_DIM_MAX, HEAD_DIM_MIN, SHORT_KEYS, Problem
from . import emulation
from .foreign import NOT_BUILT, UNBUILT
from .foreign import refuse as refuse_foreign

# Below, scale * log2(e) leaves float32's normal range. Above, ordinary scores times scale pass 2^28, where half an ulp
# of the product no longer fits the exponent of a probability.
SCALE_MIN, SCALE_MAX = 2.0**-100, 2.0**16
# Kernels form softcap * (1 - 2 / (1 + exp(2 x))), up to 1.9e-7 softcap off: 2e-4 of a score at the upper limit.
SOFTCAP_MIN, SOFTCAP_MAX = 2.0**-16, 2.0**10
BOUND_MAX = 2**30  # a window's bound beyond it is taken as it: no sequence is that long, and sums stay within 32 bits
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROW_BYTES = 16  # what TMA asks of every row start and outer stride


@dataclass(frozen=True)
class Options:
    """The keyword arguments of a call, checked, in one spelling."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None  # None where both bounds are; right is None under causal
    scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    deterministic: bool = False
    backend: str | None = None

    @property
    def mask(self) -> Mask:
        left, right = self.window or (None, None)
        return Mask(left is not None, self.causal or right is not None, self.causal)

    @property
    def features(self) -> frozenset[str]:
        """As Problem.features has them."""
        return frozenset() if self.softcap is None else frozenset({"softcap"})


def flag(name: str, value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_bound(window: Any, bound: Any) -> int | None:
    """A bound is an integer >= 0 or None; -1 for "unbounded" is another library's habit."""
    if bound is None:
        return None
    if not isinstance(bound, numbers.Integral) or isinstance(bound, bool):
        raise TypeError(f"window={tuple(window)}: a bound is an integer or None, got {bound!r}")
    if bound < 0:
        raise ValueError(f"window={tuple(window)}: a bound is >= 0, and None (not {bound}) means unbounded")
    return min(int(bound), BOUND_MAX)


def _check_window(window: Any) -> tuple[int | None, int | None]:
    """(left, right), both None where there is no window."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        count = int(window) if isinstance(window, numbers.Integral) and not isinstance(window, bool) else 0
        hint = f": a causal window of {count} keys is ({count - 1}, 0)" if count > 0 else ""
        raise TypeError(f"window must be None or a pair (left, right), got {window!r}{hint}")
    left, right = window
    return _check_bound(window, left), _check_bound(window, right)


def _check_softcap(softcap: Any) -> float | None:
    """None and 0 mean none."""
    if softcap is None:
        return None
    if isinstance(softcap, (torch.Tensor, bool)) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a Python number or None, got {type(softcap).__name__}")
    try:
        value = float(softcap)
    except OverflowError:  # an int or a Fraction beyond float64
        value = math.inf
    if softcap != 0 and not SOFTCAP_MIN <= value <= SOFTCAP_MAX:
        raise ValueError(f"softcap={_spelled(softcap, value)}: a softcap is None, 0 or from 2**-16 to 2**10")
    return value or None


def _intersect(causal: Any, window: Any) -> tuple[bool, int | None, int | None]:
    """(causal, left, right) of both: right is None under causal, and a right bound of 0 is causal."""
    left, right = _check_window(window)
    if flag("causal", causal) or right == 0:
        return True, left, None
    return False, left, right


# What is static of a call: causal of a plain one, else whether it has (a left bound, a right one, which is 0, a cap).
Kind = bool | tuple[bool, bool, bool, bool]


def bounds(causal: Any, window: Any, softcap: Any) -> tuple[Kind, tuple[float, ...]]:
    """(what a kernel depends on, what it takes after the scale) of these options; raises as check_options does."""
    causal, left, right = _intersect(causal, window)
    cap = _check_softcap(softcap)
    if left is right is cap is None:
        return causal, ()
    return (left is not None, causal or right is not None, causal, cap is not None), (left or 0, right or 0, cap or 0.0)


def _check_scale(scale: Any) -> float | None:
    """A tensor is refused: reading it would wait for the GPU."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a real number (Python's or NumPy's) or None, got {type(scale).__name__}")
    try:
        value = float(scale)
    except OverflowError:  # an int or a Fraction beyond float64
        value = math.inf
    if scale != 0 and not SCALE_MIN <= abs(value) <= SCALE_MAX:  # scale != 0: a tiny Fraction rounds to 0.0
        raise ValueError(f"scale={_spelled(scale, value)}: a scale is finite, and |scale| 0 or from 2**-100 to 2**16")
    return value


def _spelled(given: Any, value: float) -> str:
    """`value`, unless rounding to float64 lost the number: then its size. Its digits may be too many for str()."""
    if math.isfinite(value) and value != 0:
        return str(value)
    if not isinstance(given, numbers.Rational):
        return str(given)
    log2 = int(given.numerator).bit_length() - int(given.denominator).bit_length()
    return f"about {'-' if given < 0 else ''}2**{log2}"


FUNCTORCH = "torch.func transforms (vmap, grad, jvp, ...) of attention are not built yet: call it on plain tensors"


def spell(causal: Any, window: Any, softcap: Any) -> Options:
    """Of these three alone, checked."""
    causal, left, right = _intersect(causal, window)
    window = None if left is right is None else (left, right)
    return Options(causal=causal, window=window, softcap=_check_softcap(softcap))


def check_options(
    arguments: dict[str, Any], unknown: dict[str, Any], backends: tuple[str, ...], function: str = "attention"
) -> Options:
    """Options from the keyword arguments of a public function, or the sentence that refuses one of them.

    What was not given has its default, None or False. Traced too: each value that is looked up costs a guard a call.
    """
    for name, value in (*arguments.items(), *unknown.items()):
        if value is not None and name in UNBUILT:
            raise UnsupportedError(NOT_BUILT.format(name=name, function=function))
    refuse_foreign(unknown, function)
    causal, left, right = _intersect(arguments.get("causal", False), arguments.get("window"))
    softcap = _check_softcap(arguments.get("softcap"))
    backend = arguments.get("backend")
    if backend is not None and backend not in backends:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(backends)}")
    return Options(
        causal=causal,
        window=None if left is right is None else (left, right),
        scale=_check_scale(arguments.get("scale")),
        softcap=softcap,
        return_lse=flag("return_lse", arguments.get("return_lse", False)),
        deterministic=flag("deterministic", arguments.get("deterministic", False)),
        backend=backend,
    )


_PLAIN = torch.Tensor.__torch_dispatch__
modes = torch._C._len_torch_dispatch_stack  # how many are active


def is_traced(*tensors: Any) -> bool:
    """Do these stand for tensors that a graph will be run on later?"""
    return any(isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in tensors)


def is_recorded(*tensors: torch.Tensor) -> bool:
    """Shall the operator stand for the call? Where tensors are traced, and where somebody follows what torch computes:
    a mode (make_fx, a counter of FLOPs, selective checkpointing) or torch.jit.trace. A launch would escape them, and
    what they saw would be an output that nothing writes to."""
    if is_traced(*tensors):
        return True
    if not modes() and not torch.jit.is_tracing():
        return False
    plain = all(
        isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is _PLAIN and not tensor.is_nested
        for tensor in tensors
    )
    return plain and forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Is this a wrapper around tensors (DTensor)? Its data pointer is null, and a kernel would follow it."""
    return type(tensor).__torch_dispatch__ is not _PLAIN and not is_traced(tensor) and not tensor.is_nested


SHAPES = {4: "4-D (batch, seqlen, heads, dim)", 3: "3-D (total, heads, dim)"}


def refuse_without_memory(name: str, tensor: torch.Tensor) -> None:
    if has_no_memory(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}: kernels read plain tensors, call attention on the one inside "
            "(of a DTensor: to_local, local_map)"
        )


def refuse_batched(name: str, tensor: torch.Tensor) -> None:
    """A gradient for many outputs at once has its extra dimension hidden, and no memory that a kernel could read."""
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        raise UnsupportedError(
            f"{name} is a batch of gradients (is_grads_batched=True, vectorize=True, vmap), which is not built yet: "
            "ask for one gradient at a time"
        )


def refuse_layout(name: str, tensor: torch.Tensor) -> None:
    """Before its shape is looked at: a nested tensor has none."""
    if tensor.layout != torch.strided or tensor.is_nested:
        way = "a nested tensor: of a jagged one attention_varlen takes values() and offsets().int()"
        layout = way if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"{name} must be a plain strided tensor, got {layout}")


def check_int32(name: str, tensor: Any, shape: str) -> None:
    """Of lengths and tables, before their shape is looked at. Converting them here would be a launch a call."""
    if not isinstance(tensor, torch.Tensor) or has_no_memory(tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}: {shape} int32 on q's device")
    refuse_layout(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {dtype_name(tensor.dtype)}: convert it once, with .int()")


def refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(FUNCTORCH)


def _check_kinds(tensors: dict[str, Any], dims: int) -> None:
    refuse_transforms()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        refuse_without_memory(name, tensor)
        refuse_layout(name, tensor)
        if tensor.dim() != dims:
            raise ValueError(f"{name} must be {SHAPES[dims]}, got shape {tuple(tensor.shape)}")
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        way = ": cast them, or call under torch.autocast" if set(dtypes.values()) <= set(DTYPES) else ""
        raise TypeError("q, k and v must have one dtype, got " + ", ".join(f"{n} {d}" for n, d in dtypes.items()) + way)
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError("q, k and v must be on one device, got " + ", ".join(f"{n} {d}" for n, d in devices.items()))


def _check_tangents(tensors: dict[str, torch.Tensor]) -> None:
    """Dual tensors outside autograd's reach would lose their tangent without a word."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(f"{name} carries a tangent: forward-mode derivatives are not built yet")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    heads_q, head_dim = q.shape[-2:]
    if q.dim() == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have one batch size, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    if k.shape[-3] != v.shape[-3]:
        word = "seqlen" if q.dim() == 4 else "total"
        raise ValueError(f"k and v must have one {word}, got {k.shape[-3]} and {v.shape[-3]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have one head count, got {k.shape[-2]} and {v.shape[-2]}")
    if k.shape[-1] != head_dim:
        raise ValueError(f"q and k must have one head_dim, got {head_dim} and {k.shape[-1]}")
    _check_group(heads_q, k.shape[-2])


def _check_group(heads_q: int, heads_kv: int) -> None:
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(
            f"heads_q must be a multiple of heads_kv, got heads_q={heads_q} and heads_kv={heads_kv}: heads are the "
            "last dimension but one (of tensors laid out for SDPA: x.transpose(1, 2))"
        )


def _check_limits(q: torch.Tensor, v: torch.Tensor, values: bool) -> None:
    """The limits that no backend lifts."""
    if values and q.device.type == "meta":
        raise UnsupportedError("q, k and v are meta tensors: there are no values to attend to")
    if q.dtype not in DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in DTYPES)
        if q.is_floating_point():
            raise UnsupportedError(f"dtype {dtype_name(q.dtype)} is not built yet: q, k and v are one of {names}")
        raise TypeError(f"q, k and v must be one of {names}, got {dtype_name(q.dtype)}")
    for name, value in (("head_dim", q.shape[-1]), ("head_dim_v", v.shape[-1])):
        if not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX:
            raise UnsupportedError(f"{name}={value} is not supported: {name} is {HEAD_DIM_MIN} to {HEAD_DIM_MAX}")


def check_tensors(q: Any, k: Any, v: Any, values: bool = True, dims: int = 4) -> None:
    """One ValueError, TypeError or UnsupportedError that names the value and the rule; nothing is returned.

    Tensors without values (meta) are refused where `values` are needed. dims: 4, or 3 for packed sequences.
    """
    _check_kinds({"q": q, "k": k, "v": v}, dims)
    _check_shapes(q, k, v)
    _check_tangents({"q": q, "k": k, "v": v})
    _check_limits(q, v, values)


def check_cache(q: Any, k_cache: Any, v_cache: Any, values: bool = True) -> None:
    """As check_tensors, of a key-value cache, whose first two dimensions are its own."""
    _check_kinds({"q": q, "k_cache": k_cache, "v_cache": v_cache}, 4)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache must be alike but for their last dimension, got {shapes}")
    heads_q, head_dim = q.shape[2:]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"q and k_cache must have one head_dim, got {head_dim} and {k_cache.shape[3]}")
    _check_group(heads_q, k_cache.shape[2])
    _check_tangents({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    _check_limits(q, v_cache, values)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_empty(q: torch.Tensor, k: torch.Tensor) -> bool:
    """No output, or no key to look at: the answer needs no kernel."""
    return q.numel() == 0 or k.numel() == 0


def positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float]:
    """(q', scale') with scale' > 0 and the same scores, exactly: a sign moves into q, and scale 0 zeroes it.

    Ordinary torch operations, so gradients follow by themselves.
    """
    if scale is None:
        return q, default_scale(q.shape[-1])
    if scale > 0:
        return q, scale
    if scale < 0:
        return -q, -scale
    return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0), 1.0


def default_scale(head_dim: int) -> float:
    return float(head_dim) ** -0.5


def scale_copy(scale: float | None) -> tuple[str, ...]:
    """The sentence `explain` and the log say when positive_scale had to copy q."""
    if scale is None or scale > 0:
        return ()
    return (f"q: copied to fold scale={scale} in (kernels take a scale above 0)",)


def alignment_faults(name: str, tensor: torch.Tensor, alignment: int) -> tuple[str, ...]:
    """Why the tensor's rows cannot be read in `alignment`-byte pieces. Strides of size-1 dimensions say nothing."""
    itemsize = tensor.element_size()
    faults = []
    if tensor.shape[-1] * itemsize % alignment:
        unit = alignment // itemsize
        faults.append(f"{name}: copied, its last dimension {tensor.shape[-1]} is not a multiple of {unit}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        faults.append(f"{name}: copied, its last dimension has stride {tensor.stride(-1)}, not 1")
    for axis, size, stride in zip(
        ("heads", "seqlen", "batch"), tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True
    ):
        if size != 1 and stride * itemsize % alignment:
            faults.append(
                f"{name}: copied, its {axis} stride of {stride * itemsize} bytes is not a multiple of {alignment}"
            )
    if tensor.data_ptr() % alignment:
        offset = tensor.data_ptr() % alignment
        faults.append(f"{name}: copied, it starts {offset} bytes past a multiple of {alignment}")
    return tuple(faults[:1])


def ieee_float32(dtype: torch.dtype) -> bool:
    """May float32 matmuls not round to TF32? allow_tf32 raises once the newer name was used: only that one is safe."""
    return dtype is not torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32"


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def float32_kind(device: torch.device) -> bool | None:
    """Of a float32 call: may its matmuls not round to TF32? None where autocast gives it another dtype."""
    return None if is_autocast(device) else ieee_float32(torch.float32)


def is_autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)  # torch knows no autocast for meta


def autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Under autocast, float32 and mixed inputs in its dtype, as SDPA casts them; float64 is left alone, there as here.

    Inputs that share a 16-bit dtype stay as they are.
    """
    if not is_autocast(q.device) or (q.dtype == k.dtype == v.dtype and q.dtype != torch.float32):
        return q, k, v
    target = torch.get_autocast_dtype(q.device.type)
    return cast(q, target), cast(k, target), cast(v, target)


def is_special(*qkv: Any) -> bool:
    """Has the cold path a way with tensors that no kernel takes: to be cast by autocast, or meant for a graph?"""
    if not all(isinstance(tensor, torch.Tensor) for tensor in qkv):
        return False
    return is_recorded(*qkv) or any(new is not old for new, old in zip(autocast(*qkv), qkv, strict=True))


def cast(tensor: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    return tensor.to(target) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def graph_needs_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """For gradients. torch.jit.trace compares a trace with gradients on with one with gradients off."""
    return needs_grad(q, k, v) and not torch.jit.is_tracing()


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, device: Device | None = None
) -> Problem:
    """The forward problem of a checked call, on the tensors' device or, to be explained only, on an imagined one."""
    named = (("q", q), ("k", k), ("v", v))
    problem = Problem(
        direction=FORWARD,
        device=device or emulation.device_for(q.device),
        dtype=dtype_name(q.dtype),
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        heads_q=q.shape[2],
        heads_kv=k.shape[2],
        mask=options.mask,
        lse=options.return_lse or needs_grad(q, k, v),
        short=k.shape[1] <= SHORT_KEYS,
        deterministic=options.deterministic or torch.are_deterministic_algorithms_enabled(),
        ieee_float32=ieee_float32(q.dtype),
        features=options.features,
        unaligned=tuple(fault for name, tensor in named for fault in alignment_faults(name, tensor, ROW_BYTES)),
    )
    return replace(problem, small=q.shape[:-1].numel() <= problem.small_rows)


def backward_of(problem: Problem, lse_grad: bool) -> Problem:
    """The backward problem that a forward leads to. dout's layout is not known yet, so nothing is said of alignment."""
    short, small = problem.short and problem.form == DENSE, problem.small and problem.mask.causal
    return replace(problem, direction="backward", lse=True, lse_grad=lse_grad, short=short, small=small, unaligned=())
