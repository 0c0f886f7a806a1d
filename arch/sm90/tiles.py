"""Tuning rows of the Hopper kernels: which tile a head_dim gets. Plain Python, no GPU, no cutlass."""

from dataclasses import replace

from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import DENSE, FEW, PACKED, SMALL_ROWS, Problem
from cute_flash.spec.scratch import ScratchRule, TableRule

SMEM_LIMIT = 232_448  # bytes a CTA may take: 227 KB, CUDA programming guide, compute capability 9.0
SMEM_RESERVED = 1024  # bytes of each CTA that the system takes beside
SPLIT = "split"  # Plan.variant: several CTAs share a query tile, each takes a run of key tiles
WIDTH_STEP = 32  # head dims are tiled in steps of 32: one kernel serves every true head_dim under its width

# (width of q and k, width of v, mask) -> Tile. TFLOP/s on an NVIDIA H200, 2026-11-30, bf16, 16384 tokens,
# heads = 2048 // head_dim, kernel time by graph replay, cards throttling: compare within a line only.
# Entries of a line may differ in the order of waits too, which is worth 2%.
#
# votes, in percent: S=512 1024 4096 16384 (perf/results/hopper_tiles.csv): d=64 -1.8 -1.0 +1.0 +2.2; d=96 +0.8 -0.2
# +0.9 +2.9; d=256 +0.8 +0.6 +1.8 +3.6, causal -1.4 -0.7 +1.1 +2.3. It loses at d=64 causal and d=96 causal.
# late: S=512 1024 2048 4096 16384 (perf/results/hopper_schedules.csv, process 3): (192,128) 0 +0.5 +1.4 +2.0 +2.9,
# causal 0 +0.2 +0.7 +1.2 +2.1; d=96 0 -0.4 0 +0.3 +1.6, causal +0.3 +0.7 +1.0 +1.2 +1.4; d=128 window of 1024 +0.9. It
# loses at d=64 causal (0.4 to 2.2) and d=256 (up to 2.3).
# votes and late (process 6): d=128 -0.2 to +0.6 +0.5 +1.1 +2.3 +3.4; (192,128) over late alone S=512 1024 4096 +1.5
# +1.8 +2.7, causal 4096 +1.2.
# ahead (process 6): all of the softmax before the wait for P V loses 3 to 8% everywhere, half of it 1 to 3% at d=64
# and 96. With votes and late it gains at d=128 causal 4096 +2.5, 16384 +2.8 (1024 +0.4), at d=192 full 2048 +1.9.
# skips (percent of the kernel without, S=512 1024 2048 4096 16384, perf/NOTES.md, "what the diagonal hides"): d=192
# causal +3.6 +3.5 +3.8 +1.8 +0.4; d=256 causal +2.9 +3.6 +3.5 +2.0 +0.7, with triples +2.5 +3.2 +4.4 +2.5 +0.9;
# (192,128) causal +2.2 +2.1, with votes +2.3 +3.1. It loses 2% at d=64 and 96 causal from 4096 on. halves: d=64 causal
# +6.1 +5.7; -0.8 and -2.3 at 2048 and 16384; d=128 causal +1.6 +0.5 +0.6 +0.3 +0.4. triples: d=256 full +0.3 +1.3 +2.2
# +1.7 +1.7; d=64 and (192,128) lose 1 to 2, others 0.
FORWARD = {
    # S=16384: 537, against 493 for 192x112, 391 for 128x128
    (64, 64, "full"): Tile(192, 128, stages=2, votes=True),
    # S=16384: 517, against 506 for 192x96, 446 for 128x128; S=4096: 452, 452, 391 (S=1024: 268, 271, 297)
    (64, 64, "causal"): Tile(192, 128, stages=2),
    # S=16384: 604, against 530 for 128x128, 566 for 128x160, 575 for 192x96
    (96, 96, "full"): Tile(192, 112, stages=2, votes=True, late=True),
    # S=4096: 560, against 519 for 128x128, 545 for 192x112; S=16384: 611, against 560 and 613
    (96, 96, "causal"): Tile(192, 96, stages=2, late=True),
    # S=16384: 688, against 692 for 128x176, 665 without votes; S=4096: 665, 650, 650; S=1024: 607, 552 (process 5), 604
    (128, 128, "full"): Tile(128, 128, stages=2, votes=True, late=True),
    # S=16384: 678, against 684 for 128x176, 660 for nothing of votes, late, ahead; S=4096: 579, 566 (process 5), 574
    (128, 128, "causal"): Tile(128, 128, stages=2, votes=True, late=True, ahead=16),
    # S=16384: 761, against 685 for 128x112
    (192, 128, "full"): Tile(128, 128, stages=2, votes=True, late=True),
    # S=16384: 703, against 709 for 128x112; S=1024: 375 against 358
    (192, 128, "causal"): Tile(128, 128, stages=2, votes=True, late=True),
    # S=16384: 724, against 704 for 128x96; S=4096: 697 (695 without ahead), against 666 for 128x80
    (192, 192, "full"): Tile(128, 112, stages=2, ahead=14),
    # S=16384: 792, against 745 for 128x96
    (192, 192, "causal"): Tile(128, 112, stages=2, skips=True),
    # S=16384: 707, against 662 for 128x64
    (256, 256, "full"): Tile(128, 80, stages=2, votes=True, triples=True),
    # S=16384: 685, against 661 for 128x64
    (256, 256, "causal"): Tile(128, 80, stages=2, votes=True, skips=True, triples=True),
}

