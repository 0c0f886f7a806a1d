"""Cycles per pipe of what the emulator counted, and the bound they put on a tile.

    with emulate("sm_90a") as emulation:
        ...
    print(estimate(emulation.counters, GPUS["H200"], tiles=10))

A bound, not a prediction: each pipe is taken at its full rate and all of them as perfectly overlapped, so the slowest
pipe is the floor. TMEM and L2 traffic is counted and printed, but binds nothing here. Rates are per SM and clock.
Instructions are PTX's, before ptxas: issue is an estimate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

WARP = 32
ISSUE_PER_CLOCK = 4  # four schedulers, one warp instruction each
# Instructions that do not take an issue slot of their own in machine code, or that are counted on another pipe.
NOT_ISSUED = ("mma", "tcgen05", "async copy", "branch", "param", "move")
FP32_LANES = 128
PACKED = ("ffma2", "fadd/fmul2")  # two values a lane


@dataclass(frozen=True)
class Gpu:
    name: str
    sms: int
    clock_ghz: float
    mma_flops: dict  # element bytes -> FLOP per SM and clock
    ex2: int
    shared_bytes: int
    packed_f32: bool  # add, mul and fma on f32x2 run at the rate of the scalar form

    @property
    def peak_tflops(self) -> float:
        return self.sms * self.mma_flops[2] * self.clock_ghz / 1e3


# BF16 MMA 4096 and 8192 FLOP, FP8 twice that, ex2 16 (cudnn-frontend #1178 measured 16.00 on B200), shared memory 128 B
# (quack's pipe microbenchmarks), per SM and clock. Clocks are the boost clocks behind the vendor's peak figures:
# 132 x 4096 x 1.83 GHz = 989 TFLOP/s; a power-limited GPU runs lower, so log the clock beside any comparison.
_HOPPER = {1: 8192, 2: 4096, 4: 2048}
_BLACKWELL = {1: 16384, 2: 8192, 4: 4096}
GPUS = {
    "H100": Gpu("H100 SXM", 132, 1.83, _HOPPER, 16, 128, False),
    "H200": Gpu("H200", 132, 1.83, _HOPPER, 16, 128, False),
    "B200": Gpu("B200", 148, 1.85, _BLACKWELL, 16, 128, True),
}


@dataclass(frozen=True)
class Bound:
    """Cycles of one SM, per tile. `tflops` is what all SMs would reach at the slowest pipe's pace."""

    gpu: Gpu
    tiles: int
    cycles: dict  # pipe -> cycles per tile
    mma_flops: float  # per tile
    tmem_bytes: float
    l2_bytes: float

    @property
    def binding(self) -> str:
        return max(self.cycles, key=self.cycles.get)

    @property
    def tflops(self) -> float:
        slowest = self.cycles[self.binding]
        return self.gpu.sms * self.gpu.clock_ghz * self.mma_flops / slowest / 1e3 if slowest else 0.0

    def __str__(self) -> str:
        pipes = ", ".join(f"{name} {value:.0f}" for name, value in self.cycles.items())
        return (
            f"{self.gpu.name}, cycles a tile: {pipes}; bound by {self.binding}: {self.tflops:.0f} TFLOP/s of "
            f"{self.gpu.peak_tflops:.0f}; TMEM {self.tmem_bytes:.0f} B, L2 {self.l2_bytes:.0f} B a tile"
        )


def _element_bytes(shape: str) -> int:
    """Operand size of a counted MMA shape, as in 'm64n128k16 bf16 SS'."""
    kind = shape.split()[1]
    return {"bf16": 2, "f16": 2, "tf32": 4}.get(kind, 1)


def _flops(shape: str) -> int:
    m, n, k = (int(v) for v in shape.split()[0].replace("m", "").replace("n", " ").replace("k", " ").split())
    return 2 * m * n * k


def estimate(counters, gpu: Gpu, tiles: int) -> Bound:
    """`counters`: of a launch. `tiles`: how many equal pieces of work it was, for figures per tile."""
    total: Counter = counters.total()
    shapes = counters.mma_by_shape.items()
    mma = sum(_flops(shape) * times / gpu.mma_flops[_element_bytes(shape)] for shape, times in shapes)
    shared = counters.shared_read + counters.shared_written + counters.mma_shared_read + total["shuffle"] * 128
    issued = sum(count for name, count in total.items() if name not in NOT_ISSUED)
    if not gpu.packed_f32:
        issued += sum(total[name] for name in PACKED)
    fp32 = {name: count for name, count in total.items() if name.startswith(("fadd/fmul", "ffma"))}
    fp32_ops = sum(count * (2 if name in PACKED and not gpu.packed_f32 else 1) for name, count in fp32.items())
    cycles = {
        "MMA": mma / tiles,
        "ex2": (total["ex2"] + total["sfu"]) * WARP / gpu.ex2 / tiles,
        "shared memory": shared / gpu.shared_bytes / tiles,
        "FP32": fp32_ops * WARP / FP32_LANES / tiles,
        "issue": issued / ISSUE_PER_CLOCK / tiles,
    }
    l2 = counters.l2_read + counters.l2_written
    tmem = counters.tmem_read + counters.tmem_written
    flops = sum(_flops(shape) * times for shape, times in shapes)
    return Bound(gpu, tiles, cycles, flops / tiles, tmem / tiles, l2 / tiles)


def by_role(counters, roles: dict) -> str:
    """A table of executed warp instructions: one line a class, one column a role (name -> warp indices)."""
    table = counters.by_role(roles)
    names = {name for counts in table.values() for name in counts}
    classes = sorted(names, key=lambda name: -sum(counts[name] for counts in table.values()))
    head = f"{'class':<14}" + "".join(f"{name:>12}" for name in table)
    lines = [f"{name:<14}" + "".join(f"{counts[name]:>12}" for counts in table.values()) for name in classes]
    return "\n".join([head, *lines])
