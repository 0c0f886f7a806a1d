"""What a CTA works on: a tile of a group's query rows, and a share of the keys that the row of the batch has.

Row r of a tile's rows, counted through the tiles of a head of K, is token r // group of query head r % group.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.spec.plan import Plan

from .load import LANES, Run


class Divisors(NamedTuple):
    """What indices are divided by, made ready on the host: a division in the kernel stands before its first load."""

    heads_kv: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2
    rows: cute.FastDivmodDivisorV2
    tiles: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2
    groups: cute.FastDivmodDivisorV2


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
    split_keys: Int32  # 0: equal shares; -groups: equal runs of the keys of all rows
    policy: Int64  # of L2, for K and V
    by: Divisors
    left: Int32 | None = None  # of a window
    right: Int32 | None = None


def sizes_of(q: cute.Tensor, k: cute.Tensor, tile_m: int, **others) -> CacheSizes:
    """On the host. `others`: the fields that the shapes of q and k do not tell."""
    heads_kv, group = k.shape[2], q.shape[2] // k.shape[2]
    rows = q.shape[1] * group
    tiles = (rows + tile_m - 1) // tile_m
    divisors = heads_kv, group, rows, tiles, others["splits"], cutlass.max(-others["split_keys"], 1)
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


class Slice(NamedTuple):
    """What a group has of the keys of all rows, in key tiles; a row without keys counts as one tile."""

    row: Int32  # the first of the batch that it has some of
    rows: Int32
    first: Int32  # tile of the first row
    tiles: Int32


def tiles_in(given: Int32, sizes: CacheSizes, tile_n: int) -> Int32:
    """Key tiles of a row; `given`: its length as cache_seqlens has it."""
    return (cutlass.max(lengths_of(given, sizes)[1], 1) + tile_n - 1) // tile_n


def lane_length(start: Int32, seqlens: cute.Tensor, sizes: CacheSizes) -> Int32:
    """Of row `start` and the lane's number, or the last one."""
    return seqlens[cutlass.min(start + cute.arch.lane_idx(), sizes.batch - 1)]


def lane_tiles(start: Int32, given: Int32, sizes: CacheSizes, tile_n: int) -> Int32:
    """`given`: lane_length(start). 0 where there is no such row."""
    exists = start + cute.arch.lane_idx() < sizes.batch
    return Int32(cutlass.select_(exists, tiles_in(given, sizes, tile_n), Int32(0)))


def running_sum(x: Int32) -> Int32:
    """Of the lanes up to this one."""
    for i in range(5):
        other = cute.arch.shuffle_sync_up(x, offset=1 << i)
        x = x + Int32(cutlass.select_(cute.arch.lane_idx() >= 1 << i, other, Int32(0)))
    return x


def run_of_group(total: Int32, sizes: CacheSizes) -> Int32:
    """Key tiles."""
    return (total - 1) // sizes.by.groups + 1


@cute.jit
def tiles_before(row: Int32, seqlens: cute.Tensor, sizes: CacheSizes, tile_n: cutlass.Constexpr[int]) -> tuple:
    """(key tiles of the rows before `row`, of `row`, of all). All lanes of a warp ask; so below."""
    lane, before, mine, total = cute.arch.lane_idx(), Int32(0), Int32(0), Int32(0)
    for start in cutlass.range(0, sizes.batch, LANES, unroll=1):
        tiles = lane_tiles(start, lane_length(start, seqlens, sizes), sizes, tile_n)
        before += Int32(cutlass.select_(start + lane < row, tiles, Int32(0)))
        mine += Int32(cutlass.select_(start + lane == row, tiles, Int32(0)))
        total += tiles
    return tuple(cute.arch.warp_reduction_sum(each) for each in (before, mine, total))


@cute.jit
def slice_of(
    group: Int32, given: Int32, seqlens: cute.Tensor, sizes: CacheSizes, tile_n: cutlass.Constexpr[int]
) -> Slice:
    """`given`: lane_length(0), asked for long before. Rows that end where the run begins, or before, are those of
    others; what begins before the run ends is this one's."""
    tiles = lane_tiles(Int32(0), given, sizes, tile_n)
    upto = running_sum(tiles)
    total = cute.arch.shuffle_sync(upto, LANES - 1)
    for start in cutlass.range(LANES, sizes.batch, LANES, unroll=1):
        total += cute.arch.warp_reduction_sum(lane_tiles(start, lane_length(start, seqlens, sizes), sizes, tile_n))
    size = run_of_group(total, sizes)
    begin, end = cutlass.min(group * size, total), cutlass.min((group + 1) * size, total)
    row, after, first = count_rows(Int32(0), tiles, upto, (begin, end), sizes)
    place = cute.arch.shuffle_sync(upto, LANES - 1)
    for start in cutlass.range(LANES, sizes.batch, LANES, unroll=1):
        tiles = lane_tiles(start, lane_length(start, seqlens, sizes), sizes, tile_n)
        upto = place + running_sum(tiles)
        more, begun, reached = count_rows(start, tiles, upto, (begin, end), sizes)
        row, after, first = row + more, after + begun, cutlass.max(first, reached)
        place = cute.arch.shuffle_sync(upto, LANES - 1)
    return Slice(row, after - row, begin - first, end - begin)


