"""Which counter a launch gets: with PyTorch's stream functions replaced, so that no GPU is needed."""

import threading
from types import SimpleNamespace

import pytest
import torch

from cute_flash.runtime import counters

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """What PyTorch says about the current stream; counters are made on the CPU."""
    now = SimpleNamespace(stream=0, made_here=True, capturing=False, device=0, made_in=[], zeroed=0)

    def zeros(self):
        now.made_in.append(threading.get_ident())
        return list(torch.zeros(4, dtype=torch.int32).split(1))

    def zero(self):
        now.zeroed += 1
        return torch.zeros(1, dtype=torch.int32)

    def stream(device):
        named = now.stream if not now.made_here or not now.stream else 1 + 2 * now.stream
        return SimpleNamespace(cuda_stream=now.stream, stream_id=named)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    monkeypatch.setattr(counters, "SLAB", 4)
    monkeypatch.setattr(counters.Counters, "_zeros", zeros)
    monkeypatch.setattr(counters.Counters, "_zero", zero)
    monkeypatch.setattr(counters, "_devices", {})
    return now


def place(counter: torch.Tensor) -> int:
    assert counter.shape == (1,)
    assert counter.dtype == torch.int32
    assert counter.item() == 0
    return counter.data_ptr()


def test_a_stream_keeps_its_counter(gpu):
    counter = counters.counter_for(DEVICE)
    found = {}
    for stream in (0, 64, 128, 0, 64, 128, 192, 256, 320, 384):  # more streams than a slab has counters
        gpu.stream = stream
        found.setdefault(stream, place(counter()))
        assert place(counter()) == found[stream]
    assert len(set(found.values())) == len(found)


def test_two_kernels_on_one_stream_share(gpu):
    assert place(counters.counter_for(DEVICE)()) == place(counters.counter_for(DEVICE)())


def test_each_captured_launch_has_its_own(gpu):
    counter = counters.counter_for(DEVICE)
    eager = place(counter())
    gpu.capturing = True
    captured = [counter() for _ in range(9)]
    assert len({eager, *(place(each) for each in captured)}) == 10
    gpu.capturing = False
    assert place(counter()) == eager
    kept = counters._devices[0].captured
    assert all(any(each is one for one in kept) for each in captured)  # a graph reads them for as long as it lives


def test_they_are_made_in_another_thread(gpu):
    """The caller's may have its allocations in the pool of a graph that is being warmed up."""
    counter = counters.counter_for(DEVICE)
    for stream in range(9):
        gpu.stream = stream
        counter()
    assert len(gpu.made_in) > 1 and threading.get_ident() not in gpu.made_in


def test_captures_are_provided_for_outside_of_them(gpu):
    """What a capture makes for itself lies in its graph's pool. Half a slab is there for it, two of four."""
    counter = counters.counter_for(DEVICE)
    counter()
    for _ in range(5):
        gpu.capturing = True
        before = len(gpu.made_in)
        assert len({place(counter()) for _ in range(2)}) == 2
        assert len(gpu.made_in) == before and gpu.zeroed == 0
        gpu.capturing = False
        counter()


def test_first_met_inside_a_capture(gpu):
    gpu.capturing = True
    counter = counters.counter_for(DEVICE)
    first, second = counter(), counter()
    assert place(first) != place(second)
    gpu.capturing = False
    assert place(counter()) not in (place(first), place(second))


def test_a_foreign_stream_never_shares(gpu):
    """Its handle may come back for another stream while its work still runs."""
    gpu.stream, gpu.made_here = 4096, False
    counter = counters.counter_for(DEVICE)
    kept = [counter() for _ in range(3)]
    assert len({place(each) for each in kept}) == 3
    assert 4096 not in counters._devices[0].of_stream


def test_another_current_device(gpu, monkeypatch):
    class Switch:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, gpu.device = gpu.device, self.index

        def __exit__(self, *error):
            gpu.device = self.before

    monkeypatch.setattr(torch.cuda, "device", Switch)
    counter = counters.counter_for(DEVICE)
    here = place(counter())
    gpu.device = 1
    assert place(counter()) == here
    assert gpu.device == 1


def test_on_the_cpu():
    counter = counters.counter_for(torch.device("cpu"))
    assert place(counter()) and counter() is not counter()
