"""When several CTAs should share a query tile, and how many: from sizes on the host, never from the device."""

from dataclasses import dataclass

from .plan import Plan

SPLIT_KEYS = 128  # of a split, at least
# With so many keys a second launch wins nothing. NVIDIA H200, d=128, whole / tiles of 64 rows / split, us
# (perf/results/hopper_starts.csv, process 3): causal 16 heads of 256 11.9 10.8 16.0, of 512 14.8 13.1 23.4, 128 rows
# over 512 13.9 12.3 15.8, 64 over 2048 29.5 24.4 22.3, 4 heads of 2048 29.8 24.4 26.2, 8 heads of 256 over 4096 50.2
# 40.4 26.7, 32 of 1 over 8192 89.6 71.9 53.2, 1 of 8192 90.6 71.1 42.8. Nothing of Blackwell is measured.
WHOLE_KEYS = 2048
# Of the multiprocessors: with so many query tiles a second launch wins nothing. FlashAttention-2's figure; an H200 took
# 30.5 us for 128 causal tiles of 1024 keys in two shares each, and FlashAttention-4 21.7 us for whole ones.
FULL = 4, 5


@dataclass(frozen=True)
class SplitRule:
    """The split count of a call, for one Plan, head count and GPU."""

    tile_m: int
    keys: int  # that a split gets at least
    few_keys: int  # more than so many a call must have to be split
    heads_q: int
    sm_count: int

    @property
    def query_tiles_max(self) -> int:
        """(query tiles of a head) * batch up to which the GPU is not full, so that splitting can help."""
        return self.sm_count * FULL[0] // (FULL[1] * self.heads_q)

    def count(self, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """How many CTAs share a query tile; 1 = no split. Up to two waves of CTAs, none with less than `keys`."""
        query_tiles = batch * -(-seqlen_q // self.tile_m)
        if query_tiles > self.query_tiles_max or seqlen_k <= self.few_keys:
            return 1
        return max(1, min(-(-seqlen_k // self.keys), 2 * self.sm_count // (query_tiles * self.heads_q)))


def rule_of(plan: Plan, heads_q: int, sm_count: int, packs: bool = False) -> SplitRule:
    """packs: of a plan that is launched for its packed rows already, split or not."""
    if plan.tile is None:
        raise ValueError(f"a plan without a tile cannot be split: {plan}")
    keys = max(plan.tile.tile_n, SPLIT_KEYS)
    return SplitRule(plan.tile.tile_m, keys, keys if packs else WHOLE_KEYS, heads_q, sm_count)


CACHE_SPLIT_KEYS = 256  # of a cache's length for each program that shares it, at least
INVARIANT_SPLIT_KEYS = 512  # of a program's share where a row's result may depend on nothing else


def cache_splits(query_tiles: int, length: int, programs: int, keys: int = CACHE_SPLIT_KEYS) -> int:
    """How many programs share the keys of a query tile of a cache that holds `length`, so that there are `programs` of
    them and none has fewer than `keys`. From sizes on the host: the row's own length is on the device."""
    return max(1, min(-(-length // keys), programs // max(1, query_tiles)))


GROUPED_BATCH = 512  # rows at most, of which every program reads all lengths, and
GROUPED_KEYS = 1 << 36  # in all, so that key tiles are counted in 32 bits
GROUPED_CAPACITY = 2048  # keys at least that a row may have, and
GROUPED_LEAST = 1 << 19  # times the batch and its query tiles: below, what it costs to find a program's keys is more


def row_groups(batch: int, tiles: int, length: int, programs: int) -> int:
    """Of a batch whose rows may be uneven, which the host does not know: into how many equal runs the keys of all rows,
    end to end, are cut, a program for each run and each of a row's query `tiles`. 1: they are not.

    NVIDIA H200, 2026-12-01, 32/8 heads, d=128, us, runs / as many programs a row as there would be by cache_splits,
    log-normal lengths up to the cache's (all full): 16 x 8192 51 74 (135 132), 64 x 8192 69 94 (492 493), 16 x 32768
    144 256 (488 486), 64 x 32768 188 324, 4 x 32768 66 80 (136 134); but 4 x 8192 26 26 (45 43).
    """
    if not 1 < batch <= GROUPED_BATCH or batch * length > GROUPED_KEYS:
        return 1
    if length < GROUPED_CAPACITY or batch * length * tiles < GROUPED_LEAST:
        return 1
    return max(1, programs // tiles)


def sharing_of(plan: Plan, sm_count: int) -> tuple[int, int]:
    """(programs, keys) for cache_splits: what a plan says that fills the GPU, and two steps; else two programs for each
    multiprocessor."""
    if plan.ctas and plan.tile is not None:
        return plan.ctas, 2 * plan.tile.tile_n
    return 2 * sm_count, CACHE_SPLIT_KEYS
