"""Fixtures for every test: uninitialised memory is NaN, and device tests say why they are skipped."""

import csv
import functools
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


if importlib.util.find_spec("cute_flash") is None:  # a bare copy of the tree, where nothing is installed
    sys.path.insert(0, str(ROOT))


# ------------------------------------------------------------------------------------------- uninitialised is NaN


def _filled_with_nan(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def poisoned(*args, **kwargs):
        result = make(*args, **kwargs)
        if result.is_floating_point() and result.device.type != "meta":
            with torch.no_grad():  # Inductor makes empty tensors that require gradients
                result.fill_(float("nan"))
        return result

    return poisoned


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty returns is NaN until written, so that an output the kernel forgot shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled_with_nan(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _filled_with_nan(getattr(torch.Tensor, name)))


# ------------------------------------------------------------------------------------------------------ device tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/device is marked; without a GPU it is skipped, with the reason."""
    missing = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA GPU, none is available here")
    for item in items:
        if Path(__file__).parent / "device" in item.path.parents:
            item.add_marker(pytest.mark.device)
        if missing is not None and item.get_closest_marker("device"):
            item.add_marker(missing)


# ------------------------------------------------------------------------- results of a run, across worker processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulator-csv", type=Path, default=None, help="keep the emulated runs: a row each")
    parser.addoption("--gradients-csv", type=Path, default=None, help="keep the emulated backwards: a row each")
    parser.addoption("--ratios-csv", type=Path, default=None, help="keep the errors of gradients beside Hopper's")
    parser.addoption(
        "--errors-csv", type=Path, default=None, help="keep the errors of gradients on a GPU beside others'"
    )
    parser.addoption("--plans-csv", type=Path, default=None, help="keep the compiled plans: registers and spills")
    parser.addoption("--commit", default="", help="of the tree, for these files, where there is no git")


GRADIENT_COLUMNS = ("shape", "mode", "scheduler", "seed", "dq_error", "dk_error", "dv_error", "seconds")
ERROR_COLUMNS = (
    "gpu",
    "shape",
    "yardstick",
    *(f"{name}{of}" for of in ("", "_yardstick") for name in ("dq", "dk", "dv")),
)
RATIO_COLUMNS = ("shape", *(f"{name}_{of}" for of in ("blackwell", "hopper", "ratio") for name in ("dq", "dk", "dv")))
_TREE = pytest.StashKey[tuple[str, str]]()  # day and commit when the run starts: a long one must not see later edits


def pytest_configure(config: pytest.Config) -> None:
    if any(config.getoption(f"--{name}-csv") for name in ("emulator", "gradients", "ratios", "errors", "plans")):
        from perf import machine

        config.stash[_TREE] = (machine.now()[:10], config.getoption("--commit") or machine.commit_here())


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    _print_ratios(terminalreporter, reports)
    if path := config.getoption("--emulator-csv"):
        _keep_emulated(path, config.stash[_TREE], reports)
    for option, name, columns in (
        ("--gradients-csv", "emulated_gradients", GRADIENT_COLUMNS),
        ("--ratios-csv", "gradient_ratios", RATIO_COLUMNS),
        ("--errors-csv", "gradient_errors", ERROR_COLUMNS),
    ):
        if path := config.getoption(option):
            rows = [(*config.stash[_TREE], *row) for row in sorted(_properties(reports, name))]
            _write(path, ("date", "commit", *columns), rows)
    if path := config.getoption("--plans-csv"):
        rows = [(*config.stash[_TREE], *row) for row in sorted(_properties(reports, "compiled"))]
        _write(path, ("date", "commit", "plan", "registers", "spill_bytes"), rows)


def _keep_emulated(path: Path, tree: tuple[str, str], reports: list[pytest.TestReport]) -> None:
    """`emulated` of the emulator's tests as CSV, with the day and the commit of the tree that ran."""
    columns = ("date", "commit", "shape", "mode", "scheduler", "seed", "error", "lse_error", "steps", "seconds")
    rows = sorted(_properties(reports, "emulated"))
    _write(path, columns, [(*tree, *row[:4], *(f"{x:.3e}" for x in row[4:6]), row[6], f"{row[7]:.2f}") for row in rows])


def _properties(reports: list[pytest.TestReport], name: str) -> list:
    return [value for report in reports for key, value in getattr(report, "user_properties", ()) if key == name]


def _write(path: Path, columns: tuple[str, ...], rows: list[tuple]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def _print_ratios(terminalreporter, reports: list[pytest.TestReport]) -> None:
    """The `ratios` of device tests as one table."""
    worst: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for report in reports:
        for name, fields in getattr(report, "user_properties", ()):
            if name == "ratio":
                *row, mask, yardstick, value = fields
                column = f"{mask}/{yardstick}"
                worst[tuple(row)][column] = max(value, worst[tuple(row)].get(column, 0.0))
    if not worst:
        return
    columns = ("full/flash", "causal/flash", "full/plain", "causal/plain")
    write = terminalreporter.write_line
    terminalreporter.section("largest error / yardstick's error (flash: PyTorch's; plain: 16-bit with float32 softmax)")
    write(f"{'pass':9} {'backend':10} {'dtype':9} {'head_dim':>9} " + " ".join(f"{c:>13}" for c in columns))
    for row in sorted(worst, key=lambda r: (r[:3], [int(d) for d in r[3].split(",")])):
        cells = [f"{worst[row][c]:13.3f}" if c in worst[row] else f"{'-':>13}" for c in columns]
        write(f"{row[0]:9} {row[1]:10} {row[2]:9} {row[3]:>9} " + " ".join(cells))
