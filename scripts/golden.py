"""Saves small forward outputs of this GPU's own kernel, for tests that have no GPU.

    python -m scripts.golden --commit COMMIT [--out tests/golden/sm90_forward.npz]

Every output is compared with float64 before it is kept: nothing wrong is stored.
"""

import argparse
import datetime
import importlib.metadata
from pathlib import Path

import torch

import tests.conftest  # noqa: F401  makes cute_flash importable from a bare tree
from tests import golden, oracle
from tests.cases import Case, exact_inputs, golden_cases
from tests.runner import Runner

SIZE_MAX = 2_000_000  # bytes: the file lives in the repository


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe(backend: str, commit: str) -> dict[str, str]:
    packages = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")
    major, minor = torch.cuda.get_device_capability()
    return {
        "backend": backend,
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        **{name: version(name) for name in packages},
    }


def compute(run: Runner, case: Case) -> golden.Golden:
    inputs = exact_inputs(case)
    qkv = [x.to(run.device) for x in inputs.qkv]
    result = run(*qkv, causal=case.causal, return_lse=True)
    run.check(*qkv, result=result, causal=case.causal)
    out, lse = (x.cpu() for x in result)
    return golden.Golden(out, lse, golden.checksum(inputs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="sm90")
    parser.add_argument("--commit", default="unknown", help="of the tree that ran")
    parser.add_argument("--out", type=Path, default=golden.FILE)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    outputs = {case: compute(Runner(device, case.torch_dtype, arguments.backend), case) for case in golden_cases()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    golden.save(arguments.out, describe(arguments.backend, arguments.commit), outputs)
    worst = max(
        oracle.relative_error(value.out, oracle.forward(*exact_inputs(case).qkv, causal=case.causal).out)
        for case, value in outputs.items()
    )
    size = arguments.out.stat().st_size
    print(f"{len(outputs)} cases, {size} bytes, largest error against float64 {worst:.2e}: {arguments.out}")
    return 0 if size <= SIZE_MAX else 1


if __name__ == "__main__":
    raise SystemExit(main())
