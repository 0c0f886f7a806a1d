"""quack's dense GEMMs, unmodified, on both architectures: tiles, clusters, cluster launch control, dtypes, majors."""

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
    check(monkeypatch, arch, a, b, tile, cluster, options)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_fp8(monkeypatch, arch):
    a, b = (torch.randn(1, n, 128).to(torch.float8_e4m3fn) for n in (256, 128))
    check(monkeypatch, arch, a, b, (128, 128), (1, 1), {})


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_operands_contiguous_along_m_and_n(monkeypatch, arch):
    a, b = (torch.randn(1, 128, n).half().mT for n in (256, 128))
    check(monkeypatch, arch, a, b, (128, 128), (1, 1), {})


def test_blackwell_tile_of_64_rows(monkeypatch):
    a, b = (torch.randn(1, n, 128).bfloat16() for n in (192, 128))
    check(monkeypatch, "sm_100a", a, b, (64, 128), (1, 1), {})


def check(monkeypatch, arch, a, b, tile, cluster, options):
    d = torch.full((1, a.shape[1], b.shape[1]), float("nan")).bfloat16()
    with emulate(arch, seed=1):
        quack_gemm(monkeypatch, arch, a, b, d, tile, cluster, **options)
    expected = a.double() @ b.double().mT
    assert ((d.double() - expected).abs() <= expected.abs() * 2.0**-7 + 1e-2).all()
