"""python -m cute_flash: what each command prints and returns."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import cute_flash.arch as arch
from cute_flash import cli
from cute_flash.runtime import compiler, request
from cute_flash.spec import device as device_facts
from cute_flash.spec import settings
from cute_flash.spec.problem import BACKWARD, FORWARD

from ..fakes import FakeBackend, HostDslBackend

pytestmark = pytest.mark.usefixtures("office")


def test_doctor_tells_versions_cache_and_who_serves(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "linker", "DSL runtime", "device"):
        assert f"\n{word}" in said
    assert str(settings.current.cache_dir) in said and "(not made yet)" in said
    assert "runs: reference forward" in said and "runs: reference backward" in said
    assert "sm90: runs on compute capability 9.0" in said


def test_doctor_survives_a_machine_where_nothing_serves(backends, capsys):
    backends(FakeBackend("sm90", refusals=("no luck today",)))
    assert cli.main(["doctor"]) == 0
    assert "sm90: no luck today" in capsys.readouterr().out


def test_explain_describes_an_imagined_gpu(capsys):
    assert (
        cli.main(["explain", "--capability", "9.0", "--head-dim", "192,128", "--causal", "--direction", "forward"]) == 0
    )
    said = capsys.readouterr().out
    assert "head_dim=(192,128)" in said and "runs: sm90 forward" in said and "backward" not in said


def test_explain_takes_a_window_and_a_softcap(capsys):
    assert cli.main(["explain", "--window", "1023,0", "--softcap", "30", "--direction", "forward"]) == 0
    assert "window(left,0) softcap" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["explain", "--window=-1,0"])
    assert "None (not -1) means unbounded" in capsys.readouterr().err


def test_explain_names_the_plan_of_short_sequences_where_there_is_one(capsys):
    command = ["explain", "--capability", "9.0", "--direction", "forward", "--head-dim"]
    assert cli.main([*command, "64"]) == 0
    ordinary, short = (line for line in capsys.readouterr().out.splitlines() if "sm90 forward sm_90a" in line)
    assert short.startswith("  up to 1024 keys: sm90 forward ") and short.split(": ")[1] != ordinary.split(": ")[1]
    assert cli.main([*command, "128"]) == 0
    assert "up to 1024 keys" not in capsys.readouterr().out


def test_explain_fails_aloud(capsys):
    assert cli.main(["explain", "--capability", "8.0", "--backend", "sm90"]) == 1
    assert "'sm90' was asked for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["explain", "--capability", "75"],
            "argument --capability: '75' is not a compute capability MAJOR.MINOR (9.0)",
        ),
        (["explain", "--capability", "9.x"], "'9.x' is not a compute capability"),
        (["explain", "--head-dim", "64,32,16"], "argument --head-dim: '64,32,16' is neither a number (64) nor a pair"),
        (["warmup", "--head-dim", "64", "wide"], "'wide' is neither a number (64) nor a pair"),
        (["explain", "--head-dim", "64,"], "'64,' is neither a number"),
        (["warmup", "--jobs", "0"], "argument --jobs: '0' is not a whole number of at least 1"),
        (["warmup", "--sms", "13.2"], "argument --sms: '13.2' is not a whole number of at least 1"),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_a_malformed_value_is_refused_with_the_rule(words, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    said = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and sentence in said and "invalid _" not in said


def test_a_gpu_too_old_for_all_is_refused_once(simulated, capsys):
    sentence = "compute capability 7.5 (simulated 7.5) is below the minimum of 8.0"
    assert cli.main(["explain", "--capability", "7.5"]) == 1
    assert capsys.readouterr().out.count(sentence) == 1
    simulated((7, 5))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.count(sentence) == 1


def test_warmup_fills_the_cache_that_the_call_then_finds(backends, capsys):
    (backend,) = backends(HostDslBackend())
    command = ["warmup", "--head-dim", "128", "--direction", "forward", "--lse", "no", "--causal", "no"]
    assert cli.main(command) == 0
    assert "compiled in" in capsys.readouterr().out
    compiler.forget()
    assert cli.main(command) == 0
    assert "from disk in" in capsys.readouterr().out and len(backend.built) == 1


def test_warmup_compiles_side_by_side(backends, capsys):
    backends(HostDslBackend())
    assert cli.main(["warmup", "--head-dim", "64", "--direction", "forward", "--causal", "no", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.count("compiled in") == 2
    assert len(list(settings.current.cache_dir.glob("*.so"))) == 2


def test_warmup_covers_the_grid_it_is_given(backends):
    backends(FakeBackend("sm90", exports=True))
    arguments = cli.parser().parse_args(
        ["warmup", "--head-dim", "64", "192,128", "--dtype", "bfloat16", "float16", "--direction", "both"]
    )
    plans, skipped = cli._variants(arguments)
    forward = [plan for plan in plans if plan.direction == "forward"]
    assert len(forward) == 2 * 2 * 2 * 2 and len(plans) == len(forward) + 2 * 2 * 2 and skipped == []


def test_warmup_compiles_what_few_query_rows_run_too():
    command = ["warmup", "--head-dim", "128", "--direction", "forward", "--lse", "no", "--causal", "no"]

    def variants(*more):
        plans, _ = cli._variants(cli.parser().parse_args([*command, *more]))
        return [plan.variant for plan in plans]

    assert variants() == ["", "split"] and variants("--split", "no") == [""] and variants("--split", "yes") == ["split"]


def test_warmup_counts_the_multiprocessors_of_the_gpu_it_compiles_for(simulated):
    """The count is in the plan: a kernel of another count is never found."""

    def counts(*more):
        plans, _ = cli._variants(cli.parser().parse_args(["warmup", *more]))
        return {plan.ctas for plan in plans if plan.direction == "forward"}  # a backward is not persistent

    assert counts() == {132} and counts("--sms", "114") == {114}
    here = simulated((9, 0), sm_count=78)
    assert counts() == {here.sm_count} == {78} and counts("--sms", "114") == {114}


@pytest.mark.parametrize("backend", arch.BACKENDS, ids=lambda backend: backend.name)
def test_no_plan_depends_on_head_counts(backend):
    """Why the commands have no option for them."""
    device = device_facts.imagined({"sm90": (9, 0), "sm100": (10, 0)}.get(backend.name, (8, 0)), "simulated")
    for dims, direction in itertools.product(((64, 64), (128, 128), (192, 128), (256, 256)), (FORWARD, BACKWARD)):
        problem = cli._problem(device, "bfloat16", dims, direction, request.Options(causal=True))
        if not backend.refuse(problem):
            heads = [replace(problem, heads_q=q, heads_kv=kv) for q, kv in ((1, 1), (64, 8), (7, 1), (128, 128))]
            assert {backend.plan(each) for each in heads} == {backend.plan(problem)}


def test_warmup_says_what_it_skips(backends, capsys):
    backends(FakeBackend("sm90", is_native=False, refusals=("no",)), FakeBackend("triton"))
    assert cli.main(["warmup", "--head-dim", "64", "--direction", "forward"]) == 0
    assert "skipped: forward" in capsys.readouterr().out


def test_warmup_reports_a_kernel_that_does_not_compile(backends, capsys):
    backends(FakeBackend("sm90", exports=True, error=RuntimeError("too many registers")))
    assert cli.main(["warmup", "--head-dim", "64", "--direction", "forward"]) == 1
    assert "too many registers" in capsys.readouterr().out


def test_warmup_without_a_cache_has_nowhere_to_put_things(capsys):
    with settings.override(cache_dir=None):
        assert cli.main(["warmup"]) == 2
    assert "turns the disk cache off" in capsys.readouterr().err


def test_cache_lists_and_clears(capsys):
    folder = settings.current.cache_dir
    folder.mkdir()
    (folder / "abc.so").write_bytes(b"cut short")
    assert cli.main(["cache"]) == 0
    said = capsys.readouterr().out
    assert "1 kernels" in said and "1 damaged" in said and "abc.so" in said
    assert cli.main(["cache", "clear"]) == 0
    assert "removed 1 kernels" in capsys.readouterr().out and not list(folder.glob("*.so"))


def test_the_module_runs():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "cute_flash", "explain", "--capability", "12.0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0 and "runs: triton forward 12.0" in done.stdout, done.stderr
