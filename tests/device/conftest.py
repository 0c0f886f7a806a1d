"""Device tests: memory is poisoned before each, and error ratios are gathered into one table at the end."""

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from tests.cases import Case

POISON_ELEMENTS = 1 << 24  # 64 MB of float32: larger than any one tensor of a small case


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> None:
    """torch.empty is NaN from Python, and the allocator's free blocks are NaN for whoever allocates below it."""
    if torch.cuda.is_available():
        request.getfixturevalue("poisoned_empty")
        torch.full((POISON_ELEMENTS,), float("nan"), device="cuda")


@pytest.fixture
def ratios(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """ratios("forward", backend, case, yardstick, value): remembered for the table, through the test's report."""

    def record(direction: str, backend: str | None, case: Case, yardstick: str, value: float) -> None:
        dims = f"{case.head_dim}" if case.head_dim == case.head_dim_v else f"{case.head_dim},{case.head_dim_v}"
        mask = "causal" if case.causal else "full"
        record_property("ratio", [direction, backend or "auto", case.dtype, dims, mask, yardstick, value])

    return record


def pytest_terminal_summary(terminalreporter) -> None:
    worst: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
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
