"""Address spaces: host memory as global memory, and shared memory of a CTA, both read and written by rows of lanes."""

from __future__ import annotations

import bisect

import numpy as np

from .errors import BadAccess

SHARED_WINDOW = 1 << 60  # generic addresses of shared memory start here
SHARED_BYTES = 256 * 1024  # what 18-bit descriptors can address
DYNAMIC_BASE = 1024  # the system keeps the first KiB of shared memory
POISON_BYTES = np.frombuffer(b"\xde\x7f" * 8, np.uint8)  # NaN as bf16, f16, f32 and f64

_ORIGIN = 4096


class _Everything:
    """Presents the whole address space to numpy; only checked addresses are ever touched."""

    def __init__(self, size: int):
        self.__array_interface__ = {
            "data": (_ORIGIN, False),
            "shape": ((1 << 47) // size - _ORIGIN // size - 1,),
            "typestr": f"<u{size}" if size > 1 else "|u1",
            "version": 3,
        }


class HostMemory:
    """Global memory: the process's own address space, guarded by its memory map."""

    def __init__(self):
        self.views = {size: np.asarray(_Everything(size)) for size in (1, 2, 4, 8)}
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._writable: list[bool] = []

    def refresh(self) -> None:
        starts, stops, writable = [], [], []
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, mode = line.split(None, 2)[:2]
                if mode[0] != "r":
                    continue
                low, high = (int(v, 16) for v in span.split("-"))
                can_write = mode[1] == "w"
                if stops and stops[-1] == low and writable[-1] == can_write:
                    stops[-1] = high
                else:
                    starts.append(low)
                    stops.append(high)
                    writable.append(can_write)
        self._starts, self._stops, self._writable = starts, stops, writable

    def _mapped(self, low: int, high: int, write: bool) -> bool:
        at = bisect.bisect_right(self._starts, low) - 1
        return at >= 0 and high <= self._stops[at] and (self._writable[at] or not write)

    def check(self, low: int, high: int, write: bool = False) -> None:
        if self._mapped(low, high, write):
            return
        self.refresh()
        if not self._mapped(low, high, write):
            verb = "write to" if write else "read of"
            raise BadAccess(f"{verb} global address {low:#x}..{high:#x}, {self.where()}")

    def where(self) -> str:
        return "which is not mapped"

    def allow(self, low: int, high: int) -> None:
        """Nothing to do: what is mapped may be touched."""

    def _index(self, addresses: np.ndarray, size: int, count: int, write: bool) -> np.ndarray:
        low, high = int(addresses.min()), int(addresses.max()) + size * count
        if not self._mapped(low, high, write):
            for one in addresses:
                self.check(int(one), int(one) + size * count, write)
        index = (addresses - _ORIGIN) // size
        return index[:, None] + np.arange(count) if count > 1 else index

    def load(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """-> (lanes,) or (lanes, count) of unsigned integers of `size` bytes."""
        return self.views[size][self._index(addresses, size, count, False)]

    def store(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        count = values.shape[1] if values.ndim > 1 else 1
        self.views[size][self._index(addresses, size, count, True)] = values

    def bytes_at(self, address: int, count: int, write: bool = False) -> np.ndarray:
        self.check(address, address + count, write)
        return self.views[1][address - _ORIGIN : address - _ORIGIN + count]


class BoundedMemory(HostMemory):
    """Global memory of a launch whose arguments are all known: their storages, the parameters, nothing else."""

    def __init__(self, ranges: list):
        super().__init__()
        self._ranges = list(ranges)
        self.refresh()

    def allow(self, low: int, high: int) -> None:
        self._ranges.append((low, high))
        self.refresh()

    def refresh(self) -> None:
        starts: list[int] = []
        stops: list[int] = []
        for low, high in sorted(self._ranges):
            if stops and low <= stops[-1]:
                stops[-1] = max(stops[-1], high)
            else:
                starts.append(low)
                stops.append(high)
        self._starts, self._stops, self._writable = starts, stops, [True] * len(starts)

    def where(self) -> str:
        return "outside every tensor of the call"


class SharedMemory:
    """One CTA's shared memory. `limit` is the end of what the launch asked for."""

    def __init__(self, limit: int, rng=None):
        self.data = np.tile(POISON_BYTES, SHARED_BYTES // len(POISON_BYTES))
        self.views = {size: self.data.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.limit = limit

    def check(self, offsets: np.ndarray, nbytes: int) -> None:
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        if low < 0 or high > self.limit:
            raise BadAccess(f"shared memory access at {low:#x}..{high:#x}, of which {self.limit:#x} bytes exist")

    def _index(self, offsets: np.ndarray, size: int, count: int) -> np.ndarray:
        self.check(offsets, size * count)
        index = offsets // size
        return index[:, None] + np.arange(count) if count > 1 else index

    def load(self, offsets: np.ndarray, size: int, count: int) -> np.ndarray:
        return self.views[size][self._index(offsets, size, count)]

    def store(self, offsets: np.ndarray, size: int, values: np.ndarray) -> None:
        count = values.shape[1] if values.ndim > 1 else 1
        self.views[size][self._index(offsets, size, count)] = values


def check_alignment(addresses: np.ndarray, nbytes: int) -> None:
    if nbytes > 1 and (addresses & (nbytes - 1)).any():
        bad = int(addresses[(addresses & (nbytes - 1)) != 0][0])
        raise BadAccess(f"address {bad:#x} is not aligned to {nbytes} bytes")