# The same where there are at most problem.SHORT_KEYS keys (perf/results/hopper_schedules.csv): a tile is a few steps
# long there, and a narrower one wastes less above the diagonal and past the last key.
SHORT = {
    # S=512: 416, against 408 for two stages; S=1024: 447 against 445
    (64, 64, "full"): Tile(192, 128, stages=3, votes=True),
    # S=512: 270, against 239 for 192x128; S=1024: 334 against 305 (S=2048: 417 against 443)
    (64, 64, "causal"): Tile(128, 128, stages=2, halves=True),
    # S=512: 491, against 449 for 192x112, 426 for 192x96; S=1024: 560, 512, 522 (S=2048: 602, 645, 634)
    (96, 96, "full"): Tile(128, 128, stages=2, late=True),
    # S=512: 307, against 245 for 192x96; S=1024: 412 against 336 (S=2048: 522 against 525)
    (96, 96, "causal"): Tile(128, 128, stages=2, late=True),
    # S=1024: 475, against 468 for the row of longer ones
    (128, 128, "causal"): Tile(128, 128, stages=2),
    # S=512: 352, against 329 for 128x128, 320 for 128x96; S=1024: 476, 466, 462 (S=2048: 580, 606, 599)
    (192, 128, "causal"): Tile(128, 64, stages=2, votes=True, late=True, skips=True),
    # S=512: 518, against 506 for 128x112, 522 for 128x64; S=1024: 655, 611, 631 (S=2048: 725, 715, 704)
    (192, 192, "full"): Tile(128, 80, stages=2),
    # S=512: 349, against 305 for 128x112, 333 for 128x80; S=1024: 491, 456, 487 (S=2048: 613, 605, 625)
    (192, 192, "causal"): Tile(128, 64, stages=2, skips=True),
    # S=512: 351, against 332 for 128x80; S=1024: 494, 478 (S=2048: 617, 614)
    (256, 256, "causal"): Tile(128, 64, stages=2, skips=True),
}

