"""What a Plan compiles to: `python -m scripts.dump --backend sm90 --points d=128,mask=causal`. No GPU is needed.

Prints registers, stack, spills, setmaxnreg and the instruction mix of the main loops; --out keeps PTX, cubin and SASS,
--csv a row for each main loop.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cute_flash import arch
from cute_flash.spec.device import Device
from cute_flash.spec.mask import Mask
from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import BACKWARD, FORWARD, SHORT_KEYS, Problem
from perf import machine, points
from scripts import sass

SM_COUNTS = {(8, 0): 108, (9, 0): 132, (10, 0): 148, (10, 3): 148}
KEEP = "--keep-ptx --keep-cubin --dump-dir {folder}"  # the compiler keeps files too: they go where they are dropped


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.dump", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", default="sm90", choices=[backend.name for backend in arch.BACKENDS])
    add("--points", default="d=128,mask=causal", help="as perf/bench.py (of S, whether there are few keys); + joins")
    add("--capability", default="", help="such as 9.0; default the backend's own, 9.0 for triton")
    add("--tile", default="", help="tile_m,tile_n,stages,warps in place of the backend's choice")
    add("--lse", action="store_true", help="the forward that writes LSE")
    add("--short", action="store_true", help="the plan for sequences of at most SHORT_KEYS keys")
    add("--split", action="store_true", help="the plan that shares a query tile among CTAs")
    add("--csv", type=Path, default=None, help="a row for each main loop, in place of the file's of the same plans")
    add("--out", type=Path, default=None, help="folder for NAME.ptx, NAME.cubin and NAME.sass")
    add("--import", dest="first", default="", help="import this module before compiling: must not change the PTX")
    return parser.parse_args(argv)


def plan_of(args: argparse.Namespace, point: points.Point) -> tuple[Any, Plan]:
    """(backend, Plan) of a point on a simulated GPU."""
    backend = next(b for b in arch.BACKENDS if b.name == args.backend)
    text = args.capability or {"sm100": "10.0"}.get(args.backend, "9.0")
    major, minor = (int(part) for part in text.split("."))
    problem = Problem(
        direction=BACKWARD if point.direction == "bwd" else FORWARD,
        device=Device("cuda", 0, "simulated", (major, minor), SM_COUNTS.get((major, minor), 100)),
        dtype=points.DTYPES[point.dtype],
        head_dim=point.head_dim,
        head_dim_v=point.head_dim_v,
        heads_q=point.heads_q,
        heads_kv=point.heads_kv,
        mask=Mask(left=point.left is not None, right=point.causal, causal=point.causal),
        lse=args.lse or point.direction == "bwd",
        short=args.short or point.seqlen_k <= SHORT_KEYS,
    )
    problem = replace(problem, small=point.direction == "fwd" and point.rows <= problem.small_rows)
    if refusals := backend.refuse(problem):
        raise SystemExit(f"{args.backend} refuses {problem}: {'; '.join(refusals)}")
    plan = backend.plan(problem)
    if args.split:
        plan = backend.split(plan) if hasattr(backend, "split") else None
        if plan is None:
            raise SystemExit(f"{args.backend} shares no query tile among CTAs")
    if args.tile:
        plan = replace(plan, tile=Tile(*(int(part) for part in args.tile.split(","))))
    return backend, plan


def compiled(backend: Any, plan: Plan) -> Iterator[tuple[str, str, bytes]]:
    """(name, PTX, cubin) of each kernel that the Plan builds."""
    if backend.name == "triton":
        module = importlib.import_module(f"cute_flash.arch.triton.{plan.direction}")
        for kernel in module.compile_ahead(plan):
            yield kernel.metadata.name, kernel.asm["ptx"], kernel.asm["cubin"]
        return
    if not backend.exports:
        raise SystemExit(f"{backend.name} compiles nothing")
    with tempfile.TemporaryDirectory() as folder:
        artifacts = backend.build(plan, KEEP.format(folder=folder)).artifacts
    yield plan.direction, artifacts.PTX, artifacts.CUBIN


def report(cubin: bytes, tool: str | None) -> tuple[list[str], str]:
    """(lines about a cubin, its SASS)."""
    found = sass.resources(cubin)
    if tool is None:
        lines = [f"  {name[:60]}: {values}" for name, values in found.items()]
        return [*lines, "  no nvdisasm here: pip install nvidia-cuda-nvdisasm for spills and loops"], ""
    text, lines = sass.disassemble(cubin, tool), []
    for name, code in sass.functions(text).items():
        counts, limits = sass.mix(code), [i.operands.split()[-1] for i in code if i.opcode.startswith("USETMAXREG")]
        facts = found.get(name, {})
        lines.append(f"  {name[:100]}")
        lines.append(
            f"    registers {facts.get('registers')} (setmaxnreg {', '.join(limits) or 'none'}), "
            f"stack {facts.get('stack')}, spills: {counts['STL']} stores {counts['LDL']} loads; "
            f"{sum(counts.values()) - counts['NOP']} instructions"
        )
        for size, body in sass.main_loops(code):
            lines.append(f"    loop of {size}: " + ", ".join(f"{kind} {count}" for kind, count in body.most_common()))
    return lines, text


MIX = ("MUFU.EX2", "FFMA", "FMUL", "FADD", "FMNMX", "F2FP", "FSEL", "SHFL", "SYNCS", "BAR", "uniform")
COLUMNS = ("date", "commit", "plan", "kernel", "registers", "setmaxnreg", "spill_stores", "spill_loads", "instructions",
           "loop", "matrix", *MIX, "others", "MUFU.EX2 before the last wait")  # fmt: skip


def rows(plan: Plan, name: str, cubin: bytes, text: str) -> Iterator[tuple]:
    """COLUMNS from `plan` on, one row a main loop: how many instructions, of which kinds."""
    found = sass.resources(cubin)
    for function, code in sass.functions(text).items():
        counts = sass.mix(code)
        limits = [str(int(i.operands.split()[-1], 0)) for i in code if i.opcode.startswith("USETMAXREG")]
        facts = (found.get(function, {}).get("registers"), " ".join(limits), counts["STL"], counts["LDL"])
        for body in sass.main_bodies(code):
            kinds = sass.mix(body)
            matrix = sum(count for kind, count in kinds.items() if sass.MATRIX.match(kind))
            shown = [kinds[kind] for kind in MIX]
            others = len(body) - matrix - sum(shown)
            size = sum(counts.values()) - counts["NOP"]
            yield str(plan), name, *facts, size, len(body), matrix, *shown, others, sass.ahead_of_wait(body)


def keep(folder: Path, name: str, ptx: str, cubin: bytes, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.ptx").write_text(ptx)
    (folder / f"{name}.cubin").write_bytes(cubin)
    if text:
        (folder / f"{name}.sass").write_text(text)


def write(path: Path, table: Sequence[tuple]) -> None:
    """Put rows of COLUMNS into a CSV; rows of other plans stay, above them."""
    kept: list[list[str]] = []
    if path.exists():
        with path.open(newline="") as file:
            head, *kept = csv.reader(file)
        if tuple(head) != COLUMNS:
            raise SystemExit(f"{path} has columns {head}, not {list(COLUMNS)}")
    at = COLUMNS.index("plan")
    fresh = {row[at] for row in table}
    with path.open("w", newline="") as file:
        rows = [row for row in kept if row[at] not in fresh]
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows, *table])


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.first:
        importlib.import_module(args.first)
    tool, seen, table = sass.disassembler(), set(), []
    tree = machine.now()[:10], machine.commit_here()
    for point in (p for text in args.points.split("+") for p in points.parse(text.strip())):
        backend, plan = plan_of(args, point)
        if plan in seen:
            continue
        seen.add(plan)
        start = time.perf_counter()
        for name, ptx, cubin in compiled(backend, plan):
            digest = hashlib.sha256(ptx.encode()).hexdigest()[:16]
            print(f"{plan}: {name} in {time.perf_counter() - start:.2f} s, PTX sha256 {digest}")
            lines, text = report(cubin, tool)
            print("\n".join(lines), flush=True)
            table += rows(plan, name, cubin, text) if text else ()
            if args.out is not None:
                dims = f"{plan.head_dim}_{plan.head_dim_v}_{plan.mask}_{plan.dtype}"
                keep(args.out, f"{plan.backend}_{name}_{dims}", ptx, cubin, text)
            start = time.perf_counter()
    if args.csv is not None:
        write(args.csv, [(*tree, *row) for row in table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
