"""quack's dense GEMMs, unmodified: two configurations on each architecture."""

import pytest
import torch

from cute_flash.emulator import emulate

from .foreign import quack_gemm

CONFIGS = [
    ("sm_90a", (128, 128), (1, 1), {"pingpong": True}),
    ("sm_90a", (128, 256), (2, 1), {}),
    ("sm_100a", (128, 128), (1, 1), {}),
    ("sm_100a", (256, 128), (2, 1), {}),
    ("sm_100a", (256, 128), (2, 1), {"is_dynamic_persistent": True}),  # cluster launch control
    ("sm_103a", (128, 128), (1, 1), {}),
]


@pytest.mark.parametrize("arch, tile, cluster, options", CONFIGS)
def test_gemm(monkeypatch, arch, tile, cluster, options):
    m, n, k = 384, 272, 192
    a, b = torch.randn(1, m, k).bfloat16(), torch.randn(1, n, k).bfloat16()
    d = torch.full((1, m, n), float("nan")).bfloat16()
    with emulate(arch, seed=1):
        quack_gemm(monkeypatch, arch, a, b, d, tile, cluster, **options)
    expected = a.double() @ b.double().mT
    assert ((d.double() - expected).abs() <= expected.abs() * 2.0**-7 + 1e-2).all()
