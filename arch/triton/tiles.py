"""Tile of every (direction, head_dim, dtype, capability), within the shared memory that a program may take there.

The forward and the dQ kernel keep tile_m query rows and step over tile_n keys; the dK/dV kernel mirrors them: it keeps
tile_m keys and steps over tile_n query rows.
"""

from cute_flash.spec.plan import Tile

WIDTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)  # each a power of two, or a sum of two

KIB = 1024
SHARED_MEMORY = {  # bytes a program may take, by capability; what is not listed gets the smallest
    (8, 0): 163 * KIB,
    (8, 7): 163 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
}
SHARED_MEMORY_MIN = 99 * KIB  # 8.6, 8.9, 12.0, 12.1


def width(head_dim: int) -> int:
    """The padded head_dim."""
    return next(w for w in WIDTHS if w >= head_dim)


def shared_memory(capability: tuple[int, int]) -> int:
    return SHARED_MEMORY.get(capability, SHARED_MEMORY_MIN)


def choose(direction: str, width_max: int, dtype: str, ieee: bool, capability: tuple[int, int]) -> Tile:
    if dtype == "float32":
        return Tile(32, 32, 1, 4)
    return Tile(64, 32, 2, 4)
