"""Padding masks as spans of keys, without Transformers: what test_transformers.py cannot show where that is missing."""

import torch

from cute_flash.integrations import spans

from .. import oracle


def test_padding_under_another_default_device():
    """As after torch.set_default_device("cuda"): spans are made on the CPU all the same."""
    q, k, v = (torch.randn(2, 5, 2, 16, dtype=torch.float64) for _ in range(3))
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
    with torch.device("meta"):
        found = spans.of_mask(real, spans.Places(2, 5, 5, 0, 0), (None, 0))
        out = spans.attend(q, k, v, found, None, None)
    assert found.device.type == "cpu"
    for row, keys in ((0, slice(2, 5)), (1, slice(0, 4))):
        alone = (x[row, None, keys] for x in (q, k, v))
        assert oracle.relative_error(out[row, keys], oracle.forward(*alone, causal=True).out[0]) < 1e-12
