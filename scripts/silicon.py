"""Correctness on a data-centre Blackwell GPU, then times against FlashAttention-4 and cuDNN: `scripts/silicon`.

Leaves a folder with a results CSV of the forward and one of the backward (perf/bench.py's columns: GPU, clock,
versions, commit, every contestant), and the log of the correctness tests beside them. Nobody here has such a GPU:
please send all three in.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = ((10, 0), (10, 3))
NEEDED = {
    "cutlass": "nvidia-cutlass-dsl, which compiles the kernels",
    "tvm_ffi": "apache-tvm-ffi, which loads them",
    "flash_attn.cute": "flash-attn-4, which they are measured against",
    "pytest": "pytest, which runs the correctness tests",
}
TESTS = (
    "tests/device/test_forward.py",
    "tests/device/test_backward.py",
    "tests/device/test_cases.py",
    "tests/device/test_memory.py",
)
HANG_SECONDS = 900  # of one test; the slowest compile a kernel and compute gigabytes of float64 beside it
CONTESTANTS = "ours,fa4,cudnn"
POINTS = {"forward": ("blackwell-forward", "foundation"), "backward": ("blackwell-backward", "foundation-backward")}


def missing_gpu(torch: Any) -> str:
    """What is wrong with the GPU here, "" where it will do."""
    wanted = "a data-centre Blackwell GPU (compute capability 10.0 or 10.3)"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        finds = f"torch finds no GPU (is the driver new enough for CUDA {built}?)"
        why = finds if built else f"torch {torch.__version__} is built without CUDA"
        return f"needs {wanted}, but {why}"
    capability = torch.cuda.get_device_capability()
    if capability not in CAPABILITIES:
        return f"needs {wanted}, but {torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
    return ""


def missing_packages() -> list[str]:
    """A sentence for every package that does not import."""
    found = []
    for module, what in NEEDED.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken install is as good as none
            found.append(f"needs {what}: import {module}: {type(error).__name__}: {error}")
    return found


def missing() -> list[str]:
    """Everything that this machine lacks, a sentence each."""
    try:
        import torch
    except ImportError as error:
        return [f"needs torch with CUDA: {error}"]
    gpu = missing_gpu(torch)
    return [*([gpu] if gpu else []), *missing_packages()]


def correctness(log: Path) -> bool:
    """The device tests of both directions; their report goes to `log` and to the screen.

    A kernel that hangs ends them: the thread that counts the seconds says where, and no signal would reach a process
    that waits for a GPU."""
    limit = ["--timeout", str(HANG_SECONDS), "--timeout-method", "thread"]
    command = [sys.executable, "-m", "pytest", *TESTS, "-n", "0", "-ra", *limit]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, **pipes) as tests:
        for line in tests.stdout or ():
            file.write(line)
            print(line, end="", flush=True)
    return tests.returncode == 0


def measure(csv: Path, direction: str, quick: bool, dry: bool) -> int:
    words = ["--points", POINTS[direction][quick], "--contestants", CONTESTANTS, "--out", str(csv)]
    words += ["--dry"] if dry else []
    return subprocess.run([sys.executable, "-m", "perf.bench", *words], cwd=ROOT).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/silicon", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a dozen shapes in place of the whole table")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results; default silicon-GPU-DATE")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU: tries the script, measures nothing")
    args = parser.parse_args(argv)
    if lacks := [] if args.dry else missing():
        for sentence in lacks:
            print(f"scripts/silicon {sentence}", file=sys.stderr)
        return 2
    import torch

    gpu = "dry" if args.dry else re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    folder = (args.out or Path(f"silicon-{gpu}-{today}")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tables, log = {direction: folder / f"{direction}.csv" for direction in POINTS}, folder / "correctness.log"
    if not args.dry and not correctness(log):
        print(f"\nwrong results, or no kernel: no times are taken. Please send {log}", file=sys.stderr)
        return 1
    outcome = max(measure(csv, direction, args.quick, args.dry) for direction, csv in tables.items())
    if args.dry:
        print(f"\n--dry: correctness tests left out, nothing measured; the tables are in {folder}")
        return outcome
    whole = "" if outcome == 0 else " (not finished: run scripts/silicon again, it goes on where it stopped)"
    print(f"\nplease send {', '.join(map(str, tables.values()))} and {log}{whole}")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
