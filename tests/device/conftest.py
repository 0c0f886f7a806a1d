"""Device tests: memory is poisoned before each, and error ratios are recorded for the table at the end."""

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
