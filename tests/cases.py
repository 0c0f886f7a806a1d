"""The shapes, layouts and values that tests and measurements share. Plain data and builders, no package code."""

import functools
import itertools
import math
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch

HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
ODD_HEAD_DIMS = (8, 20, 33, 40, 72, 100, 136, 148, 250)
SEQLENS = (1, 63, 64, 65, 127, 129, 1000, 4096)
UNEQUAL = ((1, 1000), (1, 4096), (127, 1000), (300, 700), (1000, 129), (700, 300), (65, 4096), (4096, 63))
LENGTHS = tuple((s, s) for s in SEQLENS) + UNEQUAL
HEADS = {1: (4, 4), 4: (8, 2), 7: (7, 1), 8: (8, 1)}  # group -> (heads_q, heads_kv)
MASKS = (False, True)  # causal
OWN_KERNELS = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}  # compute capability -> backend; others: triton

# Rounding errors are compared with another kernel's to 5%. With n elements the norm of such an error is known to about
# 1/sqrt(2 n): 2**15 elements put 5% at about nine standard deviations of the difference.
ELEMENTS = 1 << 15


@dataclass(frozen=True)
class Case:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    dtype: str = "bfloat16"
    layout: str = "contiguous"
    values: str = "normal"
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        mask = "causal" if self.causal else "full"
        words = [dims, mask, f"b{self.batch}", f"s{self.seqlen_q}x{self.seqlen_k}", f"h{self.heads_q}x{self.heads_kv}"]
        words += [self.dtype] if self.dtype != "bfloat16" else []
        words += [self.layout] if self.layout != "contiguous" else []
        words += [self.values] if self.values != "normal" else []
        words += [f"scale{self.scale}"] if self.scale is not None else []
        words += ["window" + "x".join(map(str, self.window))] if self.window is not None else []
        words += [f"softcap{self.softcap}"] if self.softcap is not None else []
        return "-".join(words)

    @property
    def options(self) -> dict:
        """As attention and the oracle take them."""
        return {"causal": self.causal, "window": self.window, "scale": self.scale, "softcap": self.softcap}

    @property
    def seed(self) -> int:
        return zlib.crc32(str(self).encode())

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def shape(lengths: tuple[int, int], group: int, dims: tuple[int, int], causal: bool, **fields) -> Case:
    """A case whose batch gives every tensor enough elements for a 5% comparison."""
    heads_q, heads_kv = HEADS[group]
    smallest = min(lengths[0] * heads_q, lengths[1] * heads_kv) * min(dims)
    batch = max(1, math.ceil(ELEMENTS / smallest))
    if lengths[0] * lengths[1] <= 1 << 16:
        batch = max(2, batch)
    return Case(batch, *lengths, heads_q, heads_kv, *dims, causal, **fields)


# ---------------------------------------------------------------------------------------------------------- lists


@functools.cache
def forward_cases() -> tuple[Case, ...]:
    """Every head_dim x mask x lengths x group."""
    grid = itertools.product(HEAD_DIMS, MASKS, LENGTHS, HEADS)
    return tuple(shape(lengths, group, dims, causal) for dims, causal, lengths, group in grid)


@functools.cache
def thin_cases() -> tuple[Case, ...]:
    """Every head_dim x mask x lengths, the group rotating: each (head_dim, group) and (lengths, group) pair is met."""
    groups = tuple(HEADS)
    cells = []
    for i, dims in enumerate(HEAD_DIMS):
        for j, lengths in enumerate(LENGTHS):
            group = groups[(i + j) % len(groups)]
            cells += [shape(lengths, group, dims, causal) for causal in MASKS]
    return tuple(cells)


@functools.cache
def odd_dim_cases() -> tuple[Case, ...]:
    """Head dims that are not multiples of 16 or 8, and pairs of different ones."""
    dims = [(d, d) for d in ODD_HEAD_DIMS] + [(40, 72), (250, 8), (33, 20)]
    cells = []
    for i, pair in enumerate(dims):
        cells.append(shape((130, 333), (1, 4, 7)[i % 3], pair, bool(i % 2)))
        cells.append(shape((512, 512), 4, pair, not i % 2))
    return tuple(cells)


def long_cases() -> tuple[Case, ...]:
    """More keys than a short call has: Hopper's backward has other kernels there."""
    dims = [(128, 128), (120, 104), (192, 192), (136, 160), (192, 128), (176, 72)]
    return tuple(
        shape(lengths, (1, 4)[i % 2], pair, causal)
        for i, pair in enumerate(dims)
        for lengths, causal in (((1100, 1201), False), ((1300, 1250), True))
    )


