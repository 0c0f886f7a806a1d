"""attention() through the emulator: CPU tensors, a GPU's kernels, the same dispatcher."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from cute_flash import UnsupportedError, emulate, explain
from cute_flash.runtime import compiler, emulation, toolchain
from cute_flash.spec import settings

from ..fakes import FakeBackend
from .test_compiler import PLAN

pytestmark = pytest.mark.usefixtures("office")

ROOT = Path(__file__).resolve().parents[2]


def qkv(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return tuple(torch.randn(1, 40, heads, 64, dtype=dtype) for heads in (2, 1, 1))


def run(program: str, cache: Path) -> str:
    """In a process of its own: one that has loaded a real kernel cannot emulate."""
    head = "import torch, cute_flash\nfrom tests.host.test_emulation import *\nq, k, v = qkv()\n"
    environment = {"CUTE_FLASH_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin", "HOME": str(cache)}
    command = [sys.executable, "-c", head + textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_cpu_tensors_are_dispatched_as_the_emulated_gpu_and_only_inside():
    q, k, v = qkv()
    with settings.override(emulate="sm_90a"):
        decision = explain(q, k, v)
        assert decision.backend.name == "sm90" and decision.problem.device.name == "emulated 9.0"
    assert explain(q, k, v).backend.name == "reference"
    with settings.override(emulate="sm_100a"):
        assert explain(q, k, v).problem.device.capability == (10, 0)


def test_only_cute_kernels_are_emulated_and_the_others_see_the_cpu():
    q, k, v = qkv(dtype=torch.float32)
    with settings.override(emulate="sm_90a"):
        decision = explain(q, k, v)
        assert decision.backend.name == "reference" and decision.fallback
        assert "the tensors are on cpu" in decision.refusals["triton"][0]
        with pytest.raises(UnsupportedError, match="the tensors are on cpu"):
            explain(q, k, v, backend="triton")


def test_the_hopper_kernel_gives_the_right_numbers_on_the_cpu(tmp_path):
    program = """
        from tests import oracle
        right = oracle.forward(q, k, v)
        with emulate("sm_90a") as emulation:
            out, lse = cute_flash.attention(q, k, v, return_lse=True)
            assert emulation.launches
            short = cute_flash.attention(q[:, :17], k[:, :23], v[:, :23], return_lse=True)[0]
            odd = torch.cat([q.flatten()[:1], q.flatten()])[1:].view_as(q)
            assert torch.equal(cute_flash.attention(odd, k, v, return_lse=True)[0], out)
        assert compiler.stats.compiles == 1
        assert not settings.current.cache_dir.exists()  # an emulated kernel is never kept for a GPU to find
        assert oracle.relative_error(out, right.out) < 4e-3 and oracle.lse_excess(lse, right.lse) <= 1
        assert oracle.relative_error(short, oracle.forward(q[:, :17], k[:, :23], v[:, :23]).out) < 4e-3
        assert cute_flash.explain(q, k, v).backend.name == "reference"
        with pytest.raises(RuntimeError, match="this process has emulated a GPU"):
            compiler.kernel_for(FakeBackend("sm90", exports=True), PLAN)
    """
    run(program, tmp_path / "cache")


def test_the_environment_variable_switches_the_whole_process(tmp_path):
    program = """
        from cute_flash.spec import settings
        import os
        os.environ["CUTE_FLASH_EMULATE"] = "sm_90a"
        settings.refresh()
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = cute_flash.attention(q, k, v)
        assert compiler.stats.compiles == 1
        out.sum().backward()
        assert all(t.grad.isfinite().all() for t in (q, k, v))
    """
    assert "falls back" not in run(program, tmp_path / "cache")


def test_contexts_and_the_variable_mix_in_any_order(tmp_path):
    program = """
        from cute_flash import emulator
        from cute_flash.spec import settings
        import os

        def backend():
            return cute_flash.explain(q, k, v).backend.name, cute_flash.attention(q, k, v).isfinite().all().item()

        first, second = emulate("sm_90a"), emulate("sm_100a")
        assert settings.current.emulate is None  # nothing is on before the block
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert backend() == ("sm100", True)
        second.__exit__(None, None, None)
        assert backend() == ("reference", True) and emulator.current() is None
        with emulate("sm_90a"):
            assert backend() == ("sm90", True)
        os.environ["CUTE_FLASH_EMULATE"] = "sm_90a"
        settings.refresh()
        assert backend() == ("sm90", True)  # a kernel that was compiled inside a block
        with emulate("sm_100a"):
            assert backend() == ("sm100", True)
        assert backend() == ("sm90", True)
        with emulator.emulate("sm_100a"), pytest.raises(RuntimeError, match="kernel for sm_90a .* is of sm_100a"):
            cute_flash.attention(q, k, v)
    """
    run(program, tmp_path / "cache")


@pytest.mark.parametrize("first", ["emulator", "FlashAttention-4"])
def test_the_library_that_was_opened_first_gives_the_symbols(first, tmp_path):
    """Importing FlashAttention-4 opens the real one: after it nothing may be emulated, before it all may."""
    pytest.importorskip("flash_attn.cute")
    program = f"""
        import contextlib
        from cute_flash import emulator
        if {first!r} == "FlashAttention-4":
            import flash_attn.cute
        with emulator.emulate("sm_90a"):
            pass
        import flash_attn.cute
        assert toolchain.runtime_is_loaded()
        refused = pytest.raises(RuntimeError, match="emulate in another process")
        with contextlib.nullcontext() if {first!r} == "emulator" else refused, emulate("sm_90a"):
            assert cute_flash.attention(q, k, v).isfinite().all()
    """
    run(program, tmp_path / "cache")


def test_a_process_with_real_kernels_does_not_emulate(monkeypatch):
    monkeypatch.setattr(toolchain, "runtime_is_loaded", lambda: True)
    with settings.override(emulate="sm_90a"), pytest.raises(RuntimeError, match="emulate in another process"):
        compiler.kernel_for(FakeBackend("sm90", exports=True), PLAN)


def test_the_real_runtime_library_is_noticed():
    toolchain.load_runtime_library()
    assert toolchain.runtime_is_loaded()


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="sm_80"), emulate("sm_80"):
        pass
    assert emulation.is_emulated(emulation.device_for(torch.device("cpu"))) is False


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        ("sys.platform = 'darwin'", "Linux only"),
        ("os.environ['PATH'] = ''", "needs gcc"),
        ("sys.modules['cutlass'] = None", "CuTe-DSL, which is not installed"),
    ],
    ids=["Linux", "gcc", "CuTe-DSL"],
)
def test_what_the_emulator_stands_on_is_named_where_it_is_missing(lack, words):
    program = f"""
import os, sys
import tests.conftest
import cute_flash
from cute_flash.emulator import Unavailable
{lack}
try:
    with cute_flash.emulate("sm_90a"):
        raise SystemExit("it runs")
except Unavailable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr
