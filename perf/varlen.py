"""Packed sequences beside their rivals, forward and backward: `python -m perf.varlen --points lognormal,64`.

16 heads, head dim 128, bfloat16, causal. `lognormal`: 64 sequences, the longest 7000; a number: as many tokens a
sequence as it says, 262144 in all. FLOPs are those of the visible pairs of each sequence, 2.5 times for the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_flash

from . import baselines, serving
from .serving import Entrant, Question, Run

HEADS, DIM, TOKENS = 16, 128, 262144
SCORES = 2**31  # of one block of the reference
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def lengths_of(point: str) -> list[int]:
    if point != "lognormal":
        return [int(point)] * (TOKENS // int(point))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(64).log_normal_(6.5, 1.0, generator=generator)
    return (lengths * 7000 / lengths.max()).clamp(min=1).int().tolist()


class Operands:
    """Of one point, drawn at the first use: q, k, v and dout, each (tokens, 16, 128)."""

    def __init__(self, lengths: list[int], backward: bool) -> None:
        self.lengths, self.backward, self.longest = lengths, backward, max(lengths)

    @functools.cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device="cuda").manual_seed(0)
        shape = (sum(self.lengths), HEADS, DIM)
        return tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in range(4))

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(self.lengths).cumsum(0)], dtype=torch.int32, device="cuda")

    def exact(self) -> tuple[torch.Tensor, ...]:
        """(out,) or (dq, dk, dv) in float32 by PyTorch's unfused attention, sequences of one length together."""
        results = tuple(torch.empty(x.shape, device="cuda") for x in self.tensors[: 3 if self.backward else 1])
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        with sdpa_kernel(SDPBackend.MATH):
            for rows, length in self._blocks():
                q, k, v, dout = (x[rows].float().view(-1, length, HEADS, DIM).transpose(1, 2) for x in self.tensors)
                leaves = [x.requires_grad_(self.backward) for x in (q, k, v)]
                found = (F.scaled_dot_product_attention(*leaves, is_causal=True),)
                if self.backward:
                    found = torch.autograd.grad(found[0], leaves, dout)
                for result, block in zip(results, found, strict=True):
                    result[rows] = block.transpose(1, 2).flatten(0, 1)
        torch.set_float32_matmul_precision(before)
        return results

    def _blocks(self) -> Iterator[tuple[slice, int]]:
        """Runs of neighbours of one length, cut so that their scores fit."""
        first = at = 0
        while first < len(self.lengths):
            length, last = self.lengths[first], first
            most = max(1, SCORES // (HEADS * length * length))
            while last < len(self.lengths) and self.lengths[last] == length and last - first < most:
                last += 1
            yield slice(at, at + (last - first) * length), length
            at, first = at + (last - first) * length, last

    def run(self, attend: Attend) -> Run:
        leaves = [x.detach().requires_grad_(self.backward) for x in self.tensors[:3]]
        if not self.backward:
            return lambda: (attend(*leaves),)
        out: list[torch.Tensor] = []

        def backward() -> tuple[torch.Tensor, ...]:
            if not out:  # on the capturing stream: autograd runs a backward on its forward's
                out.append(attend(*leaves))
            return torch.autograd.grad(out[0], leaves, self.tensors[3], retain_graph=True)

        return backward

    def ours(self, hints: bool = True, **options: object) -> Run:
        named = {"max_seqlen_q": self.longest, "max_seqlen_k": self.longest} if hints else {}
        starts = {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts}
        return self.run(functools.partial(cute_flash.attention_varlen, causal=True, **starts, **named, **options))

    def flash(self, module: str) -> Run:
        """FlashAttention-3 or -4, whose functions have the same arguments."""
        function = getattr(__import__(module, fromlist=["flash_attn_varlen_func"]), "flash_attn_varlen_func")  # noqa: B009
        named = {
            "cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts, "causal": True,
            "max_seqlen_q": self.longest, "max_seqlen_k": self.longest,
        }  # fmt: skip

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            found = function(*qkv, **named)
            return found[0] if isinstance(found, tuple) else found

        return self.run(attend)

    def torch(self) -> Run:
        from torch.nn.attention.varlen import varlen_attn

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return varlen_attn(*qkv, self.starts, self.starts, self.longest, self.longest, window_size=(-1, 0))

        return self.run(attend)

    def entrants(self) -> Mapping[str, Entrant]:
        own: dict[str, Callable[[], Run]] = {
            "ours": self.ours,
            "ours-no-hint": functools.partial(self.ours, hints=False),
            "ours-triton": functools.partial(self.ours, backend="triton"),
        }
        version = {name: baselines.CONTESTANTS[name].version() for name in ("fa3", "fa4")}
        rivals = {
            "fa4": Entrant(functools.partial(self.flash, "flash_attn.cute.interface"), version["fa4"]),
            "torch": Entrant(self.torch, torch.__version__),
        }
        if not self.backward:  # the wheel is forward only
            rivals["fa3"] = Entrant(functools.partial(self.flash, "fa3_fwd_interface"), version["fa3"])
        return {name: Entrant(make, "", ours=True) for name, make in own.items()} | rivals


def question(point: str, backward: bool) -> Question:
    lengths = lengths_of(point)
    operands = Operands(lengths, backward)
    columns = {
        "pass": "varlen-bwd" if backward else "varlen-fwd", "dtype": "bf16", "d": str(DIM), "dv": str(DIM),
        "mask": "causal", "B": str(len(lengths)), "Hq": str(HEADS), "Hkv": str(HEADS),
        "Sq": str(max(lengths)), "Sk": str(max(lengths)),
    }  # fmt: skip
    flops = (2.5 if backward else 1.0) * 4 * HEADS * DIM * sum(n * (n + 1) / 2 for n in lengths)
    return Question(columns, operands.entrants, operands.exact, flops, lambda us: f"{flops / us * 1e-6:.0f} TFLOP/s")


def main(argv: Sequence[str] | None = None) -> int:
    made = serving.parser("varlen", __doc__.splitlines()[0], "lognormal,64,16,4096")
    made.add_argument("--direction", choices=("fwd", "bwd", "both"), default="both")
    args = made.parse_args(argv)
    passes = {"fwd": (False,), "bwd": (True,), "both": (False, True)}[args.direction]
    serving.race(args, (question(point, backward) for backward in passes for point in args.points.split(",")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