def count_rows(start: Int32, tiles: Int32, upto: Int32, run: tuple, sizes: CacheSizes) -> tuple:
    """Of a warp's rows from `start` on: (how many end before the run, how many begin before its end, where the last of
    the former ends)."""
    exists = start + cute.arch.lane_idx() < sizes.batch
    ended = cute.arch.popc(cute.arch.vote_ballot_sync((upto <= run[0]) & exists))
    begun = cute.arch.popc(cute.arch.vote_ballot_sync((upto - tiles < run[1]) & exists))
    last = cute.arch.shuffle_sync(upto, cutlass.max(ended - 1, 0))
    return ended, begun, Int32(cutlass.select_(ended > 0, last, Int32(0)))


class Shares:
    """Of one Plan."""

    def __init__(self, plan: Plan):
        self.tile, self.mask = plan.tile, plan.mask

    def count(self, sizes: CacheSizes) -> Int32:
        return sizes.batch * sizes.splits * sizes.tiles * sizes.heads_kv

    def count_grouped(self, sizes: CacheSizes) -> Int32:
        return -sizes.split_keys * sizes.tiles * sizes.heads_kv

    def group_place(self, index: Int32, sizes: CacheSizes) -> Place:
        """Its `split` is the group, its batch none yet. Heads next to each other: see place()."""
        rest, head = divmod(index, sizes.by.heads_kv)
        group, m_block = divmod(rest, sizes.by.tiles)
        return Place(Int32(0), head, group, m_block * self.tile.tile_m)

    def place(self, index: Int32, sizes: CacheSizes) -> Place:
        """Heads next to each other: what one reads of a key lies beside what the next does."""
        rest, head = divmod(index, sizes.by.heads_kv)
        rest, m_block = divmod(rest, sizes.by.tiles)
        batch, split = divmod(rest, sizes.by.splits)
        return Place(batch, head, split, m_block * self.tile.tile_m)

    @property
    def groups(self) -> bool:
        """May the keys of all rows be cut into runs?"""
        return not self.mask.left

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
    def seen(self, row_start: Int32, given: Int32, sizes: CacheSizes) -> tuple:
        """(the row's keys, first tile, end of tiles, whole_first, whole_last) of what a tile's rows see; `given`: the
        row's length as cache_seqlens has it."""
        tile_m, tile_n, mask = self.tile.tile_m, self.tile.tile_n, self.mask
        seqlen_k = lengths_of(given, sizes)[1]
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
        return seqlen_k, begin, (end + tile_n - 1) // tile_n, whole_first, whole_last

    @cute.jit
    def share(self, place: Place, given: Int32, sizes: CacheSizes) -> Share:
        seqlen_k, begin, last, whole_first, whole_last = self.seen(place.row_start, given, sizes)
        run = self.run(place, begin, sizes)
        count = (cutlass.max(last - run.first, 0) + sizes.splits - 1) // sizes.by.splits
        if sizes.split_keys != 0:
            count = cutlass.min(last, (place.split + 1) * (sizes.split_keys // self.tile.tile_n)) - run.first
        return Share(*place, seqlen_k, run, cutlass.max(count, 0), whole_first, whole_last)

    @cute.jit
    def segment(self, place: Place, part: Slice, number: Int32, seqlens: cute.Tensor, sizes: CacheSizes) -> tuple:
        """(share of the slice's `number`-th row, the slice without what came of it). The share's `split` is its slot in
        the scratch, -1 of a row that is whole: of a run only the first row and the last are not."""
        row = part.row + number
        given = seqlens[row]
        tiles = tiles_in(given, sizes, self.tile.tile_n)
        count = cutlass.min(tiles - part.first, part.tiles)
        slot = slot_of(place.split, part.first == 0)
        slot = Int32(cutlass.select_(count == tiles, Int32(-1), slot))
        seqlen_k, _, last, whole_first, whole_last = self.seen(place.row_start, given, sizes)
        within = cutlass.max(cutlass.min(part.first + count, last) - part.first, 0)
        whole = whole_first, whole_last
        share = Share(row, place.head, slot, place.row_start, seqlen_k, Run(part.first, Int32(1)), within, *whole)
        return share, part._replace(first=Int32(0), tiles=part.tiles - count)


def slot_of(group: Int32, begins: Int32) -> Int32:
    """Of what a group has of a row that others have some of, too; begins: has it the row's first tile?"""
    return 2 * group + Int32(begins)


class Partials(NamedTuple):
    """What the CTAs that share keys leave, float32. Of groups `splits` are their slots, and there is no batch."""

    o: cute.Tensor  # (splits, batch * heads_q * seqlen_q, width_v); rows are those of a head of K together
    state: cute.Tensor  # (splits, batch * heads_q * seqlen_q, 2): (maximum, total), see common/combine.py


def partials_of(memory: cute.Tensor, sizes: CacheSizes, width_v: int, grouped: bool = False) -> Partials:
    """grouped: a slot of a group holds rows of one row of the batch."""
    rows = Int64(1 if grouped else sizes.batch) * sizes.heads_kv * sizes.rows
    o = cute.make_layout((sizes.splits, rows, width_v), stride=(rows * width_v, width_v, 1))
    state = cute.make_layout((sizes.splits, rows, 2), stride=(rows * 2, 2, 1))
    after = memory.iterator + rows * width_v * sizes.splits
    return Partials(cute.make_tensor(memory.iterator, o), cute.make_tensor(after, state))