def long_bounded_cases() -> tuple[Case, ...]:
    """The same under windows, and softcaps that most scores exceed: heads of 129 to 192 columns have one kernel."""
    bounds = (
        ((300, 200), None),
        ((64, 0), 20.0),
        ((None, 95), None),
        ((0, None), 5.0),
        ((1023, 0), None),
        (None, 1.0),
    )
    dims, lengths = ((192, 192), (192, 128), (136, 160)), ((1100, 1201), (1300, 1250), (129, 1500))
    cells = []
    for i, (pair, (window, softcap)) in enumerate(itertools.product(dims, bounds)):
        other = i + i // 6  # rotates against the bounds
        fields = {"window": window, "softcap": softcap, "values": "large" if softcap else "normal"}
        cells.append(shape(lengths[other % 3], (1, 4)[other % 2], pair, i % 3 == 1, **fields))
    return tuple(cells)


@functools.cache
def float16_cases() -> tuple[Case, ...]:
    return tuple(
        shape(lengths, 4, dims, causal, dtype="float16")
        for dims, lengths, causal in itertools.product(
            ((64, 64), (128, 128), (256, 256), (192, 128)), ((129, 129), (300, 700)), MASKS
        )
    )


LAYOUTS = (
    "contiguous",
    "heads_first",
    "seq_first",
    "packed",
    "expanded_heads",
    "expanded_batch",
    "offset",
    "row_padded",
    "every_second_row",
    "strided_last_dim",
)


@functools.cache
def layout_cases() -> tuple[Case, ...]:
    cells = []
    for layout, dims in itertools.product(LAYOUTS[1:], ((64, 64), (128, 128), (256, 256), (72, 72))):
        base = Case(2, 192, 192, 4, 4, *dims, causal=dims[0] == 128, layout=layout)
        cells.append(base)
        cells.append(replace(base, heads_q=16, heads_kv=2, seqlen_k=333))
    return tuple(cells)


# Bounds that are empty, single keys, one-sided, smaller than any tile, at and beside tile edges, wider than all keys.
WINDOWS = ((0, 0), (None, 0), (0, None), (3, 5), (None, 40), (63, 1), (64, 0), (65, None), (127, 128), (5000, 5000))
WINDOW_LENGTHS = ((65, 65), (300, 300), (129, 400), (400, 129), (1, 300), (257, 1))


