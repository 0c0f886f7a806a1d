"""What a CTA works on: a tile of a group's query rows, and a share of the keys that the row of the batch has.

Row r of a tile's rows, counted through the tiles of a head of K, is token r // group of query head r % group.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.spec.plan import Plan

from .load import LANES, Run

COUNTED_TILES = 1 << 17  # of a row, at most, where a batch is shared out: see shares_of


class Divisors(NamedTuple):
    """What indices are divided by, made ready on the host: a division in the kernel stands before its first load."""

    heads_kv: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2
    rows: cute.FastDivmodDivisorV2
    tiles: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2
    batch: cute.FastDivmodDivisorV2


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
    splits: Int32  # the most, where split_keys < 0
    split_keys: Int32  # 0: equal shares; -programs: as many as a row's length asks for
    policy: Int64  # of L2, for K and V
    by: Divisors
    left: Int32 | None = None  # of a window
    right: Int32 | None = None


def sizes_of(q: cute.Tensor, k: cute.Tensor, tile_m: int, **others) -> CacheSizes:
    """On the host. `others`: the fields that the shapes of q and k do not tell."""
    heads_kv, group = k.shape[2], q.shape[2] // k.shape[2]
    rows = q.shape[1] * group
    tiles = (rows + tile_m - 1) // tile_m
    divisors = heads_kv, group, rows, tiles, others["splits"], q.shape[0]
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
    shares: Int32  # of the row's keys: a CTA whose `split` is none of them has nothing to do


class Share(NamedTuple):
    batch: Int32
    head: Int32  # of K and V
    split: Int32
    row_start: Int32  # of the tile
    shares: Int32
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


def tiles_of(given: Int32, sizes: CacheSizes, tile_n: int) -> Int32:
    """Key tiles of a row, as far as they are counted."""
    keys = lengths_of(given, sizes)[1]
    return cutlass.min(keys // tile_n + Int32(keys % tile_n > 0), COUNTED_TILES)


@cute.jit
def shares_of(batch: Int32, seqlens: cute.Tensor, sizes: CacheSizes, tile_n: cutlass.Constexpr[int]) -> Int32:
    """How many CTAs share the keys of a query tile of row `batch`: the same number wherever it is asked for. All lanes
    of a warp ask.

    With equal rows a share is what each of the programs would get of all. The longest row must not end last, and the
    more it stands out, the smaller shares are: by the mean over the longest. So of t tiles of a row

        shares = t / (units * total / programs * (mean / longest)) = t * programs * batch * longest / (units * total^2)

    rounded, at least one and with two tiles or more each. In 64 bits: the host asks of batches of up to 2^9, units up
    to 2^8 and programs up to 2^12, so that twice t * programs * batch * longest is at most 2^56, and twice units *
    total^2 at most 2^61.
    """
    shares = sizes.splits
    if sizes.split_keys < 0:
        lane = cute.arch.lane_idx()
        total, longest = Int32(0), Int32(0)
        for start in cutlass.range(0, sizes.batch, LANES, unroll=1):
            tiles = tiles_of(seqlens[cutlass.min(start + lane, sizes.batch - 1)], sizes, tile_n)
            longest = cutlass.max(longest, tiles)
            total += Int32(cutlass.select_(start + lane < sizes.batch, tiles, Int32(0)))
        for i in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << i)
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, offset=1 << i))
        mine = tiles_of(seqlens[batch], sizes, tile_n)
        asked = Int64(mine) * longest * (Int64(sizes.batch) * -sizes.split_keys)
        of_all = Int64(total) * total * (sizes.tiles * sizes.heads_kv)
        wanted = Int32((2 * asked + of_all) // cutlass.max(2 * of_all, Int64(1)))
        shares = cutlass.max(cutlass.min(cutlass.min(wanted, (mine + 1) // 2), sizes.splits), 1)
    return shares


class Shares:
    """Of one Plan."""

    def __init__(self, plan: Plan):
        self.tile, self.mask = plan.tile, plan.mask

    def count(self, sizes: CacheSizes) -> Int32:
        return sizes.batch * sizes.splits * sizes.tiles * sizes.heads_kv

    @cute.jit
    def place(self, index: Int32, seqlens: cute.Tensor, sizes: CacheSizes) -> Place:
        """Heads next to each other: what one reads of a key lies beside what the next does. The CTAs that may have
        nothing to do stand last."""
        rest, head = divmod(index, sizes.by.heads_kv)
        rest, m_block = divmod(rest, sizes.by.tiles)
        batch, split = divmod(rest, sizes.by.splits)
        if sizes.split_keys < 0:
            split, batch = divmod(rest, sizes.by.batch)
        shares = shares_of(batch, seqlens, sizes, self.tile.tile_n)
        return Place(batch, head, split, m_block * self.tile.tile_m, shares)

    @property
    def early(self) -> bool:
        """Is the first key tile known before the length is?"""
        return not self.mask.left

    @cute.jit
    def run(self, place: Place, begin: Int32, sizes: CacheSizes) -> Run:
        """`begin`: first tile of all. Equal shares take every so-manyth tile, so that their first ones are known."""
        first, step = begin + place.split, place.shares
        if sizes.split_keys > 0:
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
        if sizes.split_keys > 0:
            count = cutlass.min(last, (place.split + 1) * (sizes.split_keys // tile_n)) - run.first
        if sizes.split_keys < 0:
            count = (cutlass.max(last - run.first, 0) + place.shares - 1) // place.shares
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
