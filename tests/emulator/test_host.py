"""The ways into the emulator: compiled, loaded, plain CuTe-DSL without TVM-FFI, two architectures at once."""

import subprocess
import sys

import pytest
import torch

from cute_flash import emulator
from cute_flash.emulator import EmulatorError, emulate

from .test_faults import run_tile, tile


def operands():
    q, k = (torch.randn(128, 64).bfloat16() for _ in range(2))
    return q, k, torch.full((128, 128), float("nan"))


def test_importing_the_emulator_imports_no_cutlass():
    code = "import sys, cute_flash.emulator; assert not any(m.split('.')[0] == 'cutlass' for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exported_and_loaded_functions(tmp_path):
    tile("sm_90a").export_to_c(str(tmp_path / "k.o"), "entry")
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "k.so", tmp_path / "k.o"], check=True)
    with emulate("sm_90a"):
        import tvm_ffi
        from cutlass.cute.runtime import load_module

        for function in (
            load_module(str(tmp_path / "k.o"), enable_tvm_ffi=True),
            tvm_ffi.load_module(str(tmp_path / "k.so")),
        ):
            q, k, s = operands()
            emulator.call(function["entry"], q, k, s)
            assert (s - q.double() @ k.double().T).abs().max() < 1e-4


def test_run_in_a_context_of_its_own():
    q, k, s = operands()
    emulation = emulator.run(tile("sm_100a"), q, k, s, arch="sm_100a", seed=2)
    assert (s - q.double() @ k.double().T).abs().max() < 1e-4
    assert emulation.launches[0]["grid"] == (1, 1, 1) and emulation.counters.mma_flops == 2 * 128 * 128 * 64
    assert emulator.current() is None


def test_both_architectures_in_one_process_and_nested():
    with emulate("sm_90a") as outer:
        assert emulator.current() is outer
        for arch in ("sm_100a", "sm_90a"):
            s, expected = run_tile(arch)
            assert (s - expected).abs().max() < 1e-4
        assert emulator.current() is outer


def test_plain_cute_dsl_without_tvm_ffi():
    with emulate("sm_90a"):
        import cutlass.cute as cute
        from cutlass.cute.runtime import from_dlpack

        from .plain import scale_by_two

        values = torch.arange(100.0)
        expected = values * 2 + torch.arange(100) % 64
        scale_by_two(from_dlpack(values))
        assert torch.equal(values, expected)
        again = torch.arange(100.0)
        cute.compile(scale_by_two, from_dlpack(again))(from_dlpack(again))
        assert torch.equal(again, expected)


def test_calls_outside_say_so():
    with pytest.raises(EmulatorError, match="no emulation is on"):
        emulator.call(print)
    with pytest.raises(EmulatorError, match="nothing was launched"), emulate("sm_90a") as emulation:
        _ = emulation.counters


def test_an_error_in_a_launch_leaves_the_next_one_whole():
    with pytest.raises(EmulatorError):
        run_tile("sm_90a", lambda ptx: ptx.replace("setmaxnreg.dec", "frobnicate"))
    s, expected = run_tile("sm_90a")
    assert (s - expected).abs().max() < 1e-4
