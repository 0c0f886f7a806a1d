"""Fixtures of the office's tests: every test starts with an empty memory and nothing said, and keeps its own cache."""

from dataclasses import replace

import pytest

import cute_flash.arch as arch
from cute_flash import api, kvcache, varlen
from cute_flash.runtime import compiler, dispatch, report
from cute_flash.spec import device as device_facts
from cute_flash.spec import settings


@pytest.fixture
def office(tmp_path):
    """A fresh office with a cache folder of its own."""
    with settings.override(cache_dir=tmp_path / "cache", backend=None, log=frozenset(), strict=False):
        _forget()
        yield
    _forget()


def _forget() -> None:
    api._warm.clear()
    kvcache._warm.clear()
    varlen._warm.clear()
    compiler.forget()
    report.forget()
    dispatch.forget_broken()


@pytest.fixture
def backends(monkeypatch):
    """Replace the backends: backends(first, second, ...), best first."""

    def install(*replacements):
        monkeypatch.setattr(arch, "BACKENDS", replacements)
        return replacements

    return install


@pytest.fixture
def simulated(monkeypatch):
    """Pretend that CPU tensors lie on a GPU of some capability: simulated((9, 0)), simulated((9, 0), sm_count=78)."""

    def install(capability, **facts):
        device = replace(device_facts.imagined(capability, "simulated"), **facts)
        monkeypatch.setattr(device_facts, "describe", lambda _: device)
        return device

    return install
