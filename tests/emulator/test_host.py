"""The ways into the emulator: compiled, loaded, plain CuTe-DSL without TVM-FFI, two architectures at once."""

import contextlib
import functools
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import cute_flash
from cute_flash import emulator
from cute_flash.emulator import EmulatorError, emulate

from .. import oracle
from ..runner import TWICE_ROUNDED
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


def test_leaving_restores_the_outer_device():
    from cute_flash.emulator.host import RUNTIME

    with emulate("sm_90a") as outer:
        with emulate("sm_100a"):
            assert said_by_the_driver() == (10, 0, 148) and RUNTIME.sms == 148
        assert said_by_the_driver() == (9, 0, 132) and RUNTIME.sms == 132
        assert RUNTIME.options is outer.options


def said_by_the_driver() -> tuple:
    """Compute capability and SM count as host code asks the CUDA runtime for them."""
    import ctypes

    from cute_flash.emulator.host import RUNTIME

    value, found = ctypes.c_int(), []
    for attribute in (75, 76, 16):
        RUNTIME.library._cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0)
        found.append(value.value)
    return tuple(found)


def test_contexts_left_out_of_order():
    """The first one entered is left first: the second stays on until it is left, then nothing is."""
    from cutlass.cutlass_dsl import CuTeDSL

    from cute_flash.emulator.host import RUNTIME

    arch_of_the_compiler = CuTeDSL._get_dsl().envar.arch
    first, second = emulate("sm_90a", seed=1), emulate("sm_100a", seed=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert emulator.current() is second and RUNTIME.options.seed == 2 and said_by_the_driver() == (10, 0, 148)
    s, expected = run_tile("sm_100a")
    assert (s - expected).abs().max() < 1e-4
    assert emulator.current() is second
    second.__exit__(None, None, None)
    assert emulator.current() is None and RUNTIME.options.seed == 0
    assert CuTeDSL._get_dsl().envar.arch == arch_of_the_compiler
    with pytest.raises(EmulatorError, match="no emulation is on"):
        emulator.call(print)


def test_one_emulation_is_entered_once_at_a_time():
    with emulate("sm_90a") as emulation:
        with pytest.raises(EmulatorError, match="on already"), emulation:
            pass
        assert emulator.current() is emulation
    with emulation:
        assert emulator.current() is emulation
    assert emulator.current() is None


@pytest.mark.parametrize(
    "knobs, error, rule",
    [
        ({"mode": "soon"}, ValueError, "mode='soon' is not one of eager, late, random"),
        ({"scheduler": "fair"}, ValueError, "scheduler='fair' is not one of round_robin, random, priority"),
        ({"seed": -1}, ValueError, "seed=-1 is less than 0"),
        ({"seed": 1.5}, TypeError, "seed=1.5 is not an integer"),
        ({"seed": None}, TypeError, "seed=None is not an integer"),
        ({"resident": 0}, ValueError, "resident=0 is less than 1"),
        ({"resident": True}, TypeError, "resident=True is not an integer"),
        ({"max_steps": 0}, ValueError, "max_steps=0 is less than 1"),
        ({"race": 1}, TypeError, "race=1 is not True or False"),
        ({"strict_exit": "yes"}, TypeError, "strict_exit='yes' is not True or False"),
        ({"edit": "sed"}, TypeError, "edit='sed' is not a function"),
        ({"modes": "late"}, TypeError, "modes='late': no such knob; there are mode, scheduler, seed"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("front", [emulate, cute_flash.emulate], ids=["emulator", "cute_flash"])
def test_knobs_are_checked_at_the_call(front, knobs, error, rule):
    with pytest.raises(error, match=re.escape(rule)):
        front("sm_90a", **knobs)


@pytest.mark.parametrize("front", [emulate, cute_flash.emulate], ids=["emulator", "cute_flash"])
def test_the_architecture_is_checked_at_the_call(front):
    with pytest.raises(ValueError, match="arch='sm_80' is not one of sm_90a, sm_100a, sm_103a"):
        front("sm_80")


@pytest.mark.parametrize("kind", ["FakeTensor", "meta"])
@pytest.mark.parametrize("through", ["compiled", "emulator.call", "attention"])
def test_tensors_without_memory_are_refused(kind, through):
    shape = (1, 40, 2, 64) if through == "attention" else (128, 64)
    with FakeTensorMode() if kind == "FakeTensor" else contextlib.nullcontext():
        q = torch.empty(shape, dtype=torch.bfloat16, device="meta" if kind == "meta" else "cpu")
    refused = pytest.raises((ValueError, cute_flash.UnsupportedError), match=kind)
    if through == "attention" and kind == "FakeTensor":  # planned by the operator, and nothing runs
        with cute_flash.emulate("sm_90a") as emulation:
            out = cute_flash.attention(q, q, q, backend="sm90")
        assert isinstance(out, FakeTensor) and out.shape == q.shape
    elif through == "attention":
        with cute_flash.emulate("sm_90a") as emulation, refused:
            cute_flash.attention(q, q, q, backend="sm90")
    else:
        compiled = tile("sm_90a")
        call = compiled if through == "compiled" else functools.partial(emulator.call, compiled)
        with emulate("sm_90a") as emulation, refused:
            call(q, q, torch.empty(128, 128))
    assert not emulation.launches


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


def test_threads_that_call_at_once_take_turns():
    """What a launch may touch are the tensors of its own call, and an error is that call's."""
    errors = [float("nan")] * 3

    def work(i):
        q, k, v = (torch.randn(1, rows, 2, 64).bfloat16() for rows in (70 + i, 200, 200))
        out = cute_flash.attention(q, k, v, causal=i == 1, backend="sm90")
        errors[i] = oracle.relative_error(out, oracle.forward(q, k, v, causal=i == 1).out)

    with cute_flash.emulate("sm_90a"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(error < TWICE_ROUNDED for error in errors)
