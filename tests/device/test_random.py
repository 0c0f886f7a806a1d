"""Calls drawn at random, kind by kind, against float64: lengths around every edge, layouts, scales, bounds and subsets
of gradients that no list has side by side. A wrong tile, row or bound is far outside what is allowed here; how exact a
kernel is, other files ask.
"""

import itertools
import math
import random
import warnings
from dataclasses import dataclass

import pytest
import torch

import cute_flash
from tests import cached, oracle, packed
from tests.device.gpu import DEVICE, SPECIAL
from tests.runner import HALF_ULP, ONE_KEY_ATOL

pytestmark = pytest.mark.skipif(not SPECIAL, reason="needs a GPU with kernels of its own")

DRAWS = 24
# around the edges of every tile that a plan has, the shared and the short ones included
LENGTHS = (
    1, 2, 7, 8, 9, 33, 63, 64, 65, 79, 80, 81, 96, 97, 112, 127, 128, 129, 160, 175, 176, 177, 192, 193, 255, 257, 320,
    511, 700, 1023, 1024, 1025, 1300,
)  # fmt: skip
SCALES = (None, None, None, 0.0, -0.2, 1e-6, 0.6, 2.0**-100)


@dataclass(frozen=True)
class Kind:
    dims: tuple[int, int]
    mask: str = (
        "full"  # full, causal, or the bounds of a window that there are: left, right, both, sliding (causal left)
    )
    softcap: bool = False
    dtype: str = "bfloat16"
    group: int = 1
    deterministic: bool = False

    def __str__(self) -> str:
        words = [self.dtype, f"d{self.dims[0]}v{self.dims[1]}", self.mask, f"group{self.group}"]
        words += ["softcap"] * self.softcap + ["deterministic"] * self.deterministic
        return "-".join(words)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def options(self, draw: random.Random) -> dict:
        bounds = [draw.choice((0, 0, 1, 5, 63, 64, 100, 128, 500, 2**40)) for _ in range(2)]
        window = {"left": (bounds[0], None), "right": (None, bounds[1] + 1), "both": (bounds[0], bounds[1] + 1)}
        window["sliding"] = (bounds[0], None)
        return {
            "causal": self.mask in ("causal", "sliding"),
            "window": window.get(self.mask),
            "softcap": draw.choice((0.01, 1.0, 30.0, 1000.0)) if self.softcap else None,
            "scale": draw.choice(SCALES),
        }


DENSE = (
    Kind((64, 64)),
    Kind((64, 64), "causal", group=7),
    Kind((128, 128), "causal", dtype="float16", group=2),
    Kind((128, 128), softcap=True),
    Kind((128, 128), deterministic=True, group=3),
    Kind((192, 128), "causal"),
    Kind((192, 192), deterministic=True),
    Kind((256, 256), "causal", group=2),
    Kind((8, 256)),
    Kind((256, 8), "causal", group=7),
    Kind((40, 40), "causal", dtype="float16"),
    Kind((72, 72), "both"),
    Kind((136, 136), "sliding", group=2),
    Kind((200, 200), "causal", deterministic=True),
    Kind((96, 96), "right", softcap=True),
    Kind((100, 60), "left"),
    Kind((96, 96), "causal", deterministic=True, group=2),
)
PACKED = (
    Kind((64, 64), "causal", group=7),
    Kind((128, 128), dtype="float16"),
    Kind((192, 128), "both"),
    Kind((256, 256), "causal", softcap=True, group=2),
    Kind((100, 60), "sliding"),
)
CACHED = (
    Kind((128, 128), "causal", group=8),
    Kind((64, 64), "left", dtype="float16"),
    Kind((192, 128), softcap=True, group=7),
    Kind((8, 256), "sliding", group=2),
)


def values(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(2**40))
    x = torch.randn(shape, generator=generator)
    return (x.abs() * -3.0 if draw.random() < 0.1 else x).to(DEVICE, dtype)  # nothing above 0: maxima are


