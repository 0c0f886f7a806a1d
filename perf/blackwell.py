"""Our Blackwell forward beside FlashAttention-4's, no Blackwell GPU needed: `python -m perf.blackwell --csv FILE`.

Both are compiled by the same toolchain for sm_100a. Machine code gives registers, spills and the instructions of the
main loops; the emulator, on one head of 512 queries and keys, gives bytes and executed instructions; perf/model.py the
cycles of each pipe. Per tile means per 128 x 128 scores that the mask does not hide whole.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cute_flash.emulator import call, emulate
from cute_flash.spec.device import ARCHES, imagined
from cute_flash.spec.mask import CAUSAL, FULL
from cute_flash.spec.problem import FORWARD, Problem
from perf import model
from scripts import sass
from scripts.dump import KEEP

ARCH, SEQLEN = "sm_100a", 512
PACKED = ("FFMA2", "FADD2", "FMUL2")


@contextlib.contextmanager
def _keeping() -> Iterator[list]:
    """Collects what cute.compile returns, with its cubin."""
    import cutlass.cute as cute

    compile_once, kept = cute.compile, []
    with tempfile.TemporaryDirectory() as folder:

        def keep(*args: Any, options: str = "", **more: Any) -> Any:
            kept.append(compile_once(*args, options=f"{options} {KEEP.format(folder=folder)}", **more))
            return kept[-1]

        with mock.patch.object(cute, "compile", keep):
            yield kept


@dataclass(frozen=True)
class Pick:
    """A kernel of each."""

    head_dim: int
    head_dim_v: int
    causal: bool
    ctas: int  # that multiply together

    def __str__(self) -> str:
        return f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim},{self.head_dim_v})"


ALONE = tuple(Pick(d, d, causal, 1) for d in (64, 128) for causal in (False, True))
PAIRED = (Pick(128, 128, False, 2), Pick(192, 128, False, 2))  # what FA4 4.0.0b36 multiplies in pairs in this kernel


def ours(pick: Pick) -> Callable[..., Any]:
    from cute_flash.arch.sm100.backend import BACKEND

    device, mask = imagined(ARCHES[ARCH], "emulated"), CAUSAL if pick.causal else FULL
    problem = Problem(FORWARD, device, "bfloat16", pick.head_dim, pick.head_dim_v, 1, 1, mask, lse=True)
    plan = BACKEND.plan(problem)
    return BACKEND.build(plan if pick.ctas == 2 else replace(plan, variant=""))


def theirs(pick: Pick) -> Callable[..., Any]:
    from tests.emulator.foreign import fa4_forward

    return fa4_forward(ARCH, pick.head_dim, pick.causal, two_cta=pick.ctas == 2, head_dim_v=pick.head_dim_v)


def loops_of(code: list) -> dict[str, int | str]:
    """The unmasked softmax loop, the masked one, the MMA warp's."""
    found = sass.main_loops(code)
    softmax = [loop for loop in found if loop[1]["MUFU.EX2"] >= 64]
    plain = min((loop for loop in softmax), key=lambda loop: loop[0])
    masked = max((loop for loop in softmax), key=lambda loop: loop[0])
    products = [loop for loop in found if any(kind.startswith("UTCHMMA") for kind in loop[1])]
    return {
        "softmax_instructions": plain[0],
        "softmax_mufu": plain[1]["MUFU.EX2"],
        "softmax_packed_fma": sum(plain[1][kind] for kind in PACKED),
        "softmax_f2fp": plain[1]["F2FP"],
        "masked_instructions": masked[0],
        "mma_instructions": products[0][0] if products else "",
    }


def mma_order(code: list) -> str:
    """The products of the MMA warp's loop as it issues them: P comes from tensor memory (TS), Q from shared (SS)."""
    bodies = (sorted(body) for body in sass.loops(code).values())
    orders = []
    for body in bodies:
        kinds = [next(iter(sass.mix([code[i]]))) for i in body if sass.MATRIX.match(code[i].opcode)]
        if {kind.split()[-1] for kind in kinds} == {"SS", "TS"}:
            orders.append((len(body), kinds))
    runs = itertools.groupby(min(orders)[1]) if orders else ()
    return " ".join(f"{len(list(run))}x{'PV' if kind.endswith('TS') else 'QK'}" for kind, run in runs)


