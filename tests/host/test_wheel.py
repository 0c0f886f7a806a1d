"""A wheel in an environment of its own; and the sentences for packages that are too old."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import cute_flash
from cute_flash.runtime import dispatch, toolchain
from cute_flash.spec import versions

from ..conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

PROGRAM = """
import sys
import cute_flash, torch
from cute_flash.arch.sm90 import tiles
from cute_flash.integrations import flash_attn, sdpa
assert cute_flash.__file__.startswith(sys.prefix), cute_flash.__file__
assert tiles.__file__.startswith(sys.prefix), tiles.__file__
q, k, v = (torch.randn(2, 33, 4, 16, dtype=torch.float64) for _ in range(3))
out = cute_flash.attention(q, k, v, causal=True)
scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 4).masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf)
torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v))
meta = torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
print(cute_flash.explain(meta, meta, meta, causal=True, arch="9.0"))
print("exact")
"""


def run(python, *arguments, folder):
    """In an environment without this one's paths, caches or proxies to another tree."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CUTE_"))}
    environment |= {"CUTE_FLASH_CACHE_DIR": "0"}
    command = [python, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-1500:]}{done.stderr[-3000:]}"
    return done.stdout


def _site_packages() -> list[str]:
    """Folders of installed packages here: the clean environment borrows them in place of downloading torch again."""
    return [path for path in dict.fromkeys(sys.path) if "site-packages" in Path(path).parts]


def _install(room: Path) -> tuple[Path, Path]:
    """(python, wheel): a new environment with the wheel and nothing else of its own, and the wheel."""
    source = room / "source"
    for name in ("cute_flash", "arch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    venv.create(room / "env", with_pip=True, symlinks=True)
    python = room / "env" / "bin" / "python"
    (site,) = (room / "env").glob("lib/python*/site-packages")
    # A plain line adds a folder without the .pth files inside it, so the editable install here stays out.
    (site / "borrowed.pth").write_text("\n".join(_site_packages()) + "\n")
    offline = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", room, source, folder=room)
    (wheel,) = room.glob("*.whl")
    run(python, "-m", "pip", "install", *offline, "--no-compile", wheel, folder=room)
    return python, wheel


def test_a_wheel_works_in_an_environment_of_its_own(tmp_path):
    """One test, because the environment takes the time. It borrows torch and the compilers."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    python, wheel = _install(tmp_path)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "cute_flash").rglob("*.py")}
    wanted |= {f"cute_flash/{path.relative_to(ROOT)}" for path in (ROOT / "arch").rglob("*.py")}
    assert names == wanted | {"cute_flash/py.typed"}, "every source and nothing else"
    said = run(python, "-c", PROGRAM, folder=tmp_path)
    assert "sm90" in said and said.endswith("exact\n")
    doctor = run(python, "-m", "cute_flash", "doctor", folder=tmp_path).splitlines()
    assert doctor[0].split() == ["cute_flash", cute_flash.__version__]
    assert wheel.name.startswith(f"cute_flash-{cute_flash.__version__}-")
    # In the tree that it was built from, whose cute_flash/ comes first and has no arch/ inside.
    program = "import cute_flash; from cute_flash.arch.sm90 import tiles; print(cute_flash.__file__, tiles.__file__)"
    of_tree = [str(tmp_path / "source" / name) for name in ("cute_flash/__init__.py", "arch/sm90/tiles.py")]
    assert run(python, "-c", program, folder=tmp_path / "source").split() == of_tree


def test_every_page_names_this_version():
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [cute_flash.__version__]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in (cute_flash.__version__, "Unreleased") and cute_flash.__version__ in headings


# ------------------------------------------------------------------------------------------------------------ too old


@pytest.mark.parametrize("version, numbers", [
    ("2.13.0+cpu", (2, 13, 0)), ("0.1.15.post2", (0, 1, 15)), ("2.10.0a0+git12", (2, 10, 0)), ("absent", ()),
])  # fmt: skip
def test_versions_are_read(version, numbers):
    assert versions.release(version) == numbers


@pytest.mark.parametrize("version, fine", [("2.9", True), ("2.9.1+cu130", True), ("2.10.0", True), ("3.0", True),
                                           ("2.8.1", False), ("1.13", False), ("unknown", True)])  # fmt: skip
def test_what_is_older_is_told_what_to_install(version, fine):
    sentence = versions.too_old("torch", version, versions.TORCH)
    assert sentence == ("" if fine else f"torch {version} is too old, 2.9 or newer is needed: "
                        "pip install --upgrade 'torch'")  # fmt: skip


def test_an_old_torch_is_refused_at_import(tmp_path):
    """Where our own imports would fail in other words."""
    (tmp_path / "torch.py").write_text("__version__ = '2.5.1+cu121'\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", "import cute_flash"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: torch 2.5.1+cu121 is too old, 2.9 or newer is needed: pip install")


@pytest.mark.parametrize("backend, distribution", [("sm90", "nvidia-cutlass-dsl"), ("sm90", "apache-tvm-ffi"),
                                                   ("triton", "triton")])  # fmt: skip
def test_an_old_compiler_is_a_refusal_with_a_sentence(monkeypatch, backend, distribution):
    found = toolchain.version
    monkeypatch.setattr(toolchain, "version", lambda name: "0.1.2" if name == distribution else found(name))
    (one,) = (each for each in dispatch.arch.BACKENDS if each.name == backend)
    (sentence,) = dispatch._toolchain_refusals(one)
    assert sentence.startswith(f"{distribution} 0.1.2 is too old, ") and "pip install --upgrade" in sentence


@pytest.mark.skipif(tomllib is None, reason="tomllib came with Python 3.11")
def test_the_bounds_are_those_of_pyproject():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line).groups() for line in wanted if ">=" in line)
    ours = {name: oldest for name, oldest, _ in versions.TOOLCHAIN.values()} | {"torch": versions.TORCH}
    assert {name: bounds[name] for name in ours} == ours
    for name, _, install in versions.TOOLCHAIN.values():
        assert any(line.startswith(install) for line in wanted), f"{name}: no dependency is spelled {install}"


def test_what_is_installed_here_is_new_enough():
    for module in versions.TOOLCHAIN:
        if importlib.util.find_spec(module):
            assert toolchain.outdated(module) == ""
