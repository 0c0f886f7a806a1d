"""Packed sequences for every test: lengths, inputs with NaN where no row may look, and what is right."""

import itertools
import math
from dataclasses import dataclass, fields

import torch

from tests import oracle


@dataclass(frozen=True)
class PackedCase:
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    dtype: str = "float64"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    tail: tuple[int, int] = (0, 0)  # rows of q, and of k and v, after the last sequence

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        words = ["+".join(map(str, lens[:6])) + ("+" if len(lens) > 6 else "") for lens in (self.lens_q, self.lens_k)]
        words += [dims, f"h{self.heads_q}x{self.heads_kv}", self.dtype, "causal" if self.causal else "full"]
        words += ["window" + "x".join(map(str, self.window))] if self.window else []
        words += [f"softcap{self.softcap}"] if self.softcap else []
        words += [f"tail{self.tail[0]}x{self.tail[1]}"] if any(self.tail) else []
        return "-".join(words)

    @property
    def options(self) -> dict:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}


def same(*lengths: int, **others) -> PackedCase:
    """Self-attention: each sequence has as many keys as rows."""
    return PackedCase(lengths, lengths, **others)


# Empty ones first, last and side by side, on one side or both; tile edges of every tile; unequal both ways.
EDGES = (0, 1, 0, 0, 63, 64, 65, 127, 128, 129, 0)
LENGTHS = {
    "edges": (EDGES, EDGES),
    "unequal": ((5, 0, 70, 1, 130, 33), (40, 9, 0, 200, 7, 33)),
    "one": ((77,), (77,)),
    "none": ((), ()),
    "all empty": ((0, 0, 0), (0, 0, 0)),
    "no keys": ((3, 64), (0, 0)),
    "single rows": ((1,) * 40, (1, 2, 3, 4) * 10),
    "single keys": ((1, 2, 3, 70), (1, 1, 1, 1)),
}


def cases(**others) -> list[PackedCase]:
    """Every lengths x mask, with and without rows after the last sequence."""
    found = []
    for (lens_q, lens_k), causal in itertools.product(LENGTHS.values(), (False, True)):
        found.append(PackedCase(lens_q, lens_k, causal=causal, tail=(0, 0) if causal else (70, 3), **others))
    for window in ((3, 2), (0, 0), (None, 5), (40, None)):
        found.append(PackedCase(*LENGTHS["unequal"], window=window, tail=(1, 100), **others))
        found.append(PackedCase(*LENGTHS["edges"], window=window, causal=True, softcap=2.0, **others))
    return found


# Hints, which may be wrong: the tiles of long sequences, and of short ones, whatever the lengths.
LONG = {"max_seqlen_q": 4096, "max_seqlen_k": 4096}
SHORT = {"max_seqlen_q": 64, "max_seqlen_k": 64}
SHORTEST = {"max_seqlen_q": 16, "max_seqlen_k": 16}


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor  # (total_q, heads_q, head_dim)
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor  # (heads_q, total_q)
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    def to(self, device: torch.device) -> "Inputs":
        return Inputs(*(getattr(self, field.name).to(device) for field in fields(self)))

    @property
    def lengths(self) -> dict:
        return {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def make_inputs(case: PackedCase, seed: int = 0) -> Inputs:
    """NaN in every row after the last sequence, of q and dout as of k and v."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    ends = sum(case.lens_q), sum(case.lens_k)
    totals = ends[0] + case.tail[0], ends[1] + case.tail[1]

    def randn(total: int, heads: int, dim: int, end: int) -> torch.Tensor:
        tensor = torch.randn(total, heads, dim, generator=generator, dtype=torch.float64).to(dtype)
        tensor[end:] = math.nan
        return tensor

    return Inputs(
        q=randn(totals[0], case.heads_q, case.head_dim, ends[0]),
        k=randn(totals[1], case.heads_kv, case.head_dim, ends[1]),
        v=randn(totals[1], case.heads_kv, case.head_dim_v, ends[1]),
        dout=randn(totals[0], case.heads_q, case.head_dim_v, ends[0]),
        dlse=torch.randn(case.heads_q, totals[0], generator=generator, dtype=torch.float64).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        ),
        cu_seqlens_q=starts(case.lens_q),
        cu_seqlens_k=starts(case.lens_k),
    )


def _by_sequence(case: PackedCase, inputs: Inputs, forward, backward) -> tuple[oracle.Attention, oracle.Gradients]:
    """Each sequence by itself; outside all of them output 0, LSE -inf, gradients 0."""
    q, k, v, dout, dlse = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse
    out, lse = torch.zeros_like(dout, dtype=torch.float64), torch.full_like(dlse, -math.inf, dtype=torch.float64)
    grads = oracle.Gradients(*(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)))
    spans = (itertools.pairwise(cu.tolist()) for cu in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    for first_last, first_last_k in zip(*spans, strict=True):
        rows, keys = slice(*first_last), slice(*first_last_k)
        one = q[None, rows], k[None, keys], v[None, keys]
        alone = forward(*one, **case.options)
        out[rows], lse[:, rows] = alone.out[0].double(), alone.lse[0].double()
        found = backward(*one, dout[None, rows], dlse[None, :, rows], **case.options)
        grads.dq[rows], grads.dk[keys], grads.dv[keys] = (grad[0].double() for grad in found)
    return oracle.Attention(out, lse), grads


def exact(case: PackedCase, inputs: Inputs) -> tuple[oracle.Attention, oracle.Gradients]:
    """float64."""
    return _by_sequence(case, inputs, oracle.forward, oracle.backward)


def exact_without_lse(case: PackedCase, inputs: Inputs) -> oracle.Gradients:
    """Gradients in float64 where none arrives through LSE."""
    return _by_sequence(case, inputs, oracle.forward, _without_lse(oracle.backward))[1]


def _without_lse(backward):
    return lambda q, k, v, dout, _, **options: backward(q, k, v, dout, **options)


def plain(case: PackedCase, inputs: Inputs) -> tuple[oracle.Attention, oracle.Gradients]:
    """Plain attention in the dtype of the inputs, a yardstick; gradients without LSE's."""
    return _by_sequence(case, inputs, oracle.plain_16bit, _without_lse(oracle.plain_16bit_backward))


def errors(
    case: PackedCase, inputs: Inputs, forward: tuple[torch.Tensor, torch.Tensor], grads: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    """Relative error of each result; LSE's as a share of what it may be off."""
    right, right_grads = exact(case, inputs)
    found = {"out": oracle.relative_error(forward[0], right.out), "lse": oracle.lse_excess(forward[1], right.lse)}
    for name, grad, reference in zip(("dq", "dk", "dv"), grads, right_grads, strict=True):
        found[name] = oracle.relative_error(grad, reference)
    return found