@functools.cache
def window_cases() -> tuple[Case, ...]:
    """Every window x lengths, the rest rotating; every third with a softcap too."""
    cells = []
    for i, (window, lengths) in enumerate(itertools.product(WINDOWS, WINDOW_LENGTHS)):
        dims = ((64, 64), (128, 128), (192, 128))[i % 3]
        softcap = (None, None, 20.0)[(i // 3) % 3]
        cells.append(shape(lengths, (1, 4, 7)[i % 3], dims, i % 5 == 0, window=window, softcap=softcap))
    return tuple(cells)


@functools.cache
def softcap_cases() -> tuple[Case, ...]:
    """Caps far below, about and far above the scores, which reach about 70."""
    grid = itertools.product((1.0, 15.0, 50.0, 1024.0), ((64, 64), (128, 128), (256, 256)), MASKS)
    lengths = ((129, 257), (300, 1000))
    return tuple(
        Case(2, *lengths[i % 2], 4, 2, *dims, causal, values="large", softcap=cap)
        for i, (cap, dims, causal) in enumerate(grid)
    )


VALUES = ("very_negative", "huge_score", "rising", "falling", "outliers", "constant", "tiny", "large")


@functools.cache
def adversarial_cases() -> tuple[Case, ...]:
    """Values that break a careless softmax, at lengths where the first, last and diagonal tiles are partial."""
    lengths = ((160, 256), (300, 1000), (1000, 300))
    grid = itertools.product(VALUES, ((64, 64), (128, 128), (256, 256)), lengths, MASKS)
    return tuple(Case(2, *length, 4, 2, *dims, causal, values=values) for values, dims, length, causal in grid)


@functools.cache
def golden_cases() -> tuple[Case, ...]:
    """Small shapes whose outputs are stored. Inputs come from `exact_inputs`, so only outputs need to be kept."""
    cells = []
    for i, dims in enumerate((*HEAD_DIMS, (40, 40), (33, 33))):
        cells.append(Case(2, 1, 1, 7, 1, *dims, causal=bool(i % 2)))
        cells.append(Case(1, 64, 64, 2, 2, *dims, causal=not i % 2))
        cells.append(Case(1, 129, 65, 2, 1, *dims, causal=bool(i % 2)))
        cells.append(Case(1, 65, 129, 2, 1, *dims, causal=not i % 2))
    cells += [
        Case(2, 130, 257, 2, 1, 64, 64, causal, dtype=dtype) for causal in MASKS for dtype in ("bfloat16", "float16")
    ]
    cells += [Case(1, 96, 160, 2, 1, 128, 128, True, dtype="float16"), Case(1, 3, 300, 4, 1, 64, 64, True)]
    return tuple(cells)


# ------------------------------------------------------------------------------------------------------- builders


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same values and strides, ready for autograd."""
        q, k, v = (x.detach().requires_grad_() for x in self.qkv)
        return q, k, v


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Seeded by the case's name: values, then rounding to the dtype, then the layout."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(case.batch, seqlen, heads, dim, generator=generator, device=device)

    q = normal(case.seqlen_q, case.heads_q, case.head_dim)
    k = normal(case.seqlen_k, case.heads_kv, case.head_dim)
    v = normal(case.seqlen_k, case.heads_kv, case.head_dim_v)
    dout = normal(case.seqlen_q, case.heads_q, case.head_dim_v)
    q, k, v = _with_values(case.values, q, k, v, generator)
    q, k, v, dout = (x.to(case.torch_dtype) for x in (q, k, v, dout))
    return Inputs(*with_layout(case.layout, q, k, v), dout)


def _with_values(name: str, q, k, v, generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bend normal values into the named shape."""
    if name == "very_negative":  # every score is -25 sqrt(head_dim), -200 at 64
        return torch.full_like(q, 5.0), torch.full_like(k, -5.0), v
    if name == "constant":
        return torch.full_like(q, 0.5), torch.full_like(k, 0.25), v[:, :1].expand_as(v).clone()
    if name == "tiny":
        return q * 1e-3, k * 1e-3, v
    if name == "large":  # scores with a standard deviation of 16: softmax picks a few keys
        return q * 4, k * 4, v
    if name == "outliers":  # N(0,1) plus 10 N(0,1) on 0.1% of the entries
        return tuple(_with_outliers(x, generator) for x in (q, k, v))
    towards = torch.ones_like(q[:1, :1, :1]) / q.shape[-1] ** 0.25  # a direction every query leans to
    q, k = q + 2 * towards, k.clone()
    if name == "huge_score":
        k[:, k.shape[1] // 2] = 40 * towards[0, 0]
    if name in ("rising", "falling"):  # each key tile's largest score is above (below) all earlier ones'
        ramp = torch.linspace(0, 20, k.shape[1], device=k.device)
        ramp = ramp if name == "rising" else ramp.flip(0)
        k = 0.25 * k + ramp[None, :, None, None] * towards
    return q, k, v


def _with_outliers(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(x.shape, generator=generator, device=x.device) < 1e-3
    return x + 10 * chosen * torch.randn(x.shape, generator=generator, device=x.device)


def with_layout(layout: str, q, k, v) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same values (expanded layouts repeat the first head or batch) under other strides."""
    if layout == "packed":
        if q.shape == k.shape == v.shape:
            q, k, v = torch.stack([q, k, v], dim=2).unbind(2)
        elif k.shape == v.shape:
            k, v = torch.stack([k, v], dim=2).unbind(2)
        return q, k, v
    if layout == "expanded_heads":
        return q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)
    if layout == "expanded_batch":
        return q, k[:1].expand_as(k), v[:1].expand_as(v)
    if layout == "every_second_row":  # K alone, so that K's and V's strides differ
        return q, _every_second_row(k), v
    view = {
        "contiguous": lambda x: x,
        "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "seq_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "offset": _misaligned,
        "row_padded": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
        "strided_last_dim": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    }[layout]
    return view(q), view(k), view(v)


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    """One element into a fresh buffer: 2 bytes off every alignment for 16-bit types."""
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def _every_second_row(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), math.nan)  # the rows between must not be read
    wide[:, ::2] = x
    return wide[:, ::2]


def exact_inputs(case: Case) -> Inputs:
    """Inputs that every platform rebuilds bit for bit: sums of twelve 16-bit integers from a frozen numpy stream."""
    stream = np.random.RandomState(case.seed)

    def near_normal(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        draws = stream.randint(0, 1 << 16, size=(12, case.batch, seqlen, heads, dim))
        values = (draws.sum(0) - 6 * (1 << 16)).astype(np.float32) / (1 << 16)
        return torch.from_numpy(values).to(case.torch_dtype)

    q = near_normal(case.seqlen_q, case.heads_q, case.head_dim)
    k = near_normal(case.seqlen_k, case.heads_kv, case.head_dim)
    v = near_normal(case.seqlen_k, case.heads_kv, case.head_dim_v)
    return Inputs(q, k, v, near_normal(case.seqlen_q, case.heads_q, case.head_dim_v))
