"""One query row over a key-value cache, beside its rivals: `python -m perf.decode --points 1x8192,16x8192`.

32 query heads, 8 of keys, head dim 128, bfloat16; every row has the whole cache (16x8192), or a part of it (16~8192:
log-normal lengths, the longest the whole); an unsplit one or pages of 64 or 16 keys in random order. GB/s counts K and
V once: 2 * keys * 8 * 128 * 2 bytes. FlashAttention-3 runs at several counts of splits, and its best one counts;
FlexAttention has the lengths in its mask. What has no lengths (SDPA) is no rival where they differ. `read` only reads K
and V: what memory gives, and no rival.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_flash

from . import baselines, check, serving
from .serving import Entrant, Question, Run

HEADS_Q, HEADS_KV, DIM = 32, 8, 128
POINTS = ",".join(f"{b}x{s}" for b in (1, 4, 16, 64) for s in (1024, 8192, 32768, 131072))
FA3_SPLITS = (0, 1, 8, 32, 128)  # 0: its own choice


def lengths_of(batch: int, seqlen: int, uneven: bool) -> list[int]:
    if not uneven:
        return [seqlen] * batch
    drawn = torch.empty(batch).log_normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))
    return (drawn * seqlen / drawn.max()).round().clamp(min=1).int().tolist()


class Operands:
    """Of one point, drawn at the first use: q (B, 1, 32, 128), k and v (B, S, 8, 128)."""

    def __init__(self, lengths: Sequence[int], splits: Sequence[int] = ()) -> None:
        self.batch, self.seqlen, self.splits = len(lengths), max(lengths), splits
        self.keys, self.uneven = lengths, min(lengths) < max(lengths)

    @functools.cached_property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device="cuda").manual_seed(0)
        shapes = ((1, HEADS_Q), (self.seqlen, HEADS_KV), (self.seqlen, HEADS_KV))
        q, k, v = (
            torch.randn(self.batch, s, h, DIM, dtype=torch.bfloat16, device="cuda", generator=generator)
            for s, h in shapes
        )
        return q, k, v

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        return torch.tensor(self.keys, dtype=torch.int32, device="cuda")

    def exact(self) -> tuple[torch.Tensor, ...]:
        q, k, v = self.qkv
        rows = [(q[i, None], k[i, None, :n], v[i, None, :n]) for i, n in enumerate(self.keys)]
        return (torch.cat([check.reference(*row, check.Band(causal=False), DIM**-0.5).out for row in rows]),)

    def table(self, page_size: int) -> torch.Tensor:
        """Pages of a row in random order: those that are seen whole change places, which changes nothing and needs no
        copy."""
        pages = self.seqlen // page_size
        place = torch.rand(self.batch, pages, device="cuda")
        seen = (self.lengths // page_size)[:, None]
        number = torch.arange(pages, device="cuda")
        order = torch.where(number < seen, place, number + 1.0).argsort(dim=1)
        return (order + torch.arange(self.batch, device="cuda")[:, None] * pages).int()

    def ours(self, page_size: int = 0, **options: object) -> Run:
        q, k, v = self.qkv
        tables = {"cache_seqlens": self.lengths}
        if page_size:
            tables["page_table"] = self.table(page_size)
            k, v = (x.view(-1, page_size, HEADS_KV, DIM) for x in (k, v))
        return lambda: (cute_flash.attention_kvcache(q, k, v, **tables, **options),)

    def sdpa(self, kind: SDPBackend) -> Run:
        q, k, v = (x.transpose(1, 2) for x in self.qkv)

        def run() -> tuple[torch.Tensor, ...]:
            with sdpa_kernel(kind):
                return (F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2),)

        return run

    def fa3(self, splits: int) -> Run:
        from fa3_fwd_interface import flash_attn_with_kvcache

        call = functools.partial(flash_attn_with_kvcache, *self.qkv, cache_seqlens=self.lengths, num_splits=splits)
        return lambda: (call(),)

    def read(self) -> Run:
        from .plain_read import sums

        _, k, v = self.qkv
        return lambda: (sums(k, v),)

    def read_right(self) -> tuple[torch.Tensor, ...]:
        from .plain_read import exact

        return (exact(*self.qkv[1:]),)

    def flex(self) -> Run:
        from torch.nn.attention import flex_attention

        torch._dynamo.reset()
        lengths = self.lengths
        mask = flex_attention.create_block_mask(
            lambda batch, _head, _row, key: key < lengths[batch], self.batch, None, 1, self.seqlen, device="cuda"
        )
        compiled = torch.compile(flex_attention.flex_attention, dynamic=False, fullgraph=True)
        heads_first = [x.transpose(1, 2) for x in self.qkv]
        return lambda: (compiled(*heads_first, block_mask=mask, enable_gqa=True).transpose(1, 2),)

    def entrants(self) -> Mapping[str, Entrant]:
        own: dict[str, Callable[[], Run]] = {
            "ours": self.ours,
            "ours-page64": functools.partial(self.ours, 64),
            "ours-page16": functools.partial(self.ours, 16),
            "ours-invariant": functools.partial(self.ours, batch_invariant=True),
            "ours-triton": functools.partial(self.ours, backend="triton"),
            **{f"ours-splits{n}": functools.partial(self.ours, num_splits=n) for n in self.splits},
        }
        versions = {name: baselines.CONTESTANTS[name].version() for name in ("cudnn", "fa2", "fa3", "flex")}
        rivals: dict[str, tuple[Callable[[], Run], str]] = {
            "cudnn": (functools.partial(self.sdpa, SDPBackend.CUDNN_ATTENTION), versions["cudnn"]),
            "fa2": (functools.partial(self.sdpa, SDPBackend.FLASH_ATTENTION), versions["fa2"]),
            **{f"fa3-{n}-splits": (functools.partial(self.fa3, n), versions["fa3"]) for n in FA3_SPLITS},
            "flex": (self.flex, versions["flex"]),
        }
        plain = {} if self.uneven else {"read": Entrant(self.read, "", ours=True, exact=self.read_right)}
        if self.uneven:
            rivals = {name: rival for name, rival in rivals.items() if name not in ("cudnn", "fa2")}
        return {
            **{name: Entrant(make, "", ours=True) for name, make in own.items()},
            **{name: Entrant(*rival) for name, rival in rivals.items()},
            **plain,
        }


def question(point: str, splits: Sequence[int] = ()) -> Question:
    uneven = "~" in point
    batch, seqlen = (int(part) for part in point.replace("~", "x").split("x"))
    lengths = lengths_of(batch, seqlen, uneven)
    operands = Operands(lengths, splits)
    columns = {
        "pass": "decode", "dtype": "bf16", "d": str(DIM), "dv": str(DIM), "mask": "lengths" if uneven else "full",
        "B": str(batch), "Hq": str(HEADS_Q), "Hkv": str(HEADS_KV), "Sq": "1", "Sk": str(seqlen),
    }  # fmt: skip
    keys = sum(lengths)
    bytes_read = 2 * keys * HEADS_KV * DIM * 2
    return Question(
        columns, operands.entrants, operands.exact, 4.0 * keys * HEADS_Q * DIM,
        lambda us: f"{bytes_read / us * 1e-3:.0f} GB/s",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = serving.parser("decode", __doc__.splitlines()[0], POINTS)
    parser.add_argument("--splits", default="", metavar="N,...", help="ours with so many shares of the keys, too")
    args = parser.parse_args(argv)
    splits = [int(n) for n in args.splits.split(",") if n]
    serving.race(args, (question(point, splits) for point in args.points.split(",")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
