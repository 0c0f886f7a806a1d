"""The stored outputs of a real GPU: their inputs can be rebuilt, and they are right."""

import pytest
import torch

from tests import golden, oracle
from tests.cases import exact_inputs, golden_cases
from tests.runner import ALLOWED_RATIO, HALF_ULP

stored = pytest.mark.skipif(not golden.FILE.exists(), reason=f"{golden.FILE.name} has not been recorded yet")


def test_round_trip(tmp_path):
    outputs = {}
    for case in golden_cases()[:4]:
        inputs = exact_inputs(case)
        exact = oracle.forward(*inputs.qkv, causal=case.causal)
        value = golden.Golden(exact.out.to(case.torch_dtype), exact.lse.float(), golden.checksum(inputs))
        outputs[case] = value
    golden.save(tmp_path / "file.npz", {"gpu": "none"}, outputs)
    meta, loaded = golden.load(tmp_path / "file.npz")
    assert meta == {"gpu": "none"}
    assert list(loaded) == list(outputs)
    for case, value in loaded.items():
        assert torch.equal(value.out, outputs[case].out)
        assert torch.equal(value.lse, outputs[case].lse)
        assert value.checksum == outputs[case].checksum


def test_exact_inputs_are_frozen():
    """The stream promises never to change; this is what it gave when the outputs were recorded."""
    assert golden.checksum(exact_inputs(golden_cases()[0])) == FIRST_CHECKSUM


FIRST_CHECKSUM = 3698944842


def test_ulps_apart():
    row = torch.tensor([[1.0, 0.001]])
    assert golden.ulps_apart(row, row) == 0
    assert golden.ulps_apart(row + torch.tensor([[0.0, 2.0**-7]]), row) == pytest.approx(1.0)
    assert golden.ulps_apart(torch.tensor([[1.0, float("nan")]]), row) == float("inf")


@stored
def test_recorded_cases_are_complete():
    meta, outputs = golden.load()
    assert list(outputs) == list(golden_cases())
    assert meta["capability"] == "9.0"
    assert {"gpu", "date", "commit", "torch", "nvidia-cutlass-dsl"} <= set(meta)
    assert golden.FILE.stat().st_size < 2_000_000


@stored
@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_recorded_output_is_right(case):
    value = golden.load()[1][case]
    inputs = exact_inputs(case)
    assert golden.checksum(inputs) == value.checksum
    exact = oracle.forward(*inputs.qkv, causal=case.causal)
    plain = oracle.relative_error(oracle.plain_16bit(*inputs.qkv, causal=case.causal).out, exact.out)
    assert oracle.relative_error(value.out, exact.out) <= max(ALLOWED_RATIO * plain, HALF_ULP[case.torch_dtype])
    assert oracle.lse_excess(value.lse, exact.lse) <= 1
