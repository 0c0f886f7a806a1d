"""Tile of every (direction, head_dim, dtype, capability), within the shared memory that a program may take there.

The forward and the dQ kernel keep tile_m query rows and step over tile_n keys; the dK/dV kernel mirrors them: it keeps
tile_m keys and steps over tile_n query rows. Plan.tile of a backward is the dK/dV kernel's, and the dQ kernel's too
unless a word of Plan.variant names another: "dq-128x32x2x8" = Tile(128, 32, 2, 8). dQ's tile_m must be a multiple of
dK/dV's tile_n.

The rows are chosen from compiled code (no or few spilled registers, shared memory), not yet from measurements.
"""

import itertools
from dataclasses import replace

from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import BACKWARD, FEW, FORWARD

WIDTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)  # each a power of two, or a sum of two

# Words of Plan.variant.
PADDED = "padded"  # a head dim is narrower than its tile
MASK_ALL = "mask-all"  # every tile is masked, hidden pairs or not: no branch in the loop
DQ = "dq-"  # the tile of the dQ kernel follows

KIB = 1024
SHARED_MEMORY_MIN = 99 * KIB  # 8.6, 8.9, 12.0, 12.1 and whatever is not listed
SHARED_MEMORY = {  # bytes a program may take
    (8, 0): 163 * KIB,
    (8, 7): 163 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
}

# Rows: the larger padded head_dim up to which they serve, and the Tile(tile_m, tile_n, stages, warps).
# "99" fits 99 KiB, "163" 163 KiB and "227" 227 KiB; the last is also where matmuls read shared memory (wgmma, tcgen05).
SIXTEEN_BIT = {
    (FORWARD, "99"): [
        (64, Tile(128, 64, 3, 4)),
        (96, Tile(128, 64, 2, 8)),
        (128, Tile(128, 64, 2, 8)),
        (192, Tile(128, 32, 2, 8)),
        (256, Tile(64, 32, 2, 8)),
    ],
    (FORWARD, "163"): [
        (64, Tile(128, 64, 3, 4)),
        (128, Tile(128, 64, 3, 8)),
        (192, Tile(128, 32, 2, 8)),
        (256, Tile(64, 64, 2, 8)),
    ],
    (FORWARD, "227"): [
        # NVIDIA H200, 2026-11-30, bf16, S=4096, 16384 tokens, TFLOP/s full/causal: 418/387, 128x64 w4 399/388
        (64, Tile(128, 64, 3, 8)),
        # the same: 450/432, 128x64 s3 w8 399/413, 128x128 s2 w8 397/385
        (128, Tile(128, 128, 3, 8)),
        (256, Tile(128, 64, 2, 8)),
    ],
    (BACKWARD, "99"): [
        (64, Tile(128, 64, 2, 8)),
        (96, Tile(128, 32, 2, 8)),
        (128, Tile(64, 64, 2, 8)),
        (256, Tile(64, 16, 2, 8)),
    ],
    (BACKWARD, "163"): [
        (64, Tile(128, 64, 2, 8)),
        (96, Tile(128, 32, 2, 8)),
        (128, Tile(64, 64, 2, 8)),
        (192, Tile(64, 16, 2, 8)),
        (256, Tile(64, 32, 2, 8)),
    ],
    (BACKWARD, "227"): [
        (128, Tile(128, 64, 2, 8)),
        (256, Tile(64, 32, 2, 8)),
    ],
}
DQ_LARGE_HEAD = Tile(128, 32, 2, 8)  # the dQ kernel's on 227 KiB, for head dims above 128
# float32 is made right, not fast: one table for all. "ieee" multiplies without tensor cores, in registers.
FLOAT32 = {
    (FORWARD, "ieee"): [(64, Tile(32, 32, 1, 4)), (128, Tile(32, 32, 1, 8)), (256, Tile(32, 16, 1, 8))],
    (FORWARD, "tf32"): [(64, Tile(64, 32, 2, 4)), (128, Tile(64, 32, 1, 8)), (256, Tile(32, 16, 1, 4))],
    (BACKWARD, "ieee"): [(64, Tile(32, 32, 1, 8)), (128, Tile(32, 16, 1, 8)), (256, Tile(16, 16, 1, 8))],
    (BACKWARD, "tf32"): [(64, Tile(32, 32, 1, 4)), (128, Tile(32, 16, 1, 4)), (256, Tile(16, 16, 1, 4))],
}


def width(head_dim: int) -> int:
    """The padded head_dim."""
    return next(w for w in WIDTHS if w >= head_dim)


def shared_memory(capability: tuple[int, int]) -> int:
    return SHARED_MEMORY.get(capability, SHARED_MEMORY_MIN)


