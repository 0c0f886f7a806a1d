"""Problem: one attention call, described as a frozen value that prints itself. Backends read it; nothing else may."""

from dataclasses import dataclass, field
from typing import Any

from .device import Device
from .mask import FULL, Mask

FORWARD, BACKWARD = "forward", "backward"
HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 256  # of head_dim and head_dim_v
SHORT_KEYS = 1024  # up to here a call counts as short
SMALL_ROWS, SMALL_ROWS_FULL = 128 * 128, 64 * 128  # see small_rows
# How sequences lie in the operands, see backend.py.
DENSE, PACKED, CACHE = "dense", "packed", "cache"
FEW = (16, 32, 64)  # what the longest of packed sequences is rounded up to where it is that short

CACHE_FEW = (8, *FEW)  # likewise the query rows of a group, over a cache


def small_rows(bounded: Any) -> int:
    """Query rows of all heads and sequences up to which a call counts as small. `bounded` is true of a mask, a window
    or a softcap: without, tiles cost the same, and half as many rows fill a GPU. Any value will do: a warm call gives
    its request.Kind."""
    return SMALL_ROWS if bounded else SMALL_ROWS_FULL


@dataclass(frozen=True)
class Problem:
    direction: str  # FORWARD or BACKWARD
    device: Device
    dtype: str  # torch's name without "torch.": "bfloat16", "float16", "float32", "float64", ...
    head_dim: int  # the true one, of q and k
    head_dim_v: int
    heads_q: int
    heads_kv: int
    mask: Mask = FULL
    lse: bool = False  # the forward writes LSE (asked for, or needed by a later backward)
    lse_grad: bool = False  # backward only: a gradient arrives through LSE
    deterministic: bool = False
    ieee_float32: bool = True  # float32 matmuls must not round to TF32
    features: frozenset[str] = frozenset()  # options beyond the plain call, by public name such as "softcap"
    short: bool = False  # seqlen_k <= SHORT_KEYS, where another plan may win
    small: bool = False  # DENSE, of a backward causal: batch * heads_q * seqlen_q <= small_rows, likewise
    form: str = DENSE
    few_rows: int = 0  # PACKED: no sequence has more query rows, as the caller says; one of FEW, 0 = more or not said
    few_keys: int = 0
    page_size: int = 0  # CACHE: keys of a page, 0 = the cache is not paged. few_rows counts a group's query rows there
    chosen: bool = False  # CACHE: cache_batch_idx says which of its rows are meant
    appends: bool = False  # CACHE: k_new and v_new are given
    unaligned: tuple[str, ...] = field(default=())  # why q, k or v is not 16-byte friendly, one sentence each

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def small_rows(self) -> int:
        return small_rows(self.mask != FULL or self.features)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim},{self.head_dim_v})"
        extras = f" {self.form}" if self.form != DENSE else ""
        extras += f" page_size={self.page_size}" if self.page_size else ""
        extras += "".join(f" {name}" for name in ("chosen", "appends") if getattr(self, name))
        extras += f" rows<={self.few_rows}" if self.few_rows else ""
        extras += f" keys<={self.few_keys}" if self.few_keys else ""
        extras += "".join(f" {name}" for name in sorted(self.features))
        extras += " lse" if self.lse else ""
        extras += " deterministic" if self.deterministic else ""
        extras += f" keys<={SHORT_KEYS}" if self.short and not self.few_keys else ""
        extras += f" rows<={self.small_rows}" if self.small else ""
        return (
            f"{self.direction} {self.dtype} head_dim={dims} heads={self.heads_q}/{self.heads_kv} "
            f"{self.mask}{extras} on {self.device}"
        )
