"""python -m cute_flash: what each command prints and returns."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_flash.arch as arch
from cute_flash import bench, cli, explain, words
from cute_flash.runtime import request
from cute_flash.spec import device as device_facts
from cute_flash.spec import settings
from cute_flash.spec.problem import BACKWARD, FORWARD

from ..fakes import FakeBackend, HostDslBackend
from ..oracle import visible_keys

pytestmark = pytest.mark.usefixtures("office")
ROOT = Path(__file__).resolve().parents[2]


def test_doctor_tells_versions_cache_and_who_serves(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "linker", "DSL runtime", "device"):
        assert f"\n{word}" in said
    assert str(settings.current.cache_dir) in said and "(not made yet)" in said
    assert "runs: reference forward" in said and "runs: reference backward" in said
    assert said.count("stages=1 packed") == 2 and "stages=1 cache" in said
    assert "sm90: runs on compute capability 9.0" in said


def test_doctor_names_the_settings_that_were_changed(capsys):
    assert cli.main(["doctor"]) == 0
    assert f"{'settings':20} as they come\n" in capsys.readouterr().out
    with settings.override(log=frozenset({"dispatch", "compile"}), strict=True):
        assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"{'settings':20} CUTE_FLASH_LOG=compile,dispatch CUTE_FLASH_STRICT=1\n" in said and "None" not in said


def test_a_reader_that_has_read_enough_is_no_error():
    command = f"{sys.executable} -m cute_flash explain --arch 9.0 --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 141 and done.stderr == ""


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


def test_explain_takes_deterministic_gradients_and_those_through_lse(capsys):
    """Of a kind of calls, and of one as cute_flash.explain says it."""
    command = ["explain", "--arch", "10.0", "--direction"]
    for words_of, plan in (((), "stages=2\n"), (("--deterministic", "--return-lse"), "stages=2 dlse deterministic\n")):
        assert cli.main([*command, "backward", "--head-dim", "64", *words_of]) == 0
        assert plan in capsys.readouterr().out
    assert cli.main([*command, "forward", "--return-lse"]) == 0
    assert " lse" in capsys.readouterr().out
    assert cli.main([*command, "both", "2,64,4,64", "--deterministic", "--return-lse"]) == 0
    q = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    expected = explain(q, q, q, arch="10.0", deterministic=True, return_lse=True)
    assert capsys.readouterr().out == f"{expected}\n" and expected.backward.plan.deterministic
    with pytest.raises(SystemExit, match="--form cache has no backward: --deterministic says nothing there"):
        cli.main(["explain", "--form", "cache", "--deterministic"])


def test_explain_takes_packed_sequences_and_caches(capsys):
    command = ["explain", "--arch", "9.0", "--causal", "--form"]
    assert cli.main([*command, "packed"]) == 0
    said = capsys.readouterr().out
    assert "runs: sm90 forward" in said and "runs: sm90 backward" in said
    assert cli.main([*command, "packed", "--head-dim", "256"]) == 0
    said = capsys.readouterr().out
    assert "runs: sm90 forward" in said and "runs: triton backward" in said
    assert said.count("sm90: the backward of packed sequences is built up to head dim 128, and for") == 1
    assert cli.main([*command, "cache"]) == 0
    said = capsys.readouterr().out
    assert "runs: sm90 forward" in said and "backward" not in said
    for wrong in (["cache", "--direction", "backward"], ["packed", "1,40,4,16"]):
        with pytest.raises(SystemExit, match="--form"):
            cli.main([*command, *wrong])


def test_explain_names_the_plan_of_short_sequences_where_there_is_one(capsys):
    command = ["explain", "--capability", "9.0", "--direction", "forward", "--head-dim"]
    assert cli.main([*command, "64"]) == 0
    ordinary, short, _ = (line for line in capsys.readouterr().out.splitlines() if "sm90 forward sm_90a" in line)
    assert short.startswith("  up to 1024 keys: sm90 forward ") and short.split(": ")[1] != ordinary.split(": ")[1]
    assert cli.main([*command, "128"]) == 0
    assert "up to 1024 keys" not in capsys.readouterr().out
    assert cli.main(["explain", "--capability", "9.0", "--direction", "backward", "--head-dim", "192", "--causal"]) == 0
    ordinary, short = (line for line in capsys.readouterr().out.splitlines() if "sm90 backward sm_90a" in line)
    assert (
        short.startswith("  up to 1024 keys: sm90 backward ") and short.endswith("apart") and ordinary.endswith("wide")
    )


def test_explain_names_the_plan_of_few_query_rows_where_there_is_one(capsys):
    command = ["explain", "--capability", "9.0", "--head-dim", "128"]
    assert cli.main([*command, "--direction", "forward", "--causal"]) == 0
    *_, small = (line for line in capsys.readouterr().out.splitlines() if "sm90 forward sm_90a" in line)
    assert (
        small.startswith("  up to 16384 query rows of all heads and sequences: sm90 forward ") and "tile 64x" in small
    )
    assert cli.main(command) == 0
    assert "  up to 8192 query rows of all heads and sequences: sm90 forward " in capsys.readouterr().out
    assert cli.main([*command[:-1], "256"]) == 0
    assert "query rows" not in capsys.readouterr().out


def test_explain_takes_shapes(capsys):
    """As cute_flash.explain of meta tensors says it, one call's own lengths and heads included."""
    shapes = ["2,1,32,128", "2,8192,8,128"]
    assert cli.main(["explain", *shapes, "--arch", "9.0", "--direction", "forward"]) == 0
    said = capsys.readouterr().out
    q, k = (torch.empty(2, *rest, dtype=torch.bfloat16, device="meta") for rest in ((1, 32, 128), (8192, 8, 128)))
    assert said == f"{explain(q, k, k, arch='9.0')}\n" == f"{explain(q, k, k, arch='sm_90a')}\n"
    assert "heads=32/8" in said and "CTAs share the keys" in said and "backward" not in said
    assert cli.main(["explain", *shapes, "2,8192,8,64", "--arch", "9.0", "--direction", "backward"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("backward bfloat16 head_dim=(128,64)") and "forward" not in said
    with pytest.raises(SystemExit, match="4 shapes are given"):
        cli.main(["explain", *shapes, *shapes])


def test_explain_of_shapes_refuses_what_attention_refuses(capsys):
    assert cli.main(["explain", "2,9,3,64", "2,9,2,64"]) == 1
    assert "heads_q=3 and heads_kv=2" in capsys.readouterr().out
    assert cli.main(["explain", "2,9,3,7"]) == 1
    assert "head_dim=7 is not supported" in capsys.readouterr().out


def test_meta_tensors_are_explained_for_this_machine(simulated):
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16, device="meta")
    assert explain(q, q, q).plan.backend == ("triton" if torch.cuda.is_available() else "reference")
    with pytest.raises(ValueError, match="'9' is neither a compute capability"):
        explain(q, q, q, arch="9")


def said_as_json(capsys, *command):
    status = cli.main([*command, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_every_command_speaks_json(backends, capsys):
    status, facts = said_as_json(capsys, "doctor")
    assert status == 0 and facts["versions"]["torch"] == torch.__version__ and facts["settings"]["strict"] is False
    assert [walk["backend"] for walks in facts["devices"].values() for walk in walks]
    status, (forward, backward) = said_as_json(capsys, "explain", "--arch", "10.0", "--dtype", "float32")
    assert status == 0 and forward["backend"] == "triton" and backward["fallback"] is True
    assert "float32" in str(backward["refusals"]["sm100"])
    status, (call,) = said_as_json(capsys, "explain", "2,64,4,64", "--arch", "9.0")
    assert status == 0 and call["backward"]["backend"] == "sm90" and call["problem"].endswith("capability 9.0)")
    status, (refused,) = said_as_json(capsys, "explain", "--arch", "7.5")
    assert status == 1 and "below the minimum" in refused["refused"]
    backends(HostDslBackend())
    kinds = ("--head-dim", "64", "--direction", "forward", "--causal", "no", "--lse", "no")
    status, made = said_as_json(capsys, "warmup", *kinds)
    assert status == 0 and [kernel["good"] for kernel in made["kernels"]] == [True] and made["skipped"] == []
    status, shelf = said_as_json(capsys, "cache")
    assert status == 0 and [kernel["backend"] for kernel in shelf["kernels"]] == ["sm90"]
    assert said_as_json(capsys, "cache", "clear")[1]["removed"] == 1


def test_explain_fails_aloud(capsys):
    assert cli.main(["explain", "--capability", "8.0", "--backend", "sm90"]) == 1
    assert "'sm90' was asked for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["explain", "--capability", "75"],
            "--capability: '75' is neither a compute capability MAJOR.MINOR (9.0) nor a compile target (sm_90a); ",
        ),
        (["explain", "--arch", "9.x"], "'9.x' is neither a compute capability"),
        (["explain", "--arch", "H100"], "; H100 and H200 are 9.0, B200 10.0, B300 10.3"),
        (["explain", "--arch", "sm_9"], "'sm_9' is neither a compute capability"),
        (["warmup", "--dtype", "bf15"], "argument --dtype: invalid choice: 'bf15' (choose from "),
        (["explain", "2,4096,16"], "'2,4096,16' is not a shape BATCH,SEQLEN,HEADS,HEAD_DIM (2,4096,16,128)"),
        (["bench", "2,x,16,64"], "'2,x,16,64' is not a shape"),
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


@pytest.mark.parametrize("backend", arch.BACKENDS, ids=lambda backend: backend.name)
def test_no_plan_depends_on_head_counts(backend):
    """Why the commands have no option for them."""
    device = device_facts.imagined({"sm90": (9, 0), "sm100": (10, 0)}.get(backend.name, (8, 0)), "simulated")
    for dims, direction in itertools.product(((64, 64), (128, 128), (192, 128), (256, 256)), (FORWARD, BACKWARD)):
        problem = words.problem(device, "bfloat16", dims, direction, request.Options(causal=True))
        assert not backend.refuse(problem)
        heads = [replace(problem, heads_q=q, heads_kv=kv) for q, kv in ((1, 1), (64, 8), (7, 1), (128, 128))]
        assert {backend.plan(each) for each in heads} == {backend.plan(problem)}
        few = [replace(each, small=True, short=True) for each in heads]
        grouped = {backend.plan(each) for each in few if each.group > 1}
        assert len(grouped) == len({backend.plan(each) for each in few if each.group == 1}) == 1
        assert direction == BACKWARD or grouped == {backend.plan(few[0])}


@pytest.mark.parametrize(
    ("text", "capability"),
    [("9.0", (9, 0)), ("sm_90a", (9, 0)), ("sm90", (9, 0)), ("sm_89", (8, 9)), ("sm_103a", (10, 3)), ("12.0", (12, 0))],
)
def test_an_architecture_may_be_said_in_many_ways(text, capability):
    assert device_facts.capability_of(text) == capability


@pytest.mark.parametrize("text", ["", "90", "sm", "sm_", "sm_a", "sm_9a", "9.0a", "sm_90b", " 9.0", "9.0\n", "९.०"])
def test_what_is_no_architecture(text):
    with pytest.raises(ValueError, match="is neither a compute capability"):
        device_facts.capability_of(text)


@pytest.mark.parametrize(("short", "dtype"), words.SHORT.items())
def test_dtypes_have_short_names(short, dtype, capsys):
    for command in (["explain", "1,8,2,16"], ["explain"]):
        assert said_as_json(capsys, *command, "--dtype", short) == said_as_json(capsys, *command, "--dtype", dtype)
    assert cli.parser().parse_args(["warmup", "--dtype", short, "bfloat16"]).dtype == [dtype, "bfloat16"]
    assert cli.parser().parse_args(["bench", "1,8,2,16", "--dtype", short]).dtype == dtype


def test_commands_do_not_load_the_compiler_of_torch():
    """It takes longer to import than all the rest; bench alone needs a class of it."""
    code = "import sys, cute_flash.cli; print([name for name in ('torch._dynamo', 'cutlass') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_bench_times_what_it_has_checked(monkeypatch, capsys):
    monkeypatch.setattr(bench, "SECONDS", 0.001)
    status, facts = said_as_json(capsys, "bench", "1,40,4,16", "1,70,2,16", "--causal", "--direction", "both")
    assert status == 0 and set(facts["times"]) == {"ours", "sdpa"} and facts["difference"] < 1e-2
    assert facts["times"]["ours"]["ms"] > 0 and facts["decision"]["backend"] == "reference"
    assert cli.main(["bench", "1,40,4,16", "--window", "5,0"]) == 0
    said = capsys.readouterr().out
    assert "SDPA has no such option: not checked" in said and "TFLOP/s" not in said


def test_bench_times_nothing_that_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(bench, "attention", lambda q, k, v, **options: torch.zeros_like(q))
    assert cli.main(["bench", "1,40,4,16"]) == 1
    said = capsys.readouterr()
    assert "nothing is timed" in said.err and " ms" not in said.out
    monkeypatch.setattr(bench, "attention", lambda q, k, v, **options: torch.full_like(q, torch.nan))
    assert cli.main(["bench", "1,40,4,16"]) == 1
    assert cli.main(["bench", "1,40,4,16", "--backend", "sm90"]) == 1
    assert "'sm90' was asked for" in capsys.readouterr().err


def test_bench_counts_what_is_seen():
    shapes = [(2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 16)]
    seen = visible_keys(3, 5, True, torch.device("cpu")).sum().item()
    assert bench.flops_of(shapes, True) == 2 * 2 * 4 * (8 + 16) * seen
    assert bench.flops_of(shapes, False) == 2 * 2 * 4 * (8 + 16) * 15


def test_a_cache_that_cannot_be_written_is_told(tmp_path, capsys, backends):
    """By doctor and, before it compiles anything, by warmup."""
    backends(HostDslBackend())
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        with settings.override(cache_dir=folder):
            assert cli.main(["doctor"]) == 0
            assert f"the cache folder {folder} cannot be used (Not a directory): each" in capsys.readouterr().out
            assert cli.main(["warmup", "--head-dim", "64"]) == 2
        said = capsys.readouterr()
        assert "cannot be used (" in said.err and "): nowhere to keep compiled kernels" in said.err and not said.out


def test_doctor_leaves_nothing_where_the_cache_would_be(tmp_path, capsys):
    folder = tmp_path / "a" / "b"
    with settings.override(cache_dir=folder):
        assert cli.main(["doctor"]) == 0
        assert f"{folder} (not made yet)" in capsys.readouterr().out and not list(tmp_path.iterdir())


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
    command = [sys.executable, "-m", "cute_flash", "explain", "--capability", "12.0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and "runs: triton forward 12.0" in done.stdout, done.stderr
