"""Counters for kernels whose CTAs draw their tiles: zero between launches, one for each that may run beside another.

Launches on one stream follow each other, so a stream has one counter, which every launch leaves at zero. A captured
launch gets one of its own: its graph may be replayed beside anything. A stream made outside PyTorch may be destroyed
while its work still runs, and its handle given to the next, so that a launch there gets a fresh zero instead.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SLAB = 4096  # counters made at a time

Counter = Callable[[], torch.Tensor]


class Counters:
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_stream: dict[int, torch.Tensor] = {}  # cudaStream_t -> counter
        self.captured: list[torch.Tensor] = []  # kept for as long as a graph may run
        self.low = False  # captures took half a slab: more are to be made outside one
        self._lock = threading.Lock()
        self._slab: list[torch.Tensor] = []
        if not torch.cuda.is_current_stream_capturing():
            self._refill()

    def _refill(self) -> None:
        # In a thread of its own. While torch.compile(mode="reduce-overhead") warms up, what the caller's thread
        # allocates lies in its graph's pool, where nothing may outlive the call; and modes (inference) are a thread's.
        with ThreadPoolExecutor(1) as aside:
            self._slab += aside.submit(self._zeros).result()
        self.low = False

    def _zeros(self) -> list[torch.Tensor]:
        aside = torch.cuda.Stream(self.device)  # waiting for the zeros must not be waiting for what the caller queued
        with torch.cuda.stream(aside):
            zeros = torch.zeros(SLAB, dtype=torch.int32, device=self.device)
        aside.synchronize()
        return list(zeros.split(1))

    def top_up(self) -> None:
        with self._lock:
            if self.low:
                self._refill()

    def for_capture(self) -> torch.Tensor:
        with self._lock:
            # nothing can be zeroed beside a capture; inside, the zeroing becomes part of the graph
            fresh = self._slab.pop() if self._slab else self._zero()
            self.captured.append(fresh)
            self.low = len(self._slab) < SLAB // 2
            return fresh

    def for_new_stream(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.device)
        handle = stream.cuda_stream
        if handle and stream.stream_id == handle:  # so PyTorch names a stream that it did not make
            return self._zero()
        with self._lock:
            if not self._slab:
                self._refill()
            return self.of_stream.setdefault(handle, self._slab.pop())

    def _zero(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)


_devices: dict[int, Counters] = {}
_making = threading.Lock()


def _counters(device: torch.device) -> Counters:
    with _making:
        found = _devices.get(device.index)
        if found is None:
            with torch.cuda.device(device):
                found = _devices[device.index] = Counters(device)
        return found


def counter_for(device: torch.device) -> Counter:
    """() -> the counter, (1,) int32 and zero, of a launch on the current stream of the device."""
    if device.type != "cuda":
        return lambda: torch.zeros(1, dtype=torch.int32, device=device)
    counters, index = _counters(device), device.index
    current, capturing = torch._C._cuda_getDevice, torch._C._cuda_isCurrentStreamCapturing
    handle = torch._C._cuda_getCurrentRawStream
    of_stream = counters.of_stream

    def counter() -> torch.Tensor:
        if current() != index:
            with torch.cuda.device(index):
                return counter()
        if capturing():
            return counters.for_capture()
        if counters.low:
            counters.top_up()
        found = of_stream.get(handle(index))
        return counters.for_new_stream() if found is None else found

    return counter
