"""Who runs a problem, who refuses it and why, on GPUs that are not here."""

import warnings

import pytest
import torch

import cute_flash
import cute_flash.arch as arch
from cute_flash import FallbackWarning, StrictFallbackError, UnsupportedError, attention, explain
from cute_flash.runtime import dispatch, toolchain
from cute_flash.spec import settings
from cute_flash.spec.device import imagined
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem

from ..fakes import FakeBackend, nothing

pytestmark = pytest.mark.usefixtures("office")

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
# Instructions decide: wgmma exists on 9.0 only, tcgen05 with tensor memory on 10.0 and 10.3 only.
MADE_FOR = {"sm90": ((9, 0),), "sm100": ((10, 0), (10, 3))}


def qkv(dtype=torch.bfloat16, head_dim=64, requires_grad=False, heads_kv=4):
    shapes = ((2, 9, 4, head_dim), (2, 9, heads_kv, head_dim), (2, 9, heads_kv, head_dim))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes)


def problem(capability=(9, 0), direction=FORWARD, dtype="bfloat16", **fields):
    device = imagined(capability, "simulated")
    return Problem(direction, device, dtype, 64, 64, heads_q=4, heads_kv=4, lse=direction == BACKWARD, **fields)


# --------------------------------------------------------------------------------------------------- capabilities


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_each_capability_gets_a_kernel_it_can_run(simulated, capability):
    simulated(capability)
    decision = explain(*qkv(requires_grad=True), causal=True)
    for each in (decision, decision.backward):
        assert each.backend.name in ("sm90", "sm100", "triton")
        if each.backend.name in MADE_FOR:
            assert capability in MADE_FOR[each.backend.name]
        for name, capabilities in MADE_FOR.items():
            if capability not in capabilities and name in each.refusals:  # who comes after the chosen one is not asked
                assert any(f"this GPU has {capability[0]}.{capability[1]}" in s for s in each.refusals[name])


def test_hopper_runs_its_own_forward(simulated):
    simulated((9, 0))
    decision = explain(*qkv())
    assert decision.backend.name == "sm90" and decision.plan.arch == "sm_90a" and not decision.fallback


@pytest.mark.parametrize("capability, target", [((10, 0), "sm_100a"), ((10, 3), "sm_103a")], ids=str)
def test_blackwell_runs_its_own_forward(simulated, capability, target):
    simulated(capability)
    decision = explain(*qkv())
    assert decision.backend.name == "sm100" and decision.plan.arch == target and not decision.fallback


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (11, 0), (12, 0), (12, 1)], ids=str)
def test_triton_is_no_fallback_where_nothing_better_is_made_for_the_gpu(simulated, capability):
    simulated(capability)
    decision = explain(*qkv(requires_grad=True))
    assert decision.backend.name == decision.backward.backend.name == "triton"
    assert not decision.fallback and not decision.backward.fallback


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)], ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_native_backend_that_refuses_is_a_fallback(capability, direction):
    decision = dispatch.choose(problem(capability, direction, dtype="float32"))
    assert decision.backend.name == "triton" and decision.fallback
    assert "falls back to triton" in decision.sentence


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)], ids=str)
def test_old_gpus_are_refused_by_number_and_told_what_runs(simulated, capability):
    simulated(capability)
    with pytest.raises(UnsupportedError, match=rf"{capability[0]}\.{capability[1]}.*below the minimum of 8\.0"):
        attention(*qkv())
    q, k, v = qkv()
    assert attention(q, k, v, backend="reference").shape == q.shape


def test_cpu_tensors_get_the_reference():
    decision = explain(*qkv(torch.float64))
    assert decision.backend.name == "reference" and not decision.fallback
    assert set(decision.refusals) == {"sm100", "sm90", "triton"}


def test_float64_on_a_gpu_falls_to_the_reference_with_every_reason():
    decision = dispatch.choose(problem((9, 0), dtype="float64"))
    assert decision.backend.name == "reference" and decision.fallback
    assert all(any("float64" in s for s in decision.refusals[name]) for name in ("sm90", "triton"))


# --------------------------------------------------------------------------------------------------------- forced


def test_a_named_backend_is_used():
    assert explain(*qkv(), backend="reference").refusals == {}


def test_a_named_backend_that_cannot_is_refused_with_its_sentence(simulated):
    simulated((8, 9))
    with pytest.raises(UnsupportedError, match=r"'sm90' was asked for[\s\S]*sm90: runs on compute capability 9\.0"):
        attention(*qkv(), backend="sm90")


def test_the_environment_names_one_too_and_the_argument_wins(simulated):
    simulated((8, 9))
    with settings.override(backend="sm90"):
        with pytest.raises(UnsupportedError, match="'sm90' was asked for"):
            explain(*qkv())
        assert explain(*qkv(), backend="triton").backend.name == "triton"


def test_an_unknown_backend_lists_the_known():
    with pytest.raises(ValueError, match=r"'cudnn' is not one of sm100, sm90, triton, reference"):
        attention(*qkv(), backend="cudnn")


def test_a_named_backend_without_the_backward_refuses_before_the_forward_runs(backends):
    forward_only = FakeBackend()
    forward_only.refuse = lambda p: ("no backward here",) if p.direction == BACKWARD else ()
    backends(forward_only, FakeBackend("reference"))
    with pytest.raises(UnsupportedError, match="no backward here"):
        attention(*qkv(requires_grad=True), backend="sm90")
    assert forward_only.built == []


# ------------------------------------------------------------------------------------------------------ fallbacks


def test_a_fallback_warns_once_with_its_reason(backends):
    backends(FakeBackend("sm90", refusals=("head_dim=64 is a bad number",)), FakeBackend("reference", is_native=False))
    q, k, v = qkv()
    with pytest.warns(FallbackWarning, match="sm90: head_dim=64 is a bad number") as caught:
        attention(q, k, v)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v)
        attention(q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1))


