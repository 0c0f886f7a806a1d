"""Operands and tiles: how a kernel takes a strided tensor, and how it reads and writes a tile of it.

A tile whose width is not a power of two is held as two parts, e.g. 96 columns as (64, 32): every function here takes
and returns tuples of one or two parts. Offsets of batch, head and row are 64-bit.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import PACKED

from .tiles import MASK_ALL, dq_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Operand(NamedTuple):
    """A (batch, seqlen, heads, dim) tensor; strides in elements."""

    ptr: Any
    batch: int
    row: int
    head: int
    col: int


class Sizes(NamedTuple):
    """Run-time sizes, bundled inside the kernel: Triton would compile anew for other values of integers in a tuple."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int
    group: int  # query heads per key/value head
    left: Any  # a window's bounds; None where the mask has none
    right: Any
    total_q: int  # rows of all sequences of a head: seqlen_q unless they are packed
    first_q: Any = None  # where the packed sequence starts that seqlen_q and seqlen_k are of
    first_k: Any = None


class Span(NamedTuple):
    """Where one tile's walk along the other axis starts and ends, and where tiles hold no hidden pair."""

    first: Any  # of the first tile, a multiple of the step; unused where walks start at 0
    last: Any  # the walk ends before it
    whole: Any  # a tile that starts before it holds pairs beyond the bound where the walk starts
    full: Any  # a tile that starts at or after it holds pairs beyond the bound where the walk ends


@dataclass(frozen=True)
class Columns:
    """A head dim: its true size, the width of its tiles, and a power of two that all strides are multiples of."""

    size: int
    tile: int
    align: int = 1


@dataclass(frozen=True)
class Spec:
    """All that is static in a kernel."""

    qk: Columns  # head_dim: of q, k, dq, dk
    v: Columns  # head_dim_v: of v, out, dout, dv
    tile_m: int
    tile_n: int
    row_pad: int  # the backward's workspace has a multiple of this many rows a head
    causal: bool
    left: bool  # a row sees no key more than sizes.left before its diagonal
    right: bool  # nor one more than sizes.right after it; not where causal says 0
    softcap: bool
    lse: bool
    lse_grad: bool
    mask_all: bool  # mask every tile instead of branching on whether it hides a pair
    precision: str  # of float32 matmuls: "ieee" or "tf32"
    packed: bool  # sequences lie one after another
    page_size: int  # of a cache, 0 where it is dense
    split: bool = False  # programs share the keys of a tile, and leave partial results


def operand(tensor: torch.Tensor) -> Operand:
    return Operand(tensor, *tensor.stride())


UNSPECIALIZED = [
    "seqlen_q",
    "seqlen_k",
    "sequences",
    "heads",
    "group",
    "left",
    "right",
]  # one kernel for all their values


@triton.constexpr_function
def main_width(tile: int) -> int:
    """The power of two that the first part of a tile holds; the second holds the rest."""
    return 1 << (tile.bit_length() - 1)


@triton.jit
def aligned(stride, columns: tl.constexpr):
    """The same number, in a form that shows Triton what it is a multiple of."""
    if columns.align == 1:
        return stride
    else:
        return stride // columns.align * columns.align


@triton.jit
def head_start(x, batch, head, first, columns: tl.constexpr):
    """first: the row that a packed sequence starts at, else None."""
    batch_offset = batch.to(tl.int64) * aligned(x.batch, columns)
    start = x.ptr + batch_offset + head.to(tl.int64) * aligned(x.head, columns)
    if first is None:
        return start
    else:
        return start + first.to(tl.int64) * aligned(x.row, columns)


@triton.jit
def _part_pointers(base, x, start, rows: tl.constexpr, first: tl.constexpr, cols: tl.constexpr, columns: tl.constexpr):
    row_stride = aligned(x.row, columns)
    row_offsets = tl.arange(0, rows).to(tl.int64) * row_stride
    col_offsets = (tl.arange(0, cols) + first).to(tl.int64) * x.col
    return base + tl.cast(start, tl.int64) * row_stride + row_offsets[:, None] + col_offsets[None, :]


