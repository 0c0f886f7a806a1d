"""scripts/setup.sh on machines that lack something, with a Python and a pip that only write down what they are told."""

import shutil
import subprocess

import pytest

from ..conftest import ROOT

# Understands what setup.sh asks of a Python: its age, what it can import, `-m venv` (which copies it), `-m pip`.
PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
    --version) echo Python 3.11.0 ;;
    *version_info*) exit "$OLD" ;;
    *ensurepip,*) exit "$BARE" ;;
    "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"pip install"*) exit "$OFFLINE" ;;
esac
"""
TOOLS = ("bash", "cat", "cksum", "cp", "grep", "mkdir", "uname")


class Machine:
    def __init__(self, room):
        self.bin, self.tree, self.log = room / "bin", room / "a tree", room / "log"
        self.bin.mkdir()
        (self.tree / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "scripts/setup.sh"):
            shutil.copy(ROOT / name, self.tree / name)
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.python = self.bin / "python3"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def run(self, extras="", **lacks):
        """(exit status, what was said, what pip was told to install)."""
        self.log.write_text("")
        environment = {"PATH": str(self.bin), "LOG": str(self.log), "OLD": "0", "BARE": "0", "OFFLINE": "0", **lacks}
        program = f"set -euo pipefail; . scripts/setup.sh; prepare_environment {extras}; echo ready"
        command = [self.bin / "bash", "-c", program]
        done = subprocess.run(command, cwd=self.tree, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == done.stdout.endswith("ready\n")
        told = [line.split("pip-version-check ")[1] for line in self.log.read_text().splitlines() if "install" in line]
        return done.returncode, done.stderr, told


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_each_script_gets_what_it_needs_once(machine):
    """What is there for the tests will do for the demo, not the other way round."""
    status, _, told = machine.run()
    assert status == 0 and told[-1] == "--editable ." and told[0].startswith("torch==")
    assert machine.run() == (0, "", [])
    assert machine.run("test,dev")[2][-1] == "--editable .[test,dev]"
    assert machine.run("test,dev") == machine.run() == (0, "", [])
    with (machine.tree / "pyproject.toml").open("a") as file:
        file.write("# another\n")
    assert machine.run("test,dev")[2][-1] == "--editable .[test,dev]"


def test_a_python_without_venv_is_passed_over_or_named(machine):
    status, said, told = machine.run(BARE="1")
    assert status == 1 and "apt install python3-venv" in said and told == []
    assert not (machine.tree / ".venv").exists()  # half an environment would stop the next run
    other = machine.bin / "python3.12"
    other.write_text(PYTHON.replace('"$BARE"', "0"))
    other.chmod(0o755)
    assert machine.run(BARE="1")[0] == 0


def test_no_python_or_an_old_one(machine):
    status, said, _ = machine.run(OLD="1")
    assert status == 1 and "no Python 3.10 or newer was found" in said
    machine.python.unlink()
    assert machine.run()[:2] == (1, said)


def test_no_package_index(machine):
    """Nothing counts as ready, and the next run goes on from there."""
    status, said, _ = machine.run(OFFLINE="1")
    assert status == 1 and "pip could not install torch==" in said and "PIP_INDEX_URL" in said
    assert machine.run()[0] == 0