def test_no_warning_without_a_native_refusal(backends):
    backends(FakeBackend("sm90", is_native=False, refusals=("not my GPU",)), FakeBackend("triton"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*qkv())


def test_strict_makes_a_fallback_an_error(backends):
    backends(FakeBackend("sm90", refusals=("too odd",)), FakeBackend("triton"))
    with settings.override(strict=True), pytest.raises(StrictFallbackError, match=r"CUTE_FLASH_STRICT=1[\s\S]*too odd"):
        attention(*qkv())
    assert isinstance(StrictFallbackError(), UnsupportedError)


def test_strict_says_nothing_where_nothing_falls_back(backends):
    backends(FakeBackend("sm90", is_native=False, refusals=("not my GPU",)), FakeBackend("triton"))
    with settings.override(strict=True):
        attention(*qkv())


def test_when_all_refuse_every_sentence_is_listed(backends):
    backends(
        FakeBackend("sm90", refusals=("first reason", "second reason")), FakeBackend("reference", refusals=("third",))
    )
    with pytest.raises(UnsupportedError) as caught:
        attention(*qkv())
    text = str(caught.value)
    assert all(line in text for line in ("sm90: first reason", "sm90: second reason", "reference: third"))


# ------------------------------------------------------------------------------------- toolchains, builds, memory


def test_a_missing_toolchain_is_a_refusal_that_names_the_import(backends):
    missing = FakeBackend("sm90", toolchain=("no_such_compiler",))
    backends(missing, FakeBackend("triton", is_native=False))
    with pytest.warns(FallbackWarning, match=r"import no_such_compiler. fails: No module named 'no_such_compiler'"):
        attention(*qkv())
    assert missing.built == []
    with pytest.raises(UnsupportedError, match="no_such_compiler"):
        attention(*qkv(), backend="sm90")


def test_a_toolchain_that_breaks_on_import_falls_back_naming_the_cause(backends, tmp_path, monkeypatch):
    (tmp_path / "broken_compiler.py").write_text("raise ImportError('libmissing.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = FakeBackend("sm90", toolchain=("broken_compiler",))
    backends(broken, FakeBackend("triton", is_native=False))
    with pytest.warns(FallbackWarning, match="libmissing.so"):
        attention(*qkv())
    assert broken.built == []
    assert "libmissing.so" in str(explain(*qkv()))


def test_the_cute_backends_declare_the_compiler_and_miss_it_when_blocked(monkeypatch, simulated):
    simulated((9, 0))
    real = toolchain.missing
    monkeypatch.setattr(toolchain, "missing", lambda m: "No module named 'cutlass'" if m == "cutlass" else real(m))
    decision = explain(*qkv())
    assert decision.backend.name == "triton" and decision.fallback
    assert decision.refusals["sm90"] == ("`import cutlass` fails: No module named 'cutlass'",)


def test_a_failing_build_raises_and_never_falls_back(backends):
    failing = FakeBackend("sm90", error=RuntimeError("ptxas gave up"))
    second = FakeBackend("triton")
    backends(failing, second)
    for _ in range(2):
        with pytest.raises(
            cute_flash.BackendBuildError, match=r"sm90 failed to compile .*: RuntimeError: ptxas gave up"
        ):
            attention(*qkv())
    assert len(failing.built) == 2 and second.built == []


def test_out_of_memory_propagates_and_changes_nothing(backends):
    state = {"full": True}

    def kernel(*operands):
        if state["full"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        operands[3].fill_(1)

    first, second = backends(FakeBackend("sm90", kernel=kernel), FakeBackend("triton"))
    q, k, v = qkv()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            attention(q, k, v)
    state["full"] = False
    assert (attention(q, k, v) == 1).all()
    assert len(first.built) == 1 and second.built == []


def test_out_of_memory_while_building_is_not_a_build_error(backends):
    backends(FakeBackend("sm90", error=torch.OutOfMemoryError("CUDA out of memory")), FakeBackend("triton"))
    with pytest.raises(torch.OutOfMemoryError):
        attention(*qkv())


# ------------------------------------------------------------------------------------------------------------ log


def test_the_log_prints_each_new_decision_once(backends, capfd):
    backends(FakeBackend("sm90", is_native=False, refusals=("not my GPU",)), FakeBackend("triton", kernel=nothing))
    q, k, v = qkv()
    with settings.override(log=frozenset({"dispatch"})):
        attention(q, k, v)
        first = capfd.readouterr().err
        attention(q, k, v)
        attention(q[:1], k[:1], v[:1])
        assert capfd.readouterr().err == ""
        attention(q, k, v, causal=True)
        second = capfd.readouterr().err
    assert "cute_flash dispatch:   runs: triton forward" in first and "(compiled in " in first
    assert "cute_flash dispatch:   sm90: not my GPU" in first
    assert "causal" in second and "causal" not in first


def test_the_log_covers_the_backward(backends, capfd):
    backends(FakeBackend("sm90"))
    q, k, v = qkv(requires_grad=True)
    with settings.override(log=frozenset({"dispatch"})):
        attention(q, k, v).sum().backward()
    assert "runs: sm90 backward" in capfd.readouterr().err


def test_a_quiet_library_says_nothing(backends, capfd):
    backends(FakeBackend("sm90", is_native=False, refusals=("not my GPU",)), FakeBackend("triton"))
    attention(*qkv())
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_backend_names_follow_the_order_of_preference():
    assert dispatch.backend_names() == tuple(backend.name for backend in arch.BACKENDS) == settings.BACKEND_NAMES