def choose(direction: str, widest: int, dtype: str, ieee: bool, capability: tuple[int, int]) -> Tile:
    """The Tile for head dims padded to at most `widest`."""
    if dtype == "float32":
        rows = FLOAT32[direction, "ieee" if ieee else "tf32"]
    else:
        rows = SIXTEEN_BIT[direction, str(shared_memory(capability) // KIB)]
    return next(tile for limit, tile in rows if widest <= limit)


WARPS = {16: 2, 32: 2, 64: 4}  # where short sequences narrow tile_m: 16 rows of a matmul a warp, two for its columns


def narrowed(tile: Tile, few_m: int, few_n: int) -> Tile:
    """For sequences of at most so many rows and keys (0 = unknown): wider tiles would multiply what does not exist."""
    tile_m = min(tile.tile_m, few_m or tile.tile_m)
    warps = min(tile.warps, WARPS.get(tile_m, tile.warps)) if tile_m < tile.tile_m else tile.warps
    return replace(tile, tile_m=tile_m, tile_n=min(tile.tile_n, few_n or tile.tile_n), warps=warps)


def for_sequences(plan: Plan, few_rows: int, few_keys: int) -> Plan:
    """The plan with its tiles narrowed."""
    if plan.direction == FORWARD:
        return replace(plan, tile=narrowed(plan.tile, few_rows, few_keys))
    dq = narrowed(dq_tile(plan), few_rows, few_keys)
    return with_dq_tile(replace(plan, tile=narrowed(plan.tile, few_keys, few_rows)), dq)


CACHE_KEYS = 64  # a step: as many loads in flight as hide memory's latency, and no more partial work at a row's end


def for_cache(plan: Plan, few_rows: int) -> Plan:
    """The plan of a cache, whose rows are those of a group's heads: what moves is K and V, so products may be slow."""
    tile = narrowed(plan.tile, max(few_rows, FEW[0]) if few_rows else 0, CACHE_KEYS)
    return replace(plan, tile=replace(tile, warps=4 if plan.dtype != "float32" else tile.warps))


def variant(direction: str, widest: int, padded: bool, dtype: str, capability: tuple[int, int]) -> str:
    """Where matmuls run on registers (mma.sync) a branch in the backward's loops spills up to 4 KB a thread."""
    words = [PADDED] if padded else []
    large = shared_memory(capability) == 227 * KIB
    if direction == BACKWARD and not large:
        words.append(MASK_ALL)
    if direction == BACKWARD and large and dtype != "float32" and widest > 128:
        words.append(_dq_word(DQ_LARGE_HEAD))
    return " ".join(words)


def _dq_word(tile: Tile) -> str:
    return f"{DQ}{tile.tile_m}x{tile.tile_n}x{tile.stages}x{tile.warps}"


def dq_tile(plan: Plan) -> Tile:
    words = [word.removeprefix(DQ) for word in plan.variant.split() if word.startswith(DQ)]
    return Tile(*(int(number) for number in words[0].split("x"))) if words else plan.tile


def with_dq_tile(plan: Plan, tile: Tile) -> Plan:
    words = [word for word in plan.variant.split() if not word.startswith(DQ)]
    return replace(plan, variant=" ".join([*words, _dq_word(tile)]))


REGISTERS = 255  # a thread may have; accumulators and scores must leave room for the rest


def _plausible(tile: Tile, kept: int, accumulated: int, score_tiles: int, plan: Plan) -> bool:
    """Whether operands fit shared memory and accumulators registers: an estimate, the compiler has the last word.

    kept, accumulated = columns of operands that stay, and of accumulators.
    """
    capability = tuple(int(part) for part in plan.arch.split("."))
    stepped = plan.head_dim + plan.head_dim_v
    bytes_16_bit = 2 * (tile.tile_m * kept + tile.stages * tile.tile_n * stepped)
    registers = tile.tile_m * (accumulated + score_tiles * tile.tile_n) // (32 * tile.warps)
    return bytes_16_bit <= shared_memory(capability) and registers <= REGISTERS - 40


def candidates(plan: Plan, dq: bool = False) -> list[Tile]:
    """Tiles worth measuring for a 16-bit Plan, its own first. Each runs by build(replace(plan, tile=...)).

    Of a backward: the dK/dV kernel's tiles, or with `dq` the dQ kernel's, which run by build(with_dq_tile(plan, ...)).
    """
    both = plan.head_dim + plan.head_dim_v
    if plan.direction == FORWARD:
        columns = plan.head_dim, plan.head_dim_v, 1
    else:
        columns = both, plan.head_dim if dq else both, 2
    found = [dq_tile(plan) if dq else plan.tile]
    for tile_m, tile_n, warps, stages in itertools.product((128, 64), (128, 64, 32), (8, 4), (2, 3, 4)):
        tile = Tile(tile_m, tile_n, stages, warps)
        if tile not in found and _plausible(tile, *columns, plan):
            found.append(tile)
    if plan.direction == FORWARD:
        return found
    return [
        tile for tile in found if (tile.tile_m % plan.tile.tile_n if dq else dq_tile(plan).tile_m % tile.tile_n) == 0
    ]