# The same where there are at most Problem.small_rows query rows, whatever the keys: tiles of 128 rows fill the GPU once
# or leave some of it idle. us, median, L2 full of other data, batch 1, heads x length, the rows above / here / FA4
# (perf/results/hopper_starts.csv, process 3). 32 x 512 at d=128 loses 4% and is the only one.
SMALL = {
    # 16x512 14.1 / 10.8 / 13.5; two CTAs share a multiprocessor
    (64, 64, "full"): Tile(64, 128, stages=2),
    # 16x1024 17.5 / 15.7 / 20.6, one CTA 16.2; 32x512 13.3 / 12.3 / 15.1, one CTA 13.7; 8x2048 30.4 / 22.9 / 31.3
    (64, 64, "causal"): Tile(64, 128, stages=2),
    # 16x1024 19.2 / 18.2 / 24.1, 64 keys 19.1; 21x512 14.2 / 14.2 / 16.5, 64 keys 13.1
    (96, 96, "causal"): Tile(64, 128, stages=2),
    # 16x512 14.7 / 12.9 / 14.2; 4x2048 30.1 / 24.0 / 29.9, without votes 24.7; 16x1024, which is not small, 21.3 / 25.0
    (128, 128, "full"): Tile(64, 128, stages=2, votes=True, late=True),
    # 16x1024 20.6 / 19.8 / 22.2, 64 keys 20.1; 8x2048 30.7 / 28.1 / 33.1, 29.2; 4x4096 51.0 / 43.3 / 55.0, 46.4
    (128, 128, "causal"): Tile(64, 128, stages=2),
    # 16x1024 24.1 / 22.4 / 24.8, 64 keys 22.0; 10x1024 22.8 / 19.7 / 22.9, 64 keys 20.5
    (192, 128, "causal"): Tile(64, 128, stages=2),
    # 2 x 8x1024 26.7 / 23.9 / 29.7, 112 keys 24.6; 10x1024 24.9 / 21.8 / 27.8, 112 keys 22.2
    (192, 192, "causal"): Tile(64, 64, stages=3),
    # 2 x 8x1024 32.5 / 28.5 / 33.9, 80 keys 29.6; 8x2048 49.4 / 41.4 / 52.7, 42.9; 8x1024 29.4 / 23.6 / 31.1, 23.2
    (256, 256, "causal"): Tile(64, 64, stages=2),
}

DRAWN_FULL = {(64, 64), (192, 192)}  # see draws