@triton.jit
def _part_inside(rows_left, rows: tl.constexpr, first: tl.constexpr, cols: tl.constexpr, columns: tl.constexpr):
    """Which elements of a part exist: rows below rows_left, columns below the true width."""
    inside = (tl.arange(0, rows) < rows_left)[:, None]
    if first + cols > columns.size:
        inside = inside & ((tl.arange(0, cols) + first) < columns.size)[None, :]
    return inside


@triton.jit
def _load_part(base, x, start, end, rows: tl.constexpr, first: tl.constexpr, cols: tl.constexpr, columns: tl.constexpr):
    pointers = _part_pointers(base, x, start, rows, first, cols, columns)
    if end is None:
        if first + cols > columns.size:
            return tl.load(pointers, mask=((tl.arange(0, cols) + first) < columns.size)[None, :], other=0.0)
        else:
            return tl.load(pointers)
    else:
        return tl.load(pointers, mask=_part_inside(end - start, rows, first, cols, columns), other=0.0)


@triton.jit
def load_tile(base, x, start, end, rows: tl.constexpr, columns: tl.constexpr):
    """Rows [start, start + rows) as parts; zero beyond the true columns and from row `end` on (None: all exist)."""
    main: tl.constexpr = main_width(columns.tile)
    if main == columns.tile:
        return (_load_part(base, x, start, end, rows, 0, main, columns),)
    else:
        return (
            _load_part(base, x, start, end, rows, 0, main, columns),
            _load_part(base, x, start, end, rows, main, columns.tile - main, columns),
        )


