"""scripts/silicon without the silicon: it says what is missing, and does nothing else."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf import baselines, points, records
from scripts import silicon

ROOT = Path(__file__).resolve().parents[2]


def fake_torch(capability, available=True, cuda="13.0") -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: available,
            get_device_capability=lambda: capability,
            get_device_name=lambda: "NVIDIA Imagined",
        ),
    )


@pytest.mark.parametrize(
    "torch, sentence",
    [
        (fake_torch(None, available=False), "but torch finds no GPU (is the driver new enough for CUDA 13.0?)"),
        (fake_torch(None, available=False, cuda=None), "but torch 2.13.0 is built without CUDA"),
        (fake_torch((9, 0)), "but NVIDIA Imagined has 9.0"),
        (fake_torch((12, 0)), "but NVIDIA Imagined has 12.0"),
    ],
)
def test_the_wrong_gpu_is_named(torch, sentence):
    assert silicon.missing_gpu(torch).endswith(sentence)


@pytest.mark.parametrize("capability", silicon.CAPABILITIES)
def test_the_right_gpu_will_do(capability):
    assert silicon.missing_gpu(fake_torch(capability)) == ""


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(silicon.NEEDED, "no_such_module_here", "a package that nobody has")
    (sentence,) = (s for s in silicon.missing_packages() if "no_such_module_here" in s)
    assert sentence.startswith("needs a package that nobody has: import no_such_module_here: ModuleNotFoundError")


def test_everything_missing_is_said_at_once_and_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(silicon, "missing", lambda: ["needs this", "needs that"])
    monkeypatch.setattr(silicon, "correctness", lambda log: pytest.fail("ran"))
    assert silicon.main([]) == 2
    assert capsys.readouterr().err == "scripts/silicon needs this\nscripts/silicon needs that\n"


def test_wrong_results_are_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(silicon, "missing", list)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA B200")
    monkeypatch.setattr(silicon, "correctness", lambda log: False)
    monkeypatch.setattr(silicon, "measure", lambda *_: pytest.fail("timed"))
    assert silicon.main(["--out", str(tmp_path)]) == 1
    assert "correctness.log" in capsys.readouterr().err


def test_right_results_are_timed_and_the_csv_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(silicon, "missing", list)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA B200")
    monkeypatch.setattr(silicon, "correctness", lambda log: True)
    monkeypatch.setattr(silicon, "measure", lambda *_: 0)
    assert silicon.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "forward.csv") in said and str(tmp_path / "backward.csv") in said


def test_a_test_that_hangs_ends_the_run_and_the_log_says_which(monkeypatch, tmp_path, capsys):
    """As a kernel would that never ends: nothing but the death of the process stops it."""
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text("import time\n\ndef test_that_never_ends():\n    time.sleep(600)\n")
    monkeypatch.setattr(silicon, "TESTS", (str(hangs),))
    monkeypatch.setattr(silicon, "HANG_SECONDS", 1)
    assert not silicon.correctness(tmp_path / "log")
    said = (tmp_path / "log").read_text()
    assert "Timeout" in said and "test_that_never_ends" in said and said == capsys.readouterr().out


def test_dry_needs_no_gpu_and_measures_nothing(monkeypatch, tmp_path, capfd):
    """A rehearsal with the real table's code: rows without a GPU's name or a time of a rival."""
    monkeypatch.setattr(silicon, "missing", lambda: pytest.fail("asked for a GPU"))
    small = "d=64,mask=full,S=4096"
    monkeypatch.setattr(silicon, "POINTS", {"forward": ("", small), "backward": ("", f"{small},pass=bwd")})
    assert silicon.main(["--dry", "--quick", "--out", str(tmp_path)]) == 0
    assert "nothing measured" in capfd.readouterr().out
    for name in silicon.POINTS:
        rows = records.read([tmp_path / f"{name}.csv"])
        assert {row["contestant"] for row in rows} == set(silicon.CONTESTANTS.split(","))
        assert all("needs a CUDA GPU" in row["note"] for row in rows if row["contestant"] != "ours")
    assert not (tmp_path / "correctness.log").exists()


def test_what_it_runs_exists():
    assert all((ROOT / path).is_file() for path in silicon.TESTS)
    assert set(silicon.CONTESTANTS.split(",")) <= set(baselines.CONTESTANTS)
    assert all(points.parse(name) for pair in silicon.POINTS.values() for name in pair)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_the_command_ends_with_a_sentence_before_it_installs_anything():
    done = subprocess.run([ROOT / "scripts" / "silicon"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and "nvidia-smi finds no GPU here" in done.stderr


def test_help_needs_no_gpu():
    said = subprocess.run([ROOT / "scripts" / "silicon", "--help"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0 and said.stdout.startswith("usage: scripts/silicon") and not said.stderr
    assert "FlashAttention-4" in said.stdout
