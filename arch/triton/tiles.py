"""Tile of every (direction, head_dim, dtype, capability), within the shared memory that a program may take there.

The forward and the dQ kernel keep tile_m query rows and step over tile_n keys; the dK/dV kernel mirrors them: it keeps
tile_m keys and steps over tile_n query rows. tile_m is a multiple of tile_n in the backward.

The rows are chosen from compiled code (no or few spilled registers, shared memory), not yet from measurements.
"""

import itertools

from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import BACKWARD, FORWARD

WIDTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)  # each a power of two, or a sum of two

PADDED = "padded"  # Plan.variant where a head dim is narrower than its tile

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
        (96, Tile(128, 32, 2, 8)),
        (128, Tile(64, 64, 2, 8)),
        (192, Tile(64, 32, 2, 8)),
        (256, Tile(64, 16, 2, 8)),
    ],
    (BACKWARD, "163"): [
        (96, Tile(128, 32, 2, 8)),
        (128, Tile(64, 64, 2, 8)),
        (256, Tile(64, 32, 2, 8)),
    ],
    (BACKWARD, "227"): [
        (128, Tile(128, 64, 2, 8)),
        (256, Tile(64, 32, 2, 8)),
    ],
}
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


REGISTERS = 255  # a thread may have; accumulators and scores must leave room for the rest


def _plausible(tile: Tile, plan: Plan, capability: tuple[int, int]) -> bool:
    """Whether operands fit shared memory and accumulators registers: an estimate, the compiler has the last word."""
    threads = 32 * tile.warps
    both = plan.head_dim + plan.head_dim_v
    forward = plan.direction == FORWARD
    kept = tile.tile_m * (plan.head_dim if forward else both)
    stepped = tile.stages * tile.tile_n * both
    accumulators = tile.tile_m * (plan.head_dim_v if forward else both) // threads
    scores = (1 if forward else 2) * tile.tile_m * tile.tile_n // threads
    fits = 2 * (kept + stepped) <= shared_memory(capability)
    return fits and accumulators + scores <= REGISTERS - 40


def candidates(plan: Plan) -> list[Tile]:
    """Tiles worth measuring for a 16-bit Plan, its own first: build(replace(plan, tile=...)) runs each."""
    capability = tuple(int(part) for part in plan.arch.split("."))
    found = [plan.tile]
    for tile_m, tile_n, warps, stages in itertools.product((128, 64), (128, 64, 32), (8, 4), (2, 3, 4)):
        tile = Tile(tile_m, tile_n, stages, warps)
        divides = plan.direction == FORWARD or tile_m % tile_n == 0
        if tile not in found and divides and _plausible(tile, plan, capability):
            found.append(tile)
    return found
