"""Everything here runs kernels on the CPU; absent test dependencies are failures, not skips."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