def machine_code(cubin: bytes, tool: str, ctas: int) -> dict[str, int | str]:
    """Of the kernel that multiplies with so many CTAs: ours has both under one Plan."""
    functions = sass.functions(sass.disassemble(cubin, tool)).items()
    name, code = next(pair for pair in functions if any("2CTA" in i.opcode for i in pair[1]) == (ctas == 2))
    counts: Counter = sass.mix(code)
    limits = [i.operands.split()[-1] for i in code if i.opcode.startswith("USETMAXREG")]
    return {
        "registers": sass.resources(cubin)[name]["registers"],
        "setmaxnreg": "/".join(str(int(limit, 16)) for limit in limits),
        "spill_stores": counts["STL"],
        "spill_loads": counts["LDL"],
        "instructions": sum(counts.values()) - counts["NOP"],
        **loops_of(code),
        "mma_order": mma_order(code),
    }


def emulated(kernel: Callable[..., Any], launches: list, pick: Pick, through: Callable) -> dict:
    widths = pick.head_dim, pick.head_dim, pick.head_dim_v
    q, k, v = (torch.randn(1, SEQLEN, 1, width, dtype=torch.bfloat16) for width in widths)
    out, lse = torch.empty_like(v), torch.empty(1, 1, SEQLEN)
    through(kernel, q, k, v, out, lse, 1 / math.sqrt(pick.head_dim))
    counters, edge = launches[-1]["counters"], SEQLEN // 128
    tiles = edge * (edge + 1) // 2 if pick.causal else edge * edge
    total, bound = counters.total(), model.estimate(counters, model.GPUS["B200"], tiles)
    scores = tiles * 128 * 128 / model.WARP
    return {
        "shared_bytes_per_cta": launches[-1]["shared"],
        "instructions_per_score": round(sum(total.values()) / scores, 3),
        "ex2_per_score": round(total["ex2"] / scores, 3),
        "tmem_bytes_per_tile": round(bound.tmem_bytes),
        "shared_bytes_per_tile": round(bound.cycles["shared memory"] * 128),
        "l2_bytes_per_tile": round(bound.l2_bytes),
        **{f"cycles_{name.replace(' ', '_')}": round(value) for name, value in bound.cycles.items()},
        "bound": bound.binding,
        "bound_tflops": round(bound.tflops * 2 * 128 * 128 * (pick.head_dim + pick.head_dim_v) / bound.mma_flops),
    }


def rows() -> Iterator[dict]:
    tool = sass.disassembler()
    if tool is None:
        raise SystemExit("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    for pick in (*ALONE, *PAIRED):
        for name, build, through in (("cute_flash", ours, call), ("fa4", theirs, lambda f, *args: f(*args))):
            torch.manual_seed(0)
            with emulate(ARCH, mode="eager", scheduler="round_robin", race=False) as emulation, _keeping() as kept:
                kernel = build(pick)
                counts = emulated(kernel, emulation.launches, pick, through)
                code = machine_code(kept[-1].artifacts.CUBIN, tool, pick.ctas)
            named = {"kernel": name, "d": str(pick), "mask": "causal" if pick.causal else "full", "ctas": pick.ctas}
            yield {**named, **code, **counts}


def tell(rows: Iterable[dict], prog: str, description: str, argv: list[str] | None) -> int:
    """Prints rows as they come and, asked to, keeps them."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--csv", type=Path, default=None)
    args = parser.parse_args(argv)
    found = []
    for row in rows:
        found.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if args.csv is not None:
            with args.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, found[0])
                writer.writeheader()
                writer.writerows(found)
    return 0


def main(argv: list[str] | None = None) -> int:
    return tell(rows(), "python -m perf.blackwell", __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
