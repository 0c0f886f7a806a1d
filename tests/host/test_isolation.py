"""Importing another attention library changes nothing of ours: some patch the compiler process-wide."""

import importlib.util
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import tests.conftest
from cute_flash.arch.sm90.backend import BACKEND
from cute_flash.spec.device import Device
from cute_flash.spec.mask import CAUSAL
from cute_flash.spec.problem import FORWARD, Problem

device = Device("cuda", 0, "simulated", (9, 0), 132)
plan = BACKEND.plan(Problem(FORWARD, device, "bfloat16", 64, 64, 4, 4, CAUSAL, lse=True))
before = BACKEND.build(plan, "--keep-ptx").artifacts.PTX
import flash_attn.cute
after = BACKEND.build(plan, "--keep-ptx").artifacts.PTX
assert "wgmma" in before
assert before == after, "the PTX of our kernel changed when flash_attn.cute was imported"
print("same", len(before))
"""


def missing() -> list[str]:
    return [name for name in ("cutlass", "tvm_ffi", "flash_attn") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")
def test_ptx_is_the_same_beside_flash_attention_4(tmp_path):
    """In a process of its own, because such an import cannot be undone; in a folder of its own, for what it keeps."""
    command = [sys.executable, "-c", PROGRAM, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("same")
