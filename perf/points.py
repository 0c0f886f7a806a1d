"""What is measured: a Point is one attention shape and direction; named sets are the tables that are reported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

HIDDEN = 2048  # heads * head_dim of the tables
TOKENS = 16384  # batch * seqlen of the tables (a longer sequence: batch 1)
TABLE_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
TABLE_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
FLEX_SEQLENS = (1024, 4096, 16384)  # FlexAttention compiles for seconds a shape: these lengths of a table only
MASKS = ("full", "causal")
WINDOW = re.compile(r"window([1-9]\d*)")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Point:
    head_dim: int
    head_dim_v: int
    mask: str  # "full", "causal", or "window1024": causal, and a row sees 1024 keys at most, itself among them
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    dtype: str = "bf16"
    direction: str = "fwd"  # "fwd" or "bwd"
    without: frozenset[str] = frozenset()  # contestants that this table does not ask

    def __post_init__(self) -> None:
        if (
            not (self.mask in MASKS or WINDOW.fullmatch(self.mask))
            or self.dtype not in DTYPES
            or self.direction not in ("fwd", "bwd")
        ):
            raise ValueError(f"mask {self.mask!r}, dtype {self.dtype!r} or direction {self.direction!r} is unknown")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q={self.heads_q} is no multiple of heads_kv={self.heads_kv}")

    @property
    def causal(self) -> bool:
        return self.mask != "full"

    @property
    def left(self) -> int | None:
        """Keys before the diagonal that a row sees at most; None = all."""
        found = WINDOW.fullmatch(self.mask)
        return int(found[1]) - 1 if found else None

    @property
    def numbers(self) -> tuple[float, ...]:
        """What a kernel takes after its tensors: the scale, and under a window (left, right, softcap) too."""
        return (self.scale,) if self.left is None else (self.scale, self.left, 0, 0.0)

    @property
    def flops(self) -> float:
        """2*B*H*Sq*Sk*(d + dv), half of it for causal, the pairs inside it for a window; 2.5 times for the backward."""
        area = self.seqlen_q * self.seqlen_k * (0.5 if self.causal else 1.0)
        if self.left is not None:
            shift = self.seqlen_k - self.seqlen_q
            area = sum(max(0, min(row + shift, self.left) + 1) for row in range(self.seqlen_q))
        area *= self.batch * self.heads_q
        return 2.0 * area * (self.head_dim + self.head_dim_v) * (2.5 if self.direction == "bwd" else 1.0)

    @property
    def rows(self) -> int:
        """Query rows of all heads and sequences."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def columns(self) -> dict[str, str]:
        """The columns of a CSV row that name the point."""
        return {
            "pass": self.direction,
            "dtype": self.dtype,
            "d": str(self.head_dim),
            "dv": str(self.head_dim_v),
            "mask": self.mask,
            "B": str(self.batch),
            "Hq": str(self.heads_q),
            "Hkv": str(self.heads_kv),
            "Sq": str(self.seqlen_q),
            "Sk": str(self.seqlen_k),
        }

    def shrunk(self, seqlen: int = 96) -> Point:
        """A tiny relative, for trying the scripts on a CPU."""
        heads_kv = min(self.heads_kv, 2)
        group = min(self.heads_q // self.heads_kv, 4)
        lengths = (min(self.seqlen_q, seqlen), min(self.seqlen_k, seqlen))
        return replace(
            self,
            mask=self.mask if self.left is None else f"window{min(self.left + 1, seqlen // 3)}",
            batch=min(self.batch, 2),
            heads_q=heads_kv * group,
            heads_kv=heads_kv,
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
        )

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim},{self.head_dim_v})"
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        length = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}/{self.seqlen_k}"
        return f"{self.direction} {self.dtype} d={dims} {self.mask} B={self.batch} H={heads} S={length}"


