"""Tuning rows of the Blackwell kernels: which tile a head_dim gets. Plain Python, no GPU, no cutlass.

No row is measured: not yet run on silicon. They follow from bytes of shared memory and columns of tensor memory.
"""

from dataclasses import replace

from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.scratch import ScratchRule

SMEM_LIMIT = 232_448  # bytes a CTA may take: 227 KB, CUDA programming guide, compute capability 10.0
TMEM_COLUMNS = 512  # 32-bit columns of 128 lanes
WIDTH_STEP = 32  # head dims are tiled in steps of 32 up to 128: one kernel serves every true head_dim under its width
WIDE_STEP = 64  # beyond 128, so that a width splits into two equal chunks
SPLIT = "split"  # Plan.variant: several CTAs share a query tile, each takes a run of key tiles
PAIRS = "pairs"  # Plan.variant: two CTAs multiply together, where a call has rows enough for both
PACKED = "packed"  # Plan.variant: SPLIT, and the query heads of a group share tiles
PAIR = 2  # CTAs that multiply together: each holds its own query rows and one half of every K and V tile
ROWS = 128  # of one query tile
KEYS = 128  # of one step: at fewer, reading Q from shared memory would take longer than multiplying it
FIXED_BYTES = 2048  # barriers, tensor memory's address, row factors, and the alignment of what follows them
SCORE_SLOTS = 2  # S in tensor memory: of two query tiles, or of two steps of one
SLOT_BYTES = 32 * 1024  # of the K/V ring at most: 128 keys x 128 columns

# arch -> width_qk up to which -> exponentials of 16 pairs that the FMA pipe computes. A score costs MUFU 1/16 clock of
# the SM and the tensor cores (width_qk + width_v) / 4096: at 64 MUFU takes twice as long, at 128 as long, beyond less.
EMULATED_PAIRS = {
    "sm_100a": {64: 4, 128: 2, 256: 0},
    "sm_103a": {256: 0},  # MUFU is twice as wide there
}


# Pairs of CTAs under a full mask: (width_qk, width_v) -> cycles of an SM that 128 x 128 scores take on their slowest
# pipe, alone and paired: perf/model.py on what the emulator counts (512 or 1024 query rows and keys). Alone, a product
# of 128 rows reads all of K or V from shared memory, which binds; in a pair it reads half, as TMA fills half, and the
# tensor cores bind. Below 128 the softmax takes longest either way.
PAIR_CYCLES = {
    (128, 128): (1235, 1024),
    (128, 192): (1680, 1280),
    (128, 256): (1968, 1536),
    (192, 128): (1587, 1280),
    (192, 192): (2080, 1536),
    (192, 256): (2368, 1792),
    (256, 128): (1805, 1536),
    (256, 192): (2480, 1792),
    (256, 256): (2967, 2048),
}


def emulated_pairs(arch: str, width_qk: int) -> int:
    rows = EMULATED_PAIRS[arch]
    return rows[min(bound for bound in rows if bound >= width_qk)]


