"""Tuning rows of the Hopper kernels: which tile a head_dim gets. Plain Python, no GPU, no cutlass."""

from cute_flash.spec.plan import Tile

SMEM_LIMIT = 232_448  # bytes a CTA may take: 227 KB, CUDA programming guide, compute capability 9.0
WIDTH_STEP = 32  # head dims are tiled in steps of 32: one kernel serves every true head_dim under its width

# (width of q and k, width of v) -> Tile
FORWARD = {
    (64, 64): Tile(192, 128, stages=2),
    (96, 96): Tile(128, 128, stages=2),
    (128, 128): Tile(128, 128, stages=2),
    (192, 128): Tile(128, 128, stages=2),
    (192, 192): Tile(128, 112, stages=2),
    (256, 256): Tile(128, 80, stages=2),
}


def width(head_dim: int) -> int:
    """The tiled head_dim: rounded up to the step, at least one swizzle atom (32 elements)."""
    return -(-head_dim // WIDTH_STEP) * WIDTH_STEP


def forward_smem_bytes(tile: Tile, width_qk: int, width_v: int) -> int:
    """Shared memory of a forward CTA: Q (its room serves O later), the K and V rings, barriers."""
    rows = max(width_qk, width_v) * tile.tile_m + tile.stages * tile.tile_n * (width_qk + width_v)
    return 2 * rows + 1024 + 8 * (4 * tile.stages + 2)


def forward_registers(tile: Tile, width_v: int) -> int:
    """Registers a thread of a 64-row warpgroup needs for S, P (16-bit) and O, before addresses and row state."""
    return tile.tile_n // 2 + tile.tile_n // 4 + width_v // 2


def forward_tile(head_dim: int, head_dim_v: int) -> Tile:
    """The measured row if there is one, else the widest tile_n that fits registers and shared memory."""
    width_qk, width_v = width(head_dim), width(head_dim_v)
    exact = FORWARD.get((width_qk, width_v))
    if exact:
        return exact
    tile_m, budget = (192, 132) if max(width_qk, width_v) <= 64 else (128, 192)
    for tile_n in (128, 112, 96, 80, 64, 48, 32):
        tile = Tile(tile_m, tile_n, stages=2)
        fits = forward_smem_bytes(tile, width_qk, width_v) <= SMEM_LIMIT
        if fits and forward_registers(tile, width_v) <= budget:
            return tile
    raise ValueError(f"no forward tile fits head_dim={head_dim}, head_dim_v={head_dim_v}")