def laid_out(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The same values (expanded: the first head's), lying otherwise; NaN all around."""
    how = draw.choice(("plain", "plain", "heads", "gaps", "shifted", "columns", "expanded", "fused", "odd batch"))
    if x.shape[1] == 1 and draw.random() < 0.5:  # of a single row the stride says nothing
        return x.as_strided(x.shape, (x.stride(0), 1, *x.stride()[2:]))
    if how == "heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "columns":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "expanded":
        return x[:, :, :1].expand(x.shape)
    before = {"gaps": (1, 5, 0, 0), "fused": (0, 0, 2, 0), "shifted": (0, 0, 0, 3), "odd batch": (0, 0, 0, 0)}.get(how)
    if before is None:
        return x
    sizes = [size + 2 * more for size, more in zip(x.shape, before, strict=True)]
    odd = int(how == "odd batch")  # every batch entry but the first is misaligned
    around = torch.full((sizes[0], math.prod(sizes[1:]) + odd), math.nan, dtype=x.dtype, device=x.device)
    inner = around[:, : math.prod(sizes[1:])].unflatten(1, sizes[1:])
    room = inner[tuple(slice(more, more + size) for size, more in zip(x.shape, before, strict=True))]
    return room.copy_(x)


def gradient_laid_out(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    how = draw.choice(("as any", "as any", "number", "row"))
    if how == "number":
        return x[:1, :1, :1, :1].expand(x.shape)
    return x[:, :1].expand(x.shape) if how == "row" else laid_out(draw, x)


def near(name: str, value, right, *yardsticks, times: int = 1) -> None:
    """Within twice the error of a yardstick, such as plain 16-bit attention, or a few roundings; `times` so much where
    differences cancel."""
    assert value.shape == right.shape, name
    if right.abs().max() <= torch.finfo(value.dtype).tiny:  # 0, or nothing that the dtype holds
        assert value.abs().max() <= ONE_KEY_ATOL, name
        return
    error, *allowed = (oracle.relative_error(x, right) for x in (value, *yardsticks))
    limit = times * max(*(2 * each for each in allowed), 4 * HALF_ULP[value.dtype])
    assert error <= limit, f"{name}: {error:.2e}, allowed {limit:.2e}"


def near_gradients(found, qkv, of: tuple, options: dict) -> None:
    """`found`: dQ, dK and dV, None for one that was not asked for; `of`: (dO, dLSE or None)."""
    dout, dlse = of
    right = oracle.backward(*qkv, dout, dlse, **options)
    plain = oracle.plain_16bit_backward(*qkv, dout, **options)
    if dlse is not None:  # plain attention's error without it, beside the gradient that has it
        without = oracle.backward(*qkv, dout, **options)
        plain = [y.double() - a + b for y, a, b in zip(plain, without, right, strict=True)]
    # delta is dO times O as it left the forward, rounded: all of dP - delta where one of few keys has nearly all weight
    out = oracle.forward(*qkv, **options).out
    slip = ((out.to(qkv[0].dtype) - out) * dout).sum(-1).transpose(1, 2)
    rounded = oracle.backward(*qkv, dout, -slip if dlse is None else dlse - slip, **options)
    for name, value, reference, *yardsticks in zip(("dq", "dk", "dv"), found, right, plain, rounded, strict=True):
        if value is not None and value.numel():
            near(name, value, reference, *yardsticks, times=2)


def tried(kind: Kind, one) -> None:
    """Every draw; the ones that fail are named together."""
    failed = []
    for seed in range(DRAWS):
        draw, said = random.Random(f"{kind}{seed}"), []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cute_flash.FallbackWarning)
                one(kind, draw, said)
        except AssertionError as error:
            failed.append(f"draw {seed}: {' '.join(map(str, said))}: {error}".splitlines()[0])
    assert not failed, "\n".join(failed)


def dense(kind: Kind, draw: random.Random, said: list) -> None:
    batch, heads_kv = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3))
    rows, keys = draw.choice(LENGTHS), draw.choice(LENGTHS)
    keys = rows if draw.random() < 0.3 else keys
    options = kind.options(draw)
    said += [batch, heads_kv, rows, keys, options]
    shapes = ((batch, rows, heads_kv * kind.group, kind.dims[0]), *((batch, keys, heads_kv, dim) for dim in kind.dims))
    qkv = [laid_out(draw, values(draw, shape, kind.torch_dtype)) for shape in shapes]
    said += [x.stride() for x in qkv]
    wanted = draw.choice(((0, 1, 2), (0, 1, 2), (0,), (1,), (1, 2)))
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(qkv)]
    out, lse = cute_flash.attention(
        *leaves, **options, return_lse=True, deterministic=kind.deterministic, backend=SPECIAL[0]
    )
    exact, plain = oracle.forward(*qkv, **options), oracle.plain_16bit(*qkv, **options)
    near("out", out, exact.out, plain.out)
    assert oracle.lse_excess(lse, exact.lse) <= 1, "lse"
    dout = gradient_laid_out(draw, values(draw, tuple(out.shape), kind.torch_dtype))
    dlse = draw.choice((None, torch.randn(lse.shape).to(DEVICE), torch.ones((), device=DEVICE).expand(lse.shape)))
    said += [dout.stride(), None if dlse is None else dlse.stride(), wanted]
    targets, weights = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    found = iter(torch.autograd.grad(targets, [leaves[i] for i in wanted], weights))
    near_gradients([next(found) if i in wanted else None for i in range(3)], qkv, (dout, dlse), options)


@pytest.mark.parametrize("kind", DENSE, ids=str)
def test_dense(kind):
    tried(kind, dense)


