"""CUTE_FLASH_EMULATE in a fresh process, as a user sets it."""

import json
import os
import subprocess
import sys

import pytest

from ..runner import TWICE_ROUNDED

PROGRAM = """
import json, warnings, torch, tests.conftest
import cute_flash
from tests import oracle
torch.manual_seed(0)
q, k, v = (torch.randn(1, 70, heads, 64).bfloat16() for heads in (2, 1, 1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", cute_flash.FallbackWarning)
    out, lse = cute_flash.attention(q, k, v, causal=True, return_lse=True)
exact = oracle.forward(q, k, v, causal=True)
print(json.dumps({
    "backend": cute_flash.explain(q, k, v, causal=True).backend.name,
    "warnings": [str(w.message) for w in caught if w.category is cute_flash.FallbackWarning],
    "error": oracle.relative_error(out, exact.out),
    "lse": oracle.lse_excess(lse, exact.lse),
}))
"""


def fresh(arch: str) -> dict:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_FLASH_")}
    environ |= {"CUTE_FLASH_EMULATE": arch, "CUTE_FLASH_CACHE_DIR": "off"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("arch", "backend"), [("sm_90a", "sm90"), ("sm_100a", "sm100"), ("sm_103a", "sm100")])
def test_the_architecture_named_is_the_one_that_runs(arch, backend):
    said = fresh(arch)
    assert said["backend"] == backend and not said["warnings"]
    assert said["error"] < TWICE_ROUNDED and said["lse"] <= 1


def test_an_unknown_architecture_is_refused_by_name():
    environ = {**os.environ, "CUTE_FLASH_EMULATE": "sm_80"}
    done = subprocess.run([sys.executable, "-c", "import tests.conftest, cute_flash"], env=environ, capture_output=True)
    assert done.returncode != 0
    assert b"CUTE_FLASH_EMULATE='sm_80' is not one of sm_90a, sm_100a, sm_103a" in done.stderr