def width(head_dim: int) -> int:
    """The tiled head_dim: rounded up to the step, at least one swizzle atom (32 elements)."""
    step = WIDTH_STEP if head_dim <= 128 else WIDE_STEP
    return -(-head_dim // step) * step


def tmem_columns(query_tiles: int, width_v: int) -> int:
    """Two S (P lies over them), and O of every query tile."""
    return SCORE_SLOTS * KEYS + query_tiles * width_v


def key_chunk(width_qk: int) -> int:
    """Columns of K in one ring slot: all, or the widest equal share that fits."""
    shares = (n for n in range(1, 9) if width_qk % n == 0 and width_qk // n % WIDTH_STEP == 0)
    return next(width_qk // n for n in shares if 2 * KEYS * (width_qk // n) <= SLOT_BYTES)


def value_chunk(width_v: int) -> int:
    """Keys of V in one ring slot."""
    return next(keys for keys in (128, 64, 32) if 2 * keys * width_v <= SLOT_BYTES)


def slot_elements(width_qk: int, width_v: int, ctas: int = 1) -> int:
    """Of one CTA's room: of a pair, each holds half of a chunk."""
    return max(KEYS * key_chunk(width_qk), value_chunk(width_v) * width_v) // ctas


def chunks(width_qk: int, width_v: int) -> int:
    """Ring slots that one step takes, K and V together."""
    return width_qk // key_chunk(width_qk) + KEYS // value_chunk(width_v)


def _slots_beside(tile_m: int, row: int, widths: tuple[int, int], ctas: int) -> int:
    left = SMEM_LIMIT - FIXED_BYTES - 2 * tile_m * row
    return left // (2 * slot_elements(*widths, ctas))


def shared_output(tile_m: int, width_qk: int, width_v: int, ctas: int = 1) -> bool:
    """Does O take Q's room? Only where, beside both, the ring would not hold a step and one chunk ahead."""
    widths = width_qk, width_v
    return _slots_beside(tile_m, width_qk + width_v, widths, ctas) <= chunks(*widths)


def slots(tile_m: int, width_qk: int, width_v: int, ctas: int = 1) -> int:
    """Ring slots: whatever Q and O leave, at most eight."""
    shared = shared_output(tile_m, width_qk, width_v, ctas)
    row = max(width_qk, width_v) if shared else width_qk + width_v
    return min(8, _slots_beside(tile_m, row, (width_qk, width_v), ctas))


def _tile(query_tiles: int, width_qk: int, width_v: int) -> Tile | None:
    tile_m = query_tiles * ROWS
    stages = slots(tile_m, width_qk, width_v)
    fits = tmem_columns(query_tiles, width_v) <= TMEM_COLUMNS and stages >= chunks(width_qk, width_v)
    return Tile(tile_m, KEYS, stages=stages) if fits else None


def forward_tile(head_dim: int, head_dim_v: int) -> Tile:
    """Two query tiles where tensor memory holds them, else one."""
    widths = width(head_dim), width(head_dim_v)
    tile = _tile(2, *widths) or _tile(1, *widths)
    if tile is None:
        raise ValueError(f"no forward tile fits head_dim={head_dim}, head_dim_v={head_dim_v}")
    return tile


def paired(head_dim: int, head_dim_v: int, mask: str) -> bool:
    """Do two CTAs multiply together, where a call has rows enough? Each instruction then reads half of B from each
    CTA's shared memory, and each CTA loads half of K and V. Other masks would give the two different key tiles.
    """
    return mask == "full" and (width(head_dim), width(head_dim_v)) in PAIR_CYCLES


def pairs_pay(seqlen_q, tile_m: int, width_qk: int, width_v: int):
    """seqlen_q: an int, or an Int32 at run time. An odd number of query tiles leaves one CTA of a pair idle, which a
    pair's speed makes up for from some number on."""
    alone, together = PAIR_CYCLES[width_qk, width_v]
    tiles = (seqlen_q + tile_m - 1) // tile_m
    return (tiles % PAIR == 0) | (tiles >= -(-together // (alone - together)))


def pair_tile(tile: Tile, width_qk: int, width_v: int) -> Tile:
    """Of one CTA of a pair: K and V take half the room, so the ring has more slots."""
    return replace(tile, stages=slots(tile.tile_m, width_qk, width_v, PAIR))


def split_tile(head_dim: int, head_dim_v: int) -> Tile:
    """A single query tile, for calls with few rows."""
    tile = _tile(1, width(head_dim), width(head_dim_v))
    if tile is None:
        raise ValueError(f"no tile of one query tile fits head_dim={head_dim}, head_dim_v={head_dim_v}")
    return tile


def persistent(head_dim: int, head_dim_v: int, mask: str) -> bool:
    """Does a CTA take work tile after work tile? Under a full mask all cost the same, and one ends behind the next's
    start. Causal ones differ: a CTA each, longest first, lets the hardware level them. Where O takes Q's room the next
    one could not start early."""
    tile_m, widths = forward_tile(head_dim, head_dim_v).tile_m, (width(head_dim), width(head_dim_v))
    ways = (1, PAIR) if paired(head_dim, head_dim_v, mask) else (1,)
    return mask == "full" and not all(shared_output(tile_m, *widths, ctas) for ctas in ways)


# ---------------------------------------------------------------------------------------------------------- backward

FUSED, KEYS_PART, VALUES_PART = "", "keys", "values"  # what one kernel makes: everything; dK and dQ; dV
APART = "apart"  # Plan.variant: dV in a kernel of its own, which computes P again
NARROW = 128  # width of q and k up to which dK and dV fit tensor memory together
WIDE_ROWS = 64  # of a query tile, where dK or dV is wider: S^T and dP^T take half the columns
DQ_SLOTS = 2  # chunks of dQ in shared memory
DQ_CHUNK_BYTES = 8 * 1024  # at tile_m 64; twice that at 128
BACKWARD_BYTES = 3072  # barriers, tensor memory's address, LSE and delta of two query tiles


def backward_widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The tiled head dims. Beyond 128 dQ is computed transposed: q and k fill whole tiles of 128."""
    widths = width(head_dim), width(head_dim_v)
    return widths if max(widths) <= NARROW else (-(-head_dim // ROWS) * ROWS, widths[1])


def backward_tile(width_qk: int, width_v: int) -> Tile:
    return Tile(ROWS if max(width_qk, width_v) <= NARROW else WIDE_ROWS, KEYS)


# Cycles of an SM that 128 x 128 scores take at widths 128 on their slowest pipe, shared memory, alone and in pairs.
BACKWARD_PAIR_CYCLES = (3328, 2688)


def backward_variant(width_qk: int, width_v: int) -> str:
    """Below widths of 128 exponentials and conversions of a tile take as long as what a pair saves."""
    if width_qk > NARROW:
        return APART
    return PAIRS if width_qk == width_v == NARROW else FUSED


def backward_pairs_pay(seqlen_k):
    """seqlen_k: an int, or an Int32 at run time. As pairs_pay, of tiles of keys."""
    alone, together = BACKWARD_PAIR_CYCLES
    tiles = (seqlen_k + KEYS - 1) // KEYS
    return (tiles % PAIR == 0) | (tiles >= -(-together // (alone - together)))


def backward_turns(pairs: bool) -> int:
    """Parts of a tile of dQ that CTAs add to in turn: in pairs each has half of the columns."""
    return PAIR if pairs else 1


def backward_parts(variant: str) -> tuple[str, ...]:
    """The kernels of a Plan, a launch each."""
    return (KEYS_PART, VALUES_PART) if variant == APART else (FUSED,)


def backward_slots(tile_m: int, widths: tuple[int, int], part: str) -> tuple[int, int]:
    """Of Q and of dO: two each where they fit beside K, V, dS and chunks of dQ."""
    width_qk, width_v = widths
    fixed = BACKWARD_BYTES + 2 * ROWS * width_qk
    if part != VALUES_PART:
        fixed += 2 * ROWS * (width_v + tile_m) + DQ_SLOTS * DQ_CHUNK_BYTES * (tile_m // WIDE_ROWS)
    for q, do in ((2, 2), (2, 1), (1, 1)):
        if fixed + 2 * tile_m * (q * width_qk + do * width_v) <= SMEM_LIMIT:
            return q, do
    raise ValueError(f"no backward tile fits widths {width_qk} and {width_v}")


def backward_scratch(plan: Plan) -> ScratchRule:
    """dQ while it is summed, then LSE and delta of every row; if in turn, a counter a tile."""
    if plan.tile is None:
        raise ValueError(f"a plan without a tile has no scratch: {plan}")
    turns = backward_turns(plan.variant == PAIRS) if plan.deterministic else 0
    return ScratchRule(plan.tile.tile_m, plan.head_dim + 2, turns)
