"""Tiles of key-value caches on Hopper, and the page sizes that fit them. Plain Python, no GPU, no cutlass."""

from cute_flash.spec.plan import Tile

from ..tiles import SMEM_LIMIT, width

TILE_M, TILE_N = 64, 64  # wgmma's rows, which a few query rows never fill; keys of a step
SMEM_OF_TWO = 115_712  # bytes a CTA may take where two share an SM: half of 228 KB, less the 1 KB that each costs
BARRIERS = 1024  # bytes kept for them


def smem_bytes(tile: Tile, width_qk: int, width_v: int) -> int:
    return BARRIERS + 2 * tile.stages * tile.tile_n * (width_qk + width_v)


def cache_tile(head_dim: int, head_dim_v: int) -> Tile:
    """As many stages as fit: of two CTAs an SM, so that one starts and ends under the loads of the other; of one where
    two would get a single stage each."""
    widths = width(head_dim), width(head_dim_v)
    stage = 2 * TILE_N * sum(widths)
    stages = (SMEM_OF_TWO - BARRIERS) // stage
    return Tile(TILE_M, TILE_N, stages=stages if stages > 1 else (SMEM_LIMIT - BARRIERS) // stage)


def ctas_per_sm(tile: Tile, width_qk: int, width_v: int) -> int:
    return 2 if smem_bytes(tile, width_qk, width_v) <= SMEM_OF_TWO else 1


def page_fits(page_size: int) -> bool:
    """Is a page a whole number of tiles, or a tile of pages? 0: not paged."""
    return page_size % TILE_N == 0 or TILE_N % page_size == 0