def point(head_dim: int, mask: str, seqlen: int, head_dim_v: int | None = None, **more: Any) -> Point:
    """A point of the tables: TOKENS tokens and HIDDEN // head_dim heads unless `more` says otherwise."""
    heads = HIDDEN // head_dim
    fields: dict[str, Any] = {
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        "mask": mask,
        "batch": max(1, TOKENS // seqlen),
        "heads_q": heads,
        "heads_kv": heads,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
    }
    return Point(**{**fields, **more})


def _foundation() -> Iterator[Point]:
    for mask in MASKS:
        yield point(128, mask, 16384)
    for head_dim, head_dim_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for mask in MASKS:
            yield point(head_dim, mask, 4096, head_dim_v)
    yield point(128, "causal", 1024)
    yield point(64, "causal", 16384)
    yield point(128, "causal", 8192, batch=2, heads_q=32, heads_kv=8)
    yield point(128, "full", 4096, dtype="fp16")


def _table(direction: str) -> Iterator[Point]:
    for head_dim, head_dim_v in TABLE_DIMS:
        for mask in MASKS:
            for seqlen in TABLE_SEQLENS:
                without = frozenset() if seqlen in FLEX_SEQLENS else frozenset({"flex"})
                yield point(head_dim, mask, seqlen, head_dim_v, direction=direction, without=without)
    yield from _named(direction)


def _named(direction: str) -> Iterator[Point]:
    """Thirteen points beside the table: float16, grouped heads, batch 1, a sliding window."""
    more: dict[str, Any] = {"direction": direction, "without": frozenset({"flex"})}
    for head_dim in (64, 128):
        for mask in MASKS:
            yield point(head_dim, mask, 4096, dtype="fp16", **more)
    for seqlen, mask in ((2048, "causal"), (8192, "causal"), (8192, "full"), (16384, "causal")):
        yield point(128, mask, seqlen, heads_q=32, heads_kv=8, batch=max(1, TOKENS // seqlen), **more)
    for head_dim, seqlen, mask in (
        (128, 1024, "causal"),
        (128, 4096, "causal"),
        (64, 4096, "causal"),
        (128, 4096, "full"),
    ):
        yield point(head_dim, mask, seqlen, batch=1, **more)
    yield point(128, "window1024", 16384, **more)


def _smoke() -> Iterator[Point]:
    for direction in ("fwd", "bwd"):
        yield point(64, "full", 512, batch=2, heads_q=4, heads_kv=4, direction=direction)
        yield point(128, "causal", 1024, batch=1, heads_q=8, heads_kv=2, direction=direction)


SETS = {
    "smoke": tuple(_smoke()),
    "foundation": tuple(_foundation()),
    "foundation-backward": tuple(replace(p, direction="bwd") for p in _foundation()),
    "hopper-forward": tuple(_table("fwd")),
    "hopper-backward": tuple(_table("bwd")),
    "blackwell-forward": tuple(_table("fwd")),
    "blackwell-backward": tuple(_table("bwd")),
}
SHORT_NAMES = {
    "d": "head_dim",
    "dv": "head_dim_v",
    "mask": "mask",
    "S": "seqlen",
    "Sq": "seqlen_q",
    "Sk": "seqlen_k",
    "B": "batch",
    "H": "heads",
    "Hq": "heads_q",
    "Hkv": "heads_kv",
    "dtype": "dtype",
    "pass": "direction",
}


def _words(text: str) -> dict[str, Any]:
    """`d=128,mask=causal` as fields; an unknown name lists the known ones."""
    fields: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name not in SHORT_NAMES or not value:
            raise ValueError(f"{word!r} is not NAME=VALUE with NAME one of {', '.join(SHORT_NAMES)}")
        fields[SHORT_NAMES[name]] = int(value) if value.isdigit() else value
    return fields


def parse(text: str) -> tuple[Point, ...]:
    """The points of a set's name, or the one point that `d=128,mask=causal,S=4096,...` spells."""
    if text in SETS:
        return SETS[text]
    if "=" not in text:
        raise ValueError(f"{text!r} is neither a set ({', '.join(SETS)}) nor NAME=VALUE words")
    fields = _words(text)
    if heads := fields.pop("heads", None):
        fields = {"heads_q": heads, "heads_kv": heads, **fields}
    needed = [fields.pop(name, default) for name, default in (("head_dim", 128), ("mask", "full"), ("seqlen", 4096))]
    return (point(*needed, **fields),)


def matches(candidate: Point, text: str) -> bool:
    """Does the point have every value of `d=64,mask=causal`? (S and H ask for both lengths or head counts.)"""
    have: Mapping[str, object] = asdict(candidate)
    for name, value in _words(text).items():
        ends = {"seqlen": ("seqlen_q", "seqlen_k"), "heads": ("heads_q", "heads_kv")}.get(name, (name,))
        if any(have[end] != value for end in ends):
            return False
    return True
