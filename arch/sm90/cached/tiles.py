"""Tiles of key-value caches on Hopper, and the page sizes that fit them. Plain Python, no GPU, no cutlass."""

from cute_flash.spec.plan import Tile

from ..tiles import SMEM_LIMIT, WIDTH_STEP, width

TILE_M, TILE_N = 64, 64  # query rows at most, a multiple of 8; keys of a step, which are wgmma's 64 rows
SMEM_OF_TWO = 115_712  # bytes a CTA may take where two share an SM: half of 228 KB, less the 1 KB that each costs
BARRIERS = 1024  # bytes kept for them
STATS = 2048  # for the warps' maxima, and for where Q may start


def width_qk(head_dim: int, page_size: int) -> int:
    """As tiled. TMA writes to multiples of 128 bytes, and a page of one key is a row of a swizzle atom: 128 bytes wide
    or nothing."""
    return width(head_dim, 64 if page_size == 1 else WIDTH_STEP)


def width_v(head_dim_v: int) -> int:
    """As tiled: O^T = V^T P^T has columns of V as wgmma's 64 rows."""
    return width(head_dim_v, 64)


def _fixed_bytes(tile_m: int, width_qk: int) -> int:
    return BARRIERS + STATS + 2 * tile_m * (width_qk + TILE_N)


def smem_bytes(tile: Tile, width_qk: int, width_v: int) -> int:
    return _fixed_bytes(tile.tile_m, width_qk) + 2 * tile.stages * tile.tile_n * (width_qk + width_v)


def cache_tile(width_qk: int, width_v: int, few_rows: int = 0) -> Tile:
    """As many stages as fit: of two CTAs an SM, so that one starts and ends under the loads of the other; of one where
    two would get a single stage each. few_rows: a group's query rows, 0 = more than TILE_M."""
    tile_m = few_rows or TILE_M
    stage, fixed = 2 * TILE_N * (width_qk + width_v), _fixed_bytes(tile_m, width_qk)
    stages = (SMEM_OF_TWO - fixed) // stage
    return Tile(tile_m, TILE_N, stages=stages if stages > 1 else (SMEM_LIMIT - fixed) // stage)


def ctas_asked(tile: Tile) -> int:
    """CTAs an SM that ptxas is to leave registers for; 0: its own choice. Of few rows it takes 40: what warps say to
    each other is then read one word after the other. NVIDIA H200, 2026-11-30, us, 40 registers / 56: 512 tiles in one
    share 234.9 216.1, 1x1024 9.6 9.4, 4x8192 42.7 42.3."""
    return 1 if tile.tile_m <= 32 else 0


def page_fits(page_size: int) -> bool:
    """Is a page a whole number of tiles, or a tile of pages? 0: not paged."""
    return page_size % TILE_N == 0 or TILE_N % page_size == 0
