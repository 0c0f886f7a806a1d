"""Our Blackwell backward beside FlashAttention-4's, no Blackwell GPU needed: python -m perf.blackwell_backward.

The main kernels alone, both compiled by the same toolchain for sm_100a. Machine code gives registers, spills and the
instructions of each role's loop; the emulator, on one head of 512 queries and keys, gives bytes and executed
instructions; perf/model.py the cycles of each pipe. Per tile means per 128 x 128 scores that the mask does not hide.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cute_flash.emulator import call, emulate
from cute_flash.spec.device import ARCHES, imagined
from cute_flash.spec.mask import CAUSAL, FULL
from cute_flash.spec.problem import BACKWARD, Problem
from perf import model
from perf.blackwell import ARCH, SEQLEN, _keeping, tell
from scripts import sass

PICKS = [(d, causal) for d in (64, 128) for causal in (False, True)]
PRODUCTS = 5  # of 2 * 128 * 128 * d FLOP a tile


def run_ours(head_dim: int, causal: bool, pair: bool) -> None:
    from cute_flash.arch.sm100.backend import BACKEND

    mask = CAUSAL if causal else FULL
    device = imagined(ARCHES[ARCH], "emulated")
    problem = Problem(BACKWARD, device, "bfloat16", head_dim, head_dim, 1, 1, mask, lse=True)
    plan = BACKEND.plan(problem)
    plan = plan if pair else replace(plan, variant="")
    kernel, rule = BACKEND.build(plan), BACKEND.scratch(plan)
    do, q, k, v, o, dq, dk, dv = (torch.randn(1, SEQLEN, 1, head_dim, dtype=torch.bfloat16) for _ in range(8))
    lse, memory = torch.zeros(1, 1, SEQLEN), torch.empty(rule.elements(1, 1, SEQLEN))
    call(kernel, do, q, k, v, o, lse, None, dq, dk, dv, head_dim**-0.5, memory)


def run_theirs(head_dim: int, causal: bool, pair: bool) -> None:
    from tests.emulator.foreign import fa4_backward

    _, kernel = fa4_backward(ARCH, head_dim, causal, pair)
    q, k, v, do, dk, dv = (torch.randn(1, SEQLEN, 1, head_dim, dtype=torch.bfloat16) for _ in range(6))
    lse, dpsum = torch.zeros(1, 1, SEQLEN), torch.zeros(1, 1, SEQLEN)
    kernel(q, k, v, do, lse, dpsum, torch.zeros(1, 1, SEQLEN * head_dim), dk, dv, head_dim**-0.5)


def _role(mix: Counter) -> str:
    """Which role a loop is, by an instruction that no other has."""
    if mix["MUFU.EX2"]:
        return "weigh"
    return "mma" if any(kind.startswith("UTCHMMA") for kind in mix) else ""


def _multiplies(code: list, pair: bool) -> bool:
    products = [i.opcode for i in code if "UTCHMMA" in i.opcode]
    return bool(products) and ("2CTA" in products[0]) == pair


def machine_code(cubin: bytes, tool: str, pair: bool) -> dict[str, Any]:
    """Of the kernel with matrix products; ours has both under one Plan."""
    functions = sass.functions(sass.disassemble(cubin, tool)).items()
    name, code = next((name, code) for name, code in functions if _multiplies(code, pair))
    counts, loops = sass.mix(code), {}
    for length, mix in sass.main_loops(code):
        loops.setdefault(_role(mix), []).append((length, mix))
    longest = {role: max(found, key=lambda pair: pair[0]) for role, found in loops.items() if role}
    weigh = longest.get("weigh", (0, Counter()))[1]
    return {
        "registers": sass.resources(cubin)[name]["registers"],
        "setmaxnreg": "/".join(str(int(i.operands.split()[-1], 16)) for i in code if i.opcode.startswith("USETMAXREG")),
        "spill_stores": counts["STL"],
        "spill_loads": counts["LDL"],
        "instructions": sum(counts.values()) - counts["NOP"],
        **{f"{role}_instructions": longest.get(role, ("",))[0] for role in ("weigh", "mma")},
        "weigh_mufu": weigh["MUFU.EX2"],
        "weigh_packed_fma": sum(weigh[kind] for kind in ("FFMA2", "FADD2", "FMUL2")),
        "weigh_shared_loads": weigh["LDS"],
    }


def counted(launch: dict, head_dim: int, causal: bool) -> dict[str, Any]:
    counters, edge = launch["counters"], SEQLEN // 128
    tiles = edge * (edge + 1) // 2 if causal else edge * edge
    total, bound = counters.total(), model.estimate(counters, model.GPUS["B200"], tiles)
    return {
        "shared_bytes_per_cta": launch["shared"],
        "instructions_per_score": round(sum(total.values()) / (tiles * 128 * 128 / model.WARP), 3),
        "tmem_bytes_per_tile": round(bound.tmem_bytes),
        "shared_bytes_per_tile": round(bound.cycles["shared memory"] * 128),
        "l2_bytes_per_tile": round(bound.l2_bytes),
        **{f"cycles_{name.replace(' ', '_')}": round(value) for name, value in bound.cycles.items()},
        "bound": bound.binding,
        "bound_tflops": round(bound.tflops * PRODUCTS * 2 * 128 * 128 * head_dim / bound.mma_flops),
    }


def rows() -> Iterator[dict]:
    tool = sass.disassembler()
    if tool is None:
        raise SystemExit("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    for d, causal in PICKS:
        for name, ctas in itertools.product(("cute_flash", "fa4"), (1, 2) if d == 128 else (1,)):
            torch.manual_seed(0)
            with emulate(ARCH, mode="eager", scheduler="round_robin", race=False) as emulation, _keeping() as kept:
                (run_ours if name == "cute_flash" else run_theirs)(d, causal, ctas == 2)
                launch = max(emulation.launches, key=lambda each: each["steps"])
                code = machine_code(kept[-1].artifacts.CUBIN, tool, ctas == 2)
            named = {"kernel": name, "d": d, "mask": "causal" if causal else "full", "ctas": ctas}
            yield {**named, **code, **counted(launch, d, causal)}


def main(argv: list[str] | None = None) -> int:
    return tell(rows(), "python -m perf.blackwell_backward", __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