def width(head_dim: int, step: int = WIDTH_STEP) -> int:
    """The tiled head_dim: rounded up to the step, at least one swizzle atom (32 elements)."""
    return -(-head_dim // step) * step


def forward_smem_bytes(tile: Tile, width_qk: int, width_v: int, o_apart: bool = False) -> int:
    """Shared memory of a forward CTA: barriers and tickets, Q, O if it has a room, the K and V rings."""
    width_qo = width_qk + width_v if o_apart else width_qk
    elements = width_qo * tile.tile_m + tile.stages * tile.tile_n * (width_qk + width_v)
    return 1024 + 2 * elements


def q_slots(tile: Tile, width_qk: int, width_v: int) -> int:
    """Two where they fit beside O in its own room."""
    both = forward_smem_bytes(tile, width_qk, width_v, o_apart=True) + 2 * tile.tile_m * width_qk
    return 2 if both <= SMEM_LIMIT else 1


def o_apart(tile: Tile, width_qk: int, width_v: int) -> bool:
    """O leaves through shared memory where it fits beside Q, else from registers."""
    return forward_smem_bytes(tile, width_qk, width_v, o_apart=True) <= SMEM_LIMIT


def forward_ctas(tile: Tile, width_qk: int, width_v: int) -> int:
    """CTAs on a multiprocessor: two of one MMA warpgroup where shared memory has room, which then run in turn."""
    apart, slots = o_apart(tile, width_qk, width_v), q_slots(tile, width_qk, width_v)
    size = forward_smem_bytes(tile, width_qk, width_v, apart) + 2 * (slots - 1) * tile.tile_m * width_qk
    return 2 if tile.tile_m == 64 and 2 * (size + SMEM_RESERVED) <= SMEM_LIMIT + SMEM_RESERVED else 1


def forward_registers(tile: Tile, width_v: int) -> int:
    """Registers a thread of a 64-row warpgroup needs for S, P (16-bit) and O, before addresses and row state."""
    return tile.tile_n // 2 + tile.tile_n // 4 + width_v // 2


def draws(width_qk: int, width_v: int, mask: str, short: bool, softcap: bool) -> bool:
    """Do CTAs draw their tiles? For unequal tiles it is worth 3 to 25%; equal ones gain 2% at most, want a kernel of
    their own for it, and with few keys gain less than the counter costs the host. Kernels that take bounds always draw.

    NVIDIA H200 (perf/results/hopper_schedules.csv), S=1024 4096 16384, a fixed order (or a CTA a tile, if better) /
    drawn. Causal: d=64 335/361 501/506 528/545; d=128 431/511 630/692 662/688; d=256 440/482 684/708 778/789. Full:
    d=64 466/470 557/568 558/564; d=128 646/646 719/720 671/672; d=192 607/617 764/771 745/744.
    """
    return mask != "full" or softcap or ((width_qk, width_v) in DRAWN_FULL and not short)


def small(problem: Problem) -> bool:
    """Do tiles of 128 query rows (full: of 64) fill multiprocessors once at most? Smaller GPUs were not measured."""
    return problem.small and 128 * problem.device.sm_count >= SMALL_ROWS


def split_tile(plan: Plan) -> Tile | None:
    """Of CTAs that share a query tile: they fill the GPU with tiles of 128 rows, too."""
    if plan.tile is None or plan.tile.tile_m > 64:
        return plan.tile
    return forward_tile(plan.head_dim, plan.head_dim_v, str(plan.mask))


def forward_tile(
    head_dim: int, head_dim_v: int, mask: str, short: bool = False, softcap: bool = False, small: bool = False
) -> Tile:
    """The measured row if there is one, else the widest tile_n that fits registers and shared memory.

    A window takes what the widest fitting rule gives; measured there is `late` at head dim 128 alone (above), and
    nothing under a softcap, with which the 160 registers of three warpgroups hold 96 keys: 128 spill 18 words, 112
    under a window 9.
    """
    width_qk, width_v = width(head_dim), width(head_dim_v)
    if softcap and max(width_qk, width_v) <= 64:
        return Tile(192, 96, stages=2)
    row = (width_qk, width_v, mask)
    rows = (SMALL if small and not softcap else {}), (SHORT if short else {}), FORWARD
    exact = next((table[row] for table in rows if row in table), None)
    if exact:
        return exact
    tile_m, budget = (192, 132) if max(width_qk, width_v) <= 64 else (128, 192)
    late = width_qk == width_v == 128 and mask not in ("full", "causal")
    for tile_n in (128, 112, 96, 80, 64, 48, 32):
        tile = Tile(tile_m, tile_n, stages=2, late=late)
        fits = forward_smem_bytes(tile, width_qk, width_v) <= SMEM_LIMIT
        if fits and forward_registers(tile, width_v) <= budget:
            return tile
    raise ValueError(f"no forward tile fits head_dim={head_dim}, head_dim_v={head_dim_v}")


# For packed sequences of at most problem.FEW[-1] rows, and of at most FEW[0] rows and keys. NVIDIA H200, 2026-11-30,
# d=128 causal: 4096 sequences of 64 976 us, against 1578 for 128x128 (commit d5d9081); 16384 of 16 2787 against 6378
# there, and drawn four at a time 2060 to 2096 against 1778 for 16 keys (3f9f857).
PACKED_FEW, PACKED_FEWEST = Tile(64, 64, stages=2), Tile(64, 16, stages=2)


def packed_tile(problem: Problem, softcap: bool) -> Tile:
    """As dense calls', where sequences are not all too short for it; every warpgroup walks all key tiles of a unit."""
    if problem.few_rows:
        return PACKED_FEWEST if problem.few_rows == problem.few_keys == FEW[0] else PACKED_FEW
    short = problem.short and not softcap
    tile = forward_tile(problem.head_dim, problem.head_dim_v, str(problem.mask), short, softcap)
    return replace(tile, skips=False, halves=False)


def drawn_together(tile: Tile) -> int:
    """Units that a CTA draws at once. Four where one is about as short as a draw and a search: 16384 sequences of 16
    tokens 2787 us one at a time, 2060 four (perf/NOTES.md, "Packed sequences on Hopper")."""
    return 4 if tile.tile_m == 64 else 1


TABLE = TableRule(words_per_sequence=6, words=7)  # what prepares a launch for packed sequences: sequences.py
TABLE_ALIGN = 32  # words: a backward's scratch begins after its table, at 128 bytes


def table_room(words: int) -> int:
    return (words + TABLE_ALIGN - 1) // TABLE_ALIGN * TABLE_ALIGN


ALTERNATE = "alternate"  # Plan.variant: the MMA warpgroups of a fused backward take turns at dQ

WIDE = "wide"  # Plan.variant: one kernel for heads that backward.py has no registers for, see backward_wide.py

WIDE_TILE = Tile(64, 96, stages=2)
WIDE_WIDTHS = (192, 192), (192, 128)


def wide_backward(problem: Problem) -> bool:
    """For widths of 192, and 128 or 192 of v. It adds dQ in memory, and a tile of 96 keys sees more that a causal mask
    hides: two kernels (APART) win at few keys. Those do not take packed sequences.

    NVIDIA H200, 2026-11-30, commits 9d04420 and e434319, TFLOP/s wide / apart / FA4. d=192 causal S=512 210 236 214,
    1024 327 316 314, 2048 422 361 385, 4096 495 392 445, 16384 541 411 512, full 1024 429 376 403, 4096 507 401 475,
    16384 568 407 524; (192,128) causal 1024 295 335 284, 2048 384 388 346, 4096 451 431 403, 16384 482 464 464, full
    1024 381 401 363, 4096 459 441 434, 16384 506 446 478. In turn, d=192 full 1024 413 364 - (commit 1d69293).
    """
    widths = _halved(problem.head_dim), _halved(problem.head_dim_v)
    if widths not in WIDE_WIDTHS:
        return False
    if problem.form == PACKED or not problem.short:
        return True
    return widths == (192, 192) and str(problem.mask) == "full"


def packed_backward(problem: Problem) -> bool:
    """One kernel that makes dQ, dK and dV takes packed sequences."""
    dims = problem.head_dim, problem.head_dim_v
    return fused_backward(*dims) or tuple(map(_halved, dims)) in WIDE_WIDTHS


def wide_do_slots(width_v: int) -> int:
    """K, V, two slots of Q, P, dS and a tile of dQ leave room for one slot of dO at 192 columns, for two at 128."""
    return 1 if width_v > 128 else 2


SHARED = "shared"  # Plan.variant: CTAs share a key tile, see backward_shared.py
SHARING_WARPS = 8  # that hold its sums

APART = "apart"  # Plan.variant: dQ in a kernel of its own, see backward_apart.py

FUSED_WIDTH = 128  # of q and k, and of v, at most where one kernel makes dQ, dK and dV: what dK, dV, S^T and dP^T of a
# warpgroup leave of its registers


def fused_backward(head_dim: int, head_dim_v: int) -> bool:
    return max(width(head_dim), width(head_dim_v)) <= FUSED_WIDTH


def _halved(head_dim: int) -> int:
    """Halves are whole swizzle atoms."""
    return width(head_dim, 64)


def backward_widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The tiled head dims. Where the kernels are apart, two warpgroups share the columns of dK and dV."""
    if fused_backward(head_dim, head_dim_v):
        return width(head_dim), width(head_dim_v)
    return _halved(head_dim), _halved(head_dim_v)


WHOLE_WIDTHS = 320  # of dK and dV together at most where a warpgroup holds all columns of 64 keys


TALL_TILE = Tile(80, 128, stages=2)


def tall_backward(problem: Problem) -> bool:
    """Heads of 128 under a full mask: 80 query rows a tile, dQ transposed, where there are more than SHORT_KEYS keys.

    NVIDIA H200, 2026-11-30, commit 221b1d2, TFLOP/s 64 rows / with dQ in turn / 80 / FA4: S=1024 489 477 486 468, 4096
    565 559 569 575, 8192 581 579 595 607, 16384 593 592 612 628; causal 1024 369 361 358 361, 4096 528 524 514 518,
    16384 590 590 593 617.
    """
    dims = width(problem.head_dim), width(problem.head_dim_v)
    plain = str(problem.mask) == "full" and "softcap" not in problem.features
    return dims == (128, 128) and plain and not problem.short


def backward_tile(problem: Problem, plain: bool) -> Tile:
    """Rows measured: perf/results/hopper_backward_variants.csv, d=64 causal S=4096 488 against 404 for 64 rows.

    Fused, tile_n is 128, 64 keys for each of two MMA warpgroups. A thread holds (width_qk + width_v) / 2 sums of dK
    and dV, tile_m scores and gradients, and a quarter of those again in 16 bits: 128 query rows where that fits 240
    registers (with a softcap or a window it spills a few words), else 64 or 80, and 64 for packed sequences that are no
    longer: sums of dQ take whole tiles of each. Apart, 64 rows (dQ: DQ_TILE) and 128 keys where dK and dV of 64 fit a
    warpgroup's registers (dkdv_whole.py; not with a softcap, whose slopes want more), else 64 (dkdv.py)."""
    dims = problem.head_dim, problem.head_dim_v
    widths = sum(backward_widths(*dims))
    if wide_backward(problem):
        return WIDE_TILE
    if not fused_backward(*dims):
        return _apart_waits(problem, _apart_tile(widths, plain)) if plain else _apart_tile(widths, plain)
    if problem.few_rows:
        return Tile(64, 128, stages=2)
    tile = TALL_TILE if tall_backward(problem) else Tile(128 if widths <= 128 and plain else 64, 128, stages=2)
    return _waits(problem, tile) if plain else tile


def _waits(problem: Problem, tile: Tile) -> Tile:
    """Where a fused backward has LSE and delta early, and how many exponentials stand before its wait for dP: ptxas
    left to itself has one of 32 at d=128 and 96, five of 64 at d=64; half of them is best at d=128.

    NVIDIA H200, 2026-11-30, commit 348bf59, TFLOP/s neither / early / early, half before / early, all / all. d=128
    causal S=1024 368 368 365 363 356, 4096 529 532 540 534 501, 16384 584 590 602 595 549, full 1024 478 483 489 483
    455, 16384 589 575 616 596 569; d=96 causal 512 216 215 214 213 213, 16384 527 548 530 479 496, full 4096 556 574
    508 501 495. d=64, neither / LSE early / half / all: causal 1024 349 344 340 339, 4096 498 484 478 473, full 16384
    533 526 517 519. In turn at d=96, neither / early (commit 1d69293): causal 4096 498 508, 16384 551 564, full 4096
    525 532, 16384 533 545.
    """
    full_width = width(problem.head_dim) == width(problem.head_dim_v) == FUSED_WIDTH
    if tile.tile_m == 128:
        return tile
    held = full_width and not (problem.short and problem.mask.causal)
    return replace(tile, early=True, ahead=tile.tile_m // 4 if held else 0, under=tile == TALL_TILE)


def _apart_waits(problem: Problem, tile: Tile) -> Tile:
    """The same where the kernels are apart. Causal, tiles that the diagonal hides from a warpgroup are left out; else
    P is stored before the wait for dP.

    NVIDIA H200, 2026-11-30, commit 348bf59, TFLOP/s neither / left out / P before, late / early. Causal: d=256 S=1024
    326 330 324 325, 4096 410 413 409 409; d=192 1024 311 315 307 308; (192,128) 1024 333 340 323 335. Full: d=256 4096
    429 - 434 436, again (d9e7ba6) 435 - 437 443. (64, 256) is not measured: left to itself, ptxas spills
    seven words in the loop of dK and dV.
    """
    if problem.mask.causal:
        return replace(tile, skips=True)
    if tile.tile_n == 64:
        return replace(tile, early=True, ahead=16)
    return replace(tile, ahead=16) if backward_widths(problem.head_dim, problem.head_dim_v) == (64, 256) else tile


def heads_together(in_turn: bool) -> int:
    """Of a causal backward, whose CTAs take key tiles of so many heads by turns at most, where there are no more than
    SHORT_KEYS keys; 0, and beyond: of as many as fit L2. Who adds in turn wants many.

    NVIDIA H200, 2026-11-30, commit d9e7ba6, TFLOP/s as many as fit 32 MB / 16 / 8 / 4 / 2 MB. S=512, where these are 64
    to 4 heads at d=128, 128 to 8 at 64: d=128 237 240 252 264 265, d=64 230 241 253 263 264, d=96 216 229 244 249 250,
    d=256 254 257 256 254 253, (192,128) 255 257 254 254 254. S=1024: d=128 371 379 383 381 380, d=64 349 359 361 361
    359. S=4096: d=128 (7, 3, 1 heads) 545 546 530, d=64 (15, 7, 3, 1) 500 496 496 489, d=96 (10, 5, 2) 512 503 498.
    d=192 2048 (10, 5, 2) 428 425 419.
    """
    return 0 if in_turn else 8


def _apart_tile(widths: int, plain: bool) -> Tile:
    return Tile(64, 128 if widths <= WHOLE_WIDTHS and plain else 64, stages=2)


def dq_width(width_qk: int, tile: Tile, variant: str) -> int:
    """Of K and dQ in the fused kernel: two warpgroups share the columns of dQ where a tile has 64 rows."""
    return _halved(width_qk) if tile.tile_m == 64 and not alternates(width_qk, variant) else width_qk


def alternates(width_qk: int, variant: str) -> bool:
    """Do the MMA warpgroups of the fused kernel take turns at dQ?"""
    return variant == ALTERNATE or (variant == SHARED and width_qk == 96)


# Of the kernel for dQ where the kernels are apart: two warpgroups of 64 rows; K has two slots, V one. Both kernels
# together against 64 keys, NVIDIA H200, 2026-11-30, causal S=4096: d=256 48 keys -2%, d=192 48 -2%, 80 -1%, (192,128)
# 48 to 96 -2 to 0% (perf/results/hopper_backward_variants.csv).
DQ_TILE = Tile(128, 64, stages=2)


# Where tiles have 64 rows: does one MMA warpgroup make all of a tile's dQ, and the other that of the next tile? NVIDIA
# H200, 2026-11-30, half of the columns each / in turn: d=128 full S=1024 489 477, 4096 565 559, causal 4096 528 524;
# d=96 causal 4096 456 495, because halves of 48 columns are none that wgmma reads, and K and dQ are 128 wide instead
# (perf/results/hopper_backward_variants.csv, run 4; d=128: commit 221b1d2).
def backward_variant(problem: Problem, tile: Tile) -> str:
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    if shared_backward(problem):
        return SHARED
    if tile == WIDE_TILE:
        return WIDE
    if not fused_backward(head_dim, head_dim_v):
        return APART
    return ALTERNATE if tile.tile_m == 64 and width(head_dim) % 64 != 0 else ""


def shared_backward(problem: Problem) -> bool:
    """Where key tiles fill the GPU once at most, and a causal mask leaves the last ones little to do: beyond SHORT_KEYS
    keys, and where a group's heads leave few key tiles.

    NVIDIA H200, 2026-12-01, commit 8de8d45, one sequence, TFLOP/s shared in two / any order / in turn / FA4. d=128 16
    heads S=512 85 76 81 89, 1024 197 194 208 212, 8 heads 2048 311 256 267 270, 4 heads 4096 445 297 307 311, 1 head
    16384 623 343 346 351; d=64 32 heads 512 82 96 100 109, 16 heads 1024 143 144 153 159, 8 heads 2048 239 198 209 216;
    d=96 16 heads 1024 183 170 181 182, 8 heads 2048 287 227 236 235. 16 heads over 4, d=128 1024: 126 75 76 179.
    """
    dims, causal = (width(problem.head_dim), width(problem.head_dim_v)), str(problem.mask) == "causal"
    plain = "softcap" not in problem.features and problem.form == DENSE and not problem.deterministic
    few = small(problem) and (problem.group > 1 or not problem.short)
    return few and causal and plain and dims in ((64, 64), (96, 96), (128, 128))


def adds_in_turn(problem: Problem, variant: str) -> bool:
    """Is the order of additions to dQ fixed: on request, where nothing is added in memory, and where it is faster?

    NVIDIA H200, in turn / in any order. TFLOP/s, 1d69293: d=96 causal S=4096 508 493, 16384 564 528, full 4096 532 542,
    16384 545 570; d=192 causal 4096 461 474, (192,128) 437 440. Times, dd8366d (hopper_backward.csv), causal S=512,
    1024, 2048, 4096, 8192, 16384, 32768: d=64 1.03 1.00 0.98 0.98 0.98 0.97 0.98, d=128 1.00 0.98 0.97 0.98 1.00 1.00
    1.00, one sequence of 1024 0.95, of 4096 0.98. Groups, a8003b8, 32 heads over 8, d=128 causal 2048, 8192, 16384:
    0.96 1.01 1.02.
    """
    if problem.deterministic or variant == APART:
        return True
    if variant == SHARED:
        return False
    dims, causal = (width(problem.head_dim), width(problem.head_dim_v)), str(problem.mask) == "causal"
    plain = "softcap" not in problem.features and problem.form == DENSE
    narrow = dims in ((64, 64), (96, 96)) and (not problem.short or small(problem))
    wins = dims == (128, 128) or narrow
    return wins and causal and plain


def backward_candidates(plan: Plan) -> tuple[Plan, ...]:
    """What is worth measuring beside a plan: perf/variants.py."""
    if plan.variant == WIDE:
        tile = _apart_tile(plan.head_dim + plan.head_dim_v, plan.plain)
        any_order = (replace(plan, deterministic=False),) if plan.deterministic else ()
        return replace(plan, tile=tile, variant=APART, deterministic=True), *any_order
    if plan.variant == APART:
        wide = replace(plan, tile=WIDE_TILE, variant=WIDE)
        others = (replace(wide, deterministic=False), wide) if plan.head_dim == 192 and plan.head_dim_v >= 128 else ()
        return replace(plan, tile=Tile(64, 64, stages=2)), *others
    if plan.variant == SHARED:
        alone = replace(plan, variant=ALTERNATE if alternates(plan.head_dim, plan.variant) else "")
        return alone, replace(alone, deterministic=True)
    if plan.deterministic:
        return (replace(plan, deterministic=False),)
    rows = (64, 128) if plan.head_dim + plan.head_dim_v <= 128 else (64,)
    if plan.head_dim == plan.head_dim_v == 128 and plan.plain:
        rows = (64, TALL_TILE.tile_m)
    tiles = [replace(plan, tile=Tile(tile_m, 128, stages=2)) for tile_m in rows]
    return tuple(
        replace(each, variant=variant)
        for each in tiles
        for variant in ("", ALTERNATE)
        if each.tile.tile_m == 64 or variant == ""
    )


def backward_scratch(plan: Plan) -> ScratchRule:
    """dQ while it is summed, where it is, then LSE and delta of every row; if in turn, a counter for both parts of a
    tile; the counter of units and one for every head of K and V."""
    if plan.tile is None:
        raise ValueError(f"a plan without a tile has no scratch: {plan}")
    if plan.variant == APART:
        return ScratchRule(plan.tile.tile_m, 2, 2)
    width_dq = dq_width(plan.head_dim, plan.tile, plan.variant)
    rule = ScratchRule(plan.tile.tile_m, width_dq + 2, 4 if plan.deterministic else 2)
    if plan.variant == SHARED:
        tile_n = plan.tile.tile_n
        left = tile_n * (plan.head_dim + plan.head_dim_v)
        return replace(rule, tile_n=tile_n, floats_per_share=left, words_per_key_tile=SHARING_WARPS)
    return replace(rule, table=TABLE, table_align=TABLE_ALIGN) if plan.form == PACKED else rule
