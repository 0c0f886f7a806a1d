"""What a CTA works on: a tile of a group's query rows, and a share of the keys that the row of the batch has.

Row r of a tile's rows, counted through the tiles of a head of K, is token r // group of query head r % group.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.spec.plan import Plan

from .load import Run


class Divisors(NamedTuple):
    """What indices are divided by, made ready on the host: a division in the kernel stands before its first load."""

    heads_kv: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2
    rows: cute.FastDivmodDivisorV2
    tiles: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2


class CacheSizes(NamedTuple):
    """Of a call: what no kernel is compiled for."""

    batch: Int32
    heads_kv: Int32
    group: Int32
    rows: Int32  # of a head of K: query tokens times heads of its group
    tiles: Int32  # of these rows
    seqlen_q: Int32
    capacity: Int32  # keys that a row may have
    appended: Int32  # of a row, behind its length
    cache_rows: Int32  # or pages
    splits: Int32
    split_keys: Int32  # 0: equal shares
    policy: Int64  # of L2, for K and V
    by: Divisors
    left: Int32 | None = None  # of a window
    right: Int32 | None = None


def sizes_of(q: cute.Tensor, k: cute.Tensor, tile_m: int, **others) -> CacheSizes:
    """On the host. `others`: the fields that the shapes of q and k do not tell."""
    heads_kv, group = k.shape[2], q.shape[2] // k.shape[2]
    rows = q.shape[1] * group
    tiles = (rows + tile_m - 1) // tile_m
    divisors = heads_kv, group, rows, tiles, others["splits"]
    return CacheSizes(
        batch=q.shape[0],
        heads_kv=heads_kv,
        group=group,
        rows=rows,
        tiles=tiles,
        seqlen_q=q.shape[1],
        cache_rows=k.shape[0],
        by=Divisors(*(cute.fast_divmod_create_divisor_v2(Int32(each)) for each in divisors)),
        **others,
    )


class Place(NamedTuple):
    """Of a CTA, before lengths are known."""

    batch: Int32
    head: Int32  # of K and V
    split: Int32
    row_start: Int32  # of the tile


class Share(NamedTuple):
    batch: Int32
    head: Int32  # of K and V
    split: Int32
    row_start: Int32  # of the tile
    seqlen_k: Int32
    run: Run
    count: Int32  # of its key tiles
    whole_first: Int32  # of these, [whole_first, whole_last) need no mask
    whole_last: Int32


class Columns(NamedTuple):
    """The query rows of an MMA thread, columns of S^T."""

    index: tuple  # among the rows of the head of K
    exist: tuple
    token: tuple
    head: tuple  # of q


def columns_of(share: Share, sizes: CacheSizes, thread: Int32, tile_m: int) -> Columns:
    """Columns 2 q and 2 q + 1 of every eight, q the lane among four (PTX, wgmma D layout)."""
    index = [share.row_start + 8 * (c // 2) + 2 * (thread % 4) + c % 2 for c in range(tile_m // 4)]
    places = [divmod(i, sizes.by.group) for i in index]
    return Columns(
        index=tuple(index),
        exist=tuple(Int32(i < sizes.rows) for i in index),
        token=tuple(token for token, _ in places),
        head=tuple(share.head * sizes.group + head for _, head in places),
    )


def lengths_of(given: Int32, sizes: CacheSizes) -> tuple[Int32, Int32]:
    """(keys in the cache before what is appended, with it); no value, however wild, leads out of the cache."""
    before = cutlass.min(cutlass.max(given, 0), sizes.capacity)
    return before, cutlass.min(before + sizes.appended, sizes.capacity)


class Shares:
    """Of one Plan."""

    def __init__(self, plan: Plan):
        self.tile, self.mask = plan.tile, plan.mask

    def count(self, sizes: CacheSizes) -> Int32:
        return sizes.batch * sizes.splits * sizes.tiles * sizes.heads_kv

    def place(self, index: Int32, sizes: CacheSizes) -> Place:
        """Heads next to each other: what one reads of a key lies beside what the next does."""
        rest, head = divmod(index, sizes.by.heads_kv)
        rest, m_block = divmod(rest, sizes.by.tiles)
        batch, split = divmod(rest, sizes.by.splits)
        return Place(batch, head, split, m_block * self.tile.tile_m)

    @property
    def early(self) -> bool:
        """Is the first key tile known before the length is?"""
        return not self.mask.left

    @cute.jit
    def run(self, place: Place, begin: Int32, sizes: CacheSizes) -> Run:
        """`begin`: first tile of all. Equal shares take every so-manyth tile, so that their first ones are known."""
        first, step = begin + place.split, sizes.splits
        if sizes.split_keys != 0:
            first, step = cutlass.max(begin, place.split * (sizes.split_keys // self.tile.tile_n)), Int32(1)
        return Run(first, step)

    @cute.jit
    def share(self, place: Place, given: Int32, sizes: CacheSizes) -> Share:
        """`given`: the row's length as cache_seqlens has it."""
        tile_m, tile_n, mask = self.tile.tile_m, self.tile.tile_n, self.mask
        row_start, seqlen_k = place.row_start, lengths_of(given, sizes)[1]
        diagonal = seqlen_k - sizes.seqlen_q
        first_diagonal = row_start // sizes.by.group + diagonal
        last_diagonal = (cutlass.min(row_start + tile_m, sizes.rows) - 1) // sizes.by.group + diagonal
        begin, end, whole_first, whole_last = Int32(0), seqlen_k, Int32(0), seqlen_k // tile_n
        if cutlass.const_expr(mask.right):
            reach = Int32(1) if cutlass.const_expr(mask.causal) else sizes.right + 1
            end = cutlass.max(0, cutlass.min(end, last_diagonal + reach))
            whole_last = cutlass.max(0, cutlass.min(seqlen_k, first_diagonal + reach)) // tile_n
        if cutlass.const_expr(mask.left):
            begin = cutlass.max(0, first_diagonal - sizes.left) // tile_n
            whole_first = (cutlass.max(0, last_diagonal - sizes.left) + tile_n - 1) // tile_n
        last, run = (end + tile_n - 1) // tile_n, self.run(place, begin, sizes)
        count = (cutlass.max(last - run.first, 0) + sizes.splits - 1) // sizes.by.splits
        if sizes.split_keys != 0:
            count = cutlass.min(last, (place.split + 1) * (sizes.split_keys // tile_n)) - run.first
        return Share(*place, seqlen_k, run, cutlass.max(count, 0), whole_first, whole_last)


class Partials(NamedTuple):
    """What the CTAs that share keys leave, float32."""

    o: cute.Tensor  # (splits, batch * heads_q * seqlen_q, width_v); rows are those of a head of K together
    state: cute.Tensor  # (splits, batch * heads_q * seqlen_q, 2): (maximum, total), see common/combine.py


def partials_of(memory: cute.Tensor, sizes: CacheSizes, width_v: int) -> Partials:
    rows = Int64(sizes.batch) * sizes.heads_kv * sizes.rows
    o = cute.make_layout((sizes.splits, rows, width_v), stride=(rows * width_v, width_v, 1))
    state = cute.make_layout((sizes.splits, rows, 2), stride=(rows * 2, 2, 1))
    after = memory.iterator + rows * width_v * sizes.splits
    return Partials(cute.make_tensor(memory.iterator, o), cute.make_tensor(after, state))
