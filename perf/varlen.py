"""Packed sequences, forward, beside FlashAttention-3 and 4 and PyTorch's own: `python -m perf.varlen --points 64`.

16 heads, head dim 128, bfloat16, causal. `lognormal`: 64 sequences, the longest about 7k; a number: as many tokens a
sequence as it says, 262144 in all. TFLOP/s counts visible pairs of each sequence.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import torch

import cute_flash

from .replay import Contest, Run

HEADS, DIM, TOKENS = 16, 128, 262144


def lengths_of(point: str) -> list[int]:
    if point != "lognormal":
        return [int(point)] * (TOKENS // int(point))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(64).log_normal_(6.5, 1.0, generator=generator)
    return (lengths * 7000 / lengths.max()).clamp(min=1).int().tolist()


def _fa4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> Run:
    from flash_attn.cute.interface import flash_attn_varlen_func

    named = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def run() -> torch.Tensor:
        found = flash_attn_varlen_func(q, k, v, **named, causal=True)
        return found[0] if isinstance(found, tuple) else found

    return run


def _fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> Run:
    from fa3_fwd_interface import flash_attn_varlen_func

    def run() -> torch.Tensor:
        found = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)
        return found[0] if isinstance(found, tuple) else found

    return run


def _torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> Run:
    from torch.nn.attention.varlen import varlen_attn

    return functools.partial(varlen_attn, q, k, v, starts, starts, longest, longest, window_size=(-1, 0))


def contestants(lengths: list[int]) -> dict[str, Callable[[], Run]]:
    torch.manual_seed(0)
    longest = max(lengths)
    q, k, v = (torch.randn(sum(lengths), HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    ours = functools.partial(
        cute_flash.attention_varlen, q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True
    )
    return {
        "ours": lambda: functools.partial(ours, max_seqlen_q=longest, max_seqlen_k=longest),
        "ours-no-hint": lambda: ours,
        "triton": lambda: functools.partial(ours, max_seqlen_q=longest, max_seqlen_k=longest, backend="triton"),
        "fa3": lambda: _fa3(q, k, v, starts, longest),
        "fa4": lambda: _fa4(q, k, v, starts, longest),
        "torch": lambda: _torch(q, k, v, starts, longest),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.varlen", description=__doc__.splitlines()[0])
    parser.add_argument("--points", default="lognormal,64,16,4096")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each point")
    args = parser.parse_args(argv)
    for point in args.points.split(","):
        lengths = lengths_of(point)
        contest = Contest(contestants(lengths))
        flops = 4 * HEADS * DIM * sum(n * (n + 1) / 2 for n in lengths)
        found = contest.medians(args.seconds)
        print(
            f"{point}: {len(lengths)} sequences, {sum(lengths)} tokens;",
            "; ".join(f"{name} {t:.1f} us {flops / t / 1e6:.0f} TFLOP/s" for name, t in found.items()), flush=True,
        )  # fmt: skip
        for name, reason in contest.out.items():
            print(f"  {name}: {reason}", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