def packs(kind: Kind, draw: random.Random, said: list) -> None:
    count = draw.choice((0, 1, 2, 5, 40))
    short = draw.random() < 0.4
    lens = [[draw.choice((0, *LENGTHS[: 9 if short else 28])) for _ in range(count)] for _ in range(2)]
    options = kind.options(draw)
    scale = options.pop("scale")
    case = packed.PackedCase(
        *map(tuple, lens), 2 * kind.group, 2, *kind.dims, dtype=kind.dtype,
        tail=draw.choice(((0, 0), (1, 1), (70, 3))), **options,
    )  # fmt: skip
    said += [case, scale]
    inputs = packed.make_inputs(case, draw.randrange(2**30)).to(DEVICE)
    if 0 in (inputs.q.shape[0], inputs.k.shape[0]):
        return
    q, k, v = (laid_out(draw, x[None])[0] for x in (inputs.q, inputs.k, inputs.v))
    said += [x.stride() for x in (q, k, v)]
    hints = draw.choice(({}, packed.LONG, packed.SHORT))
    wanted = draw.random() < 0.5  # gradients; those of the widest heads by whoever serves them
    leaves = [x.detach().requires_grad_(wanted) for x in (q, k, v)]
    out, lse = cute_flash.attention_varlen(
        *leaves, **inputs.lengths, **hints, **options, scale=scale, return_lse=True,
        backend=None if wanted and max(kind.dims) > 192 else SPECIAL[0], deterministic=kind.deterministic,
    )  # fmt: skip
    grads = torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse]) if wanted else ()
    spans = (list(itertools.pairwise(cu.tolist())) for cu in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    end, end_k = 0, 0
    options["scale"] = scale
    for (first, end), (first_k, end_k) in zip(*spans, strict=True):
        one = q[None, first:end], k[None, first_k:end_k], v[None, first_k:end_k]
        exact, plain = (f(*one, **options) for f in (oracle.forward, oracle.plain_16bit))
        if end > first:
            near(f"out of rows {first} to {end}", out[None, first:end], exact.out, plain.out)
            assert oracle.lse_excess(lse[None, :, first:end], exact.lse) <= 1, f"lse of rows {first} to {end}"
        if wanted:
            found = grads[0][None, first:end], grads[1][None, first_k:end_k], grads[2][None, first_k:end_k]
            near_gradients(found, one, (inputs.dout[None, first:end], inputs.dlse[None, :, first:end]), options)
    assert not out[end:].any() and bool((lse[:, end:] == -math.inf).all()), "after the last sequence"
    assert not any(grad[last:].any() for grad, last in zip(grads, (end, end_k, end_k), strict=False)), "gradients there"


@pytest.mark.parametrize("kind", PACKED, ids=str)
def test_packed(kind):
    tried(kind, packs)


def caches(kind: Kind, draw: random.Random, said: list) -> None:
    page = draw.choice((0, 0, 1, 16, 64, 256))
    lens = tuple(draw.choice((0, *LENGTHS)) for _ in range(draw.choice((1, 2, 5))))
    options = kind.options(draw)
    scale, rows = options.pop("scale"), draw.choice((1, 1, 1, 2, 5, 16))
    case = cached.CacheCase(
        lens, rows, 2 * kind.group, 2, *kind.dims, capacity=max(lens) + draw.choice((0, 1, 300)) or 1, page_size=page,
        chosen=not page and draw.random() < 0.3, dtype=kind.dtype, **options,
    )  # fmt: skip
    splits = draw.choice(({}, {}, {"num_splits": 1}, {"num_splits": 3}, {"num_splits": 50}, {"batch_invariant": True}))
    said += [case, scale, splits]
    inputs = cached.make_inputs(case, draw.randrange(2**30)).to(DEVICE)
    q, new, tables = laid_out(draw, inputs.q), {}, dict(inputs.tables)
    appended = draw.choice((0, 0, 1, 3)) if min(lens) >= 3 else 0
    wanted = [x.clone() for x in (inputs.k, inputs.v)]
    if appended:  # the last keys arrive with the call
        added, tables["cache_seqlens"] = cached.taken_out(inputs, appended)
        new = {name: laid_out(draw, x.to(DEVICE)) for name, x in zip(("k_new", "v_new"), added, strict=True)}
        for row, at in itertools.product(range(len(lens)), range(appended)):
            place = inputs.place_of(row, lens[row] - appended + at)
            for x, keys in zip(wanted, new.values(), strict=True):
                x[place] = keys[row, at]
    said += [q.stride(), *(x.stride() for x in new.values())]
    out, lse = cute_flash.attention_kvcache(
        q, inputs.k, inputs.v, **tables, **options, **splits, **new, scale=scale, return_lse=True, backend=SPECIAL[0]
    )
    assert cached.same(inputs.k, wanted[0]) and cached.same(inputs.v, wanted[1]), "the caches"
    for row, length in enumerate(lens):
        one = q[row, None], *inputs.keys_of(row, length)
        exact, plain = (f(*one, **options, scale=scale) for f in (oracle.forward, oracle.plain_16bit))
        near(f"out of row {row}", out[row, None], exact.out, plain.out)
        assert oracle.lse_excess(lse[row, None], exact.lse) <= 1, f"lse of row {row}"


@pytest.mark.parametrize("kind", CACHED, ids=str)
def test_cached(kind):
    tried(kind, caches)