@triton.jit
def _store_part(part, base, x, start, end, first: tl.constexpr, columns: tl.constexpr):
    rows: tl.constexpr = part.shape[0]
    cols: tl.constexpr = part.shape[1]
    pointers = _part_pointers(base, x, start, rows, first, cols, columns)
    inside = _part_inside(end - start, rows, first, cols, columns)
    tl.store(pointers, part.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(parts, base, x, start, end, columns: tl.constexpr):
    """Write the rows below `end` and the true columns, rounded to the tensor's dtype."""
    _store_part(parts[0], base, x, start, end, 0, columns)
    if len(parts) == 2:
        _store_part(parts[1], base, x, start, end, parts[0].shape[1], columns)


@triton.jit
def _gather_part(base, x, offsets, inside, first: tl.constexpr, cols: tl.constexpr, columns: tl.constexpr):
    columns_here = tl.arange(0, cols) + first
    mask = inside[:, None]
    if first + cols > columns.size:
        mask = mask & (columns_here < columns.size)[None, :]
    return tl.load(base + offsets[:, None] + (columns_here.to(tl.int64) * x.col)[None, :], mask=mask, other=0.0)


@triton.jit
def gather_tile(base, x, offsets, inside, columns: tl.constexpr):
    """Rows that start at base + offsets, as parts; zero beyond the true columns and where a row is not `inside`."""
    main: tl.constexpr = main_width(columns.tile)
    if main == columns.tile:
        return (_gather_part(base, x, offsets, inside, 0, main, columns),)
    else:
        return (
            _gather_part(base, x, offsets, inside, 0, main, columns),
            _gather_part(base, x, offsets, inside, main, columns.tile - main, columns),
        )


@triton.jit
def _scatter_part(part, base, col, offsets, inside, first: tl.constexpr, columns: tl.constexpr):
    columns_here = tl.arange(0, part.shape[1]) + first
    mask = inside[:, None] & (columns_here < columns.size)[None, :]
    pointers = base + offsets[:, None] + (columns_here.to(tl.int64) * col)[None, :]
    tl.store(pointers, part.to(base.dtype.element_ty), mask=mask)


@triton.jit
def scatter_tile(parts, base, col, offsets, inside, columns: tl.constexpr):
    """The way back: rows to base + offsets, columns `col` apart, rounded to the tensor's dtype."""
    _scatter_part(parts[0], base, col, offsets, inside, 0, columns)
    if len(parts) == 2:
        _scatter_part(parts[1], base, col, offsets, inside, parts[0].shape[1], columns)


@triton.jit
def rows_start(ptr, batch, head, sizes):
    """Where one head's rows start in a contiguous (batch, heads_q, seqlen_q) tensor, of one sequence if packed."""
    start = ptr + (batch.to(tl.int64) * sizes.heads_q + head) * sizes.total_q
    if sizes.first_q is None:
        return start
    else:
        return start + sizes.first_q


@triton.jit
def load_rows(base, start, end, count: tl.constexpr, missing: tl.constexpr):
    """Values of rows [start, start + count); `missing` from row `end` on."""
    rows = start + tl.arange(0, count)
    return tl.load(base + rows, mask=rows < end, other=missing)


@triton.jit
def store_rows(values, base, start, end):
    rows = start + tl.arange(0, values.shape[0])
    tl.store(base + rows, values, mask=rows < end)


@triton.jit
def zeros(rows: tl.constexpr, columns: tl.constexpr):
    main: tl.constexpr = main_width(columns.tile)
    if main == columns.tile:
        return (tl.zeros((rows, main), tl.float32),)
    else:
        return (tl.zeros((rows, main), tl.float32), tl.zeros((rows, columns.tile - main), tl.float32))


@triton.jit
def scaled(parts, factor):
    """Every part times a scalar or a column of row factors."""
    if len(parts) == 1:
        return (parts[0] * factor,)
    else:
        return (parts[0] * factor, parts[1] * factor)


@triton.jit
def row_dots(a, b):
    """rowsum(a * b) in float32."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) == 2:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def dot_transposed(a, b, spec: tl.constexpr):
    """a @ b^T, contracted over every part."""
    total = tl.dot(a[0], tl.trans(b[0]), input_precision=spec.precision)
    if len(a) == 2:
        total = tl.dot(a[1], tl.trans(b[1]), total, input_precision=spec.precision)
    return total


@triton.jit
def add_dot(acc, a, b, spec: tl.constexpr):
    """acc + a @ b, part by part of b's columns."""
    if len(acc) == 1:
        return (tl.dot(a, b[0], acc[0], input_precision=spec.precision),)
    else:
        return (
            tl.dot(a, b[0], acc[0], input_precision=spec.precision),
            tl.dot(a, b[1], acc[1], input_precision=spec.precision),
        )


@triton.jit
def grid_place(sizes, sequences, tile: tl.constexpr, by_keys: tl.constexpr, spec: tl.constexpr):
    """(tile, head, batch) of this program: tiles of a head are neighbours, heads of a batch come next. A tile is one of
    keys and a head one of theirs where by_keys."""
    length = sizes.seqlen_k if by_keys else sizes.seqlen_q
    heads = sizes.heads_q // sizes.group if by_keys else sizes.heads_q
    if spec.packed:
        tiles = length // tile + sequences + 1
    else:
        tiles = tl.cdiv(length, tile)
    place = tl.program_id(0)
    slot = place % tiles
    if spec.causal and not by_keys:  # longest rows first
        slot = tiles - 1 - slot
    return slot, place // tiles % heads, place // tiles // heads


@triton.jit
def furthest(sizes, spec: tl.constexpr):
    """Row i sees no key after i + this, where a right bound exists."""
    if spec.right:
        return sizes.seqlen_k - sizes.seqlen_q + sizes.right
    else:
        return sizes.seqlen_k - sizes.seqlen_q


@triton.jit
def nearest(sizes, spec: tl.constexpr):
    """Row i sees no key before i + this, where a left bound exists."""
    return sizes.seqlen_k - sizes.seqlen_q - sizes.left


@triton.jit
def key_span(start, sizes, spec: tl.constexpr):
    """The key tiles that query rows [start, start + tile_m) walk."""
    first = 0
    whole = 0
    if spec.causal or spec.right:
        past = furthest(sizes, spec)
        last_row = tl.minimum(start + spec.tile_m, sizes.seqlen_q)
        full = tl.maximum(tl.minimum(start + past + 1, sizes.seqlen_k), 0)
        last = tl.maximum(tl.minimum(last_row + past, sizes.seqlen_k), 0)
    else:
        full = sizes.seqlen_k
        last = sizes.seqlen_k
    if spec.left:
        before = nearest(sizes, spec)
        first = tl.maximum(start + before, 0) // spec.tile_n * spec.tile_n
        whole = tl.minimum(start + spec.tile_m, sizes.seqlen_q) - 1 + before
    return Span(first, last, whole, full // spec.tile_n * spec.tile_n)


@triton.jit
def row_span(start, sizes, spec: tl.constexpr):
    """The tiles of query rows that keys [start, start + tile_n) walk. Full and whole change places: the first rows of
    the walk are those that a right bound may hide, the last those that a left one may."""
    first = 0
    whole = 0
    full = sizes.seqlen_q
    last = sizes.seqlen_q
    if spec.causal or spec.right:
        past = furthest(sizes, spec)
        first = tl.maximum(start - past, 0) // spec.tile_m * spec.tile_m
        whole = start + spec.tile_n - 1 - past
    if spec.left:
        before = nearest(sizes, spec)
        last = tl.minimum(start + spec.tile_n - before, sizes.seqlen_q)
        full = start - before - spec.tile_m + 2
    return Span(first, last, whole, full)


@triton.jit
def in_window(rows, keys, sizes, spec: tl.constexpr):
    """Between the bounds that exist (one must); rows and keys are index tensors of shapes that broadcast."""
    if spec.causal or spec.right:
        visible = keys <= rows + furthest(sizes, spec)
        if spec.left:
            visible = visible & (keys >= rows + nearest(sizes, spec))
        return visible
    else:
        return keys >= rows + nearest(sizes, spec)


@triton.jit
def sees(rows, keys, sizes, spec: tl.constexpr):
    """Mask of a tile; rows and keys are index tensors of shapes that broadcast."""
    visible = keys < sizes.seqlen_k
    if spec.causal or spec.right or spec.left:
        visible = visible & in_window(rows, keys, sizes, spec)
    return visible


@triton.jit
def cap_factors(scale_log2, softcap, spec: tl.constexpr):
    """(what scores are multiplied with inside the cap, what the exponent takes them times), for base 2; the first is
    unused without a cap."""
    if spec.softcap:
        return 2.0 * scale_log2 / softcap, softcap * LOG2_E
    else:
        return scale_log2, scale_log2


@triton.jit
def capped(s, factor):
    """tanh of scores: 1 - 2 / (1 + exp(2 x)) = 1 - 2 / (1 + exp2(factor s)), right at +-inf too."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(s * factor))


@triton.jit
def capped_and_slope(s, factor):
    """(tanh of scores, its derivative 1 - tanh^2 = 4 r (1 - r)), with r = 1 / (1 + e) and 1 - r = e r, which does not
    cancel where e is small."""
    e = tl.exp2(tl.minimum(s * factor, 126.0))
    r = 1.0 / (1.0 + e)
    return 1.0 - 2.0 * r, 4.0 * r * (e * r)


def alignment(head_dim: int, *tensors: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides all strides; 1 where Triton sees them be multiples of 16."""
    if head_dim % 16 == 0:
        return 1
    return math.gcd(16, *(stride for tensor in tensors for stride in tensor.stride()[:3]))


def bound_picker(plan: Plan) -> Callable[..., tuple[int | None, int | None, float | None]]:
    """(left, right, softcap), or nothing for a plain plan -> the three as its kernels take them, None where unused."""
    has_left, has_right, has_cap = plan.mask.left, plan.mask.right and not plan.mask.causal, plan.softcap

    def pick(left: int = 0, right: int = 0, softcap: float = 0.0) -> tuple[int | None, int | None, float | None]:
        return left if has_left else None, right if has_right else None, softcap if has_cap else None

    return pick


def spec_maker(plan: Plan, tile_m: int, tile_n: int) -> Callable[[int, int, int, int], Spec]:
    """(head_dim, head_dim_v, their alignments) -> Spec, made once each. tile_m counts query rows, tile_n keys."""

    @functools.lru_cache(maxsize=256)
    def make(head_dim: int, head_dim_v: int, align: int, align_v: int) -> Spec:
        return Spec(
            qk=Columns(head_dim, plan.head_dim, align),
            v=Columns(head_dim_v, plan.head_dim_v, align_v),
            tile_m=tile_m,
            tile_n=tile_n,
            row_pad=dq_tile(plan).tile_m,
            causal=plan.mask.causal,
            left=plan.mask.left,
            right=plan.mask.right and not plan.mask.causal,
            softcap=plan.softcap,
            lse=plan.lse,
            lse_grad=plan.lse_grad,
            mask_all=MASK_ALL in plan.variant,
            precision="ieee" if plan.ieee_float32 else "tf32",
            packed=plan.form == PACKED,
            page_size=plan.page_size,
        )

    return make
