"""The bulk-copy family: TMA tile loads, stores and reductions, 1-D bulk copies, cp.async, and their completion."""

from __future__ import annotations

import numpy as np

from . import access, tensormap
from .atomics import _combine, _dtype
from .effects import effect
from .engine import Operation
from .errors import IllegalInstruction, UnknownInstruction
from .memory import SHARED_WINDOW
from .order import GRANULE
from .ptx import Instr, Kernel, Mem
from .warp import BLOCKED

_FULL = 0xFFFFFFFF


def _cells(offset: int, nbytes: int) -> slice:
    return slice(offset // GRANULE, (offset + nbytes + GRANULE - 1) // GRANULE)


def _chunks(shared, offset: int, rows: np.ndarray, swizzle: str) -> None:
    """Put box rows into shared memory at `offset`, packed and swizzled."""
    data = rows.reshape(-1)
    shared.check(np.array([offset]), len(data))
    if swizzle == "0" or len(data) % 16:
        shared.data[offset : offset + len(data)] = data
        return
    where = tensormap.swizzled_chunks(offset // 16 + np.arange(len(data) // 16), swizzle)
    shared.data.reshape(-1, 16)[where] = data.reshape(-1, 16)


def _fetch(shared, offset: int, nbytes: int, swizzle: str) -> np.ndarray:
    shared.check(np.array([offset]), nbytes)
    if swizzle == "0" or nbytes % 16:
        return shared.data[offset : offset + nbytes].copy()
    where = tensormap.swizzled_chunks(offset // 16 + np.arange(nbytes // 16), swizzle)
    return shared.data.reshape(-1, 16)[where].reshape(-1)


class Load(Operation):
    """A copy into shared memory that completes on an mbarrier, in one CTA or in several."""

    def __init__(self, warp, targets: list, nbytes: int, fetch, swizzle: str = "0"):
        super().__init__(warp)
        self.targets, self.nbytes, self.fetch, self.swizzle = targets, nbytes, fetch, swizzle
        self.barriers = tuple(barrier for _, _, barrier in targets)
        self.track(("load", self.barriers[0]))
        order = warp.cta.order
        for cta, offset, _ in targets:
            cta.shared.check(np.array([offset]), nbytes)
            if order is not None:
                order.async_access(cta.shadow, _cells(offset, nbytes), self, write=True)

    def run(self) -> None:
        rows = self.fetch()
        counters = self.warp.cta.launch.counters
        counters.l2_read += self.nbytes
        for cta, offset, barrier in self.targets:
            cta.check_alive()
            counters.shared_written += self.nbytes
            _chunks(cta.shared, offset, rows, self.swizzle)
            barrier.complete(self.nbytes, self.clock)


class Store(Operation):
    """A copy or reduction out of shared memory, part of a bulk group."""

    def __init__(self, warp, cta, offset: int, nbytes: int, send, swizzle: str = "0"):
        super().__init__(warp)
        self.cta, self.offset, self.nbytes, self.send, self.swizzle = cta, offset, nbytes, send, swizzle
        cta.shared.check(np.array([offset]), nbytes)
        self.track(("bulk", warp))
        if warp.cta.order is not None:
            warp.cta.order.async_access(cta.shadow, _cells(offset, nbytes), self, write=False)

    def run(self) -> None:
        counters = self.warp.cta.launch.counters
        counters.shared_read += self.nbytes
        counters.l2_written += self.nbytes
        self.send(_fetch(self.cta.shared, self.offset, self.nbytes, self.swizzle))


class RemoteStore(Operation):
    """st.async: a few words into a CTA of the cluster, completing on an mbarrier there."""

    def __init__(self, warp, address: int, values: np.ndarray, barrier: int, nbytes: int):
        super().__init__(warp)
        self.target = warp.cta.peer(address >> 24 & 0xFF, warp)
        self.offset, self.values, self.nbytes = address & 0xFFFFFF, values, nbytes
        self.barriers = (warp.cta.mbarrier(barrier, warp),)
        self.track(("load", self.barriers[0]))
        if warp.cta.order is not None:
            warp.cta.order.async_access(self.target.shadow, _cells(self.offset, nbytes), self, write=True)

    def run(self) -> None:
        self.target.shared.data[self.offset : self.offset + self.nbytes] = np.ascontiguousarray(self.values).view(
            np.uint8
        )
        self.barriers[0].complete(self.nbytes, self.clock)


class CancelResponse(Operation):
    """clusterlaunchcontrol.try_cancel: takes the next cluster off the grid, for one CTA or all of the cluster."""

    def __init__(self, warp, address: int, barrier: int, everywhere: bool):
        super().__init__(warp)
        cluster = warp.cta.cluster
        targets = cluster.ctas if everywhere else [warp.cta.peer(address >> 24, warp)]
        self.targets = [
            (cta, address & 0xFFFFFF, cta.mbarrier((cta.rank << 24) | barrier & 0xFFFFFF)) for cta in targets
        ]
        self.barriers = tuple(barrier for _, _, barrier in self.targets)
        self.track(("load", self.barriers[0]))
        if warp.cta.order is not None:
            for cta, offset, _ in self.targets:
                warp.cta.order.async_access(cta.shadow, _cells(offset, 16), self, write=True)

    def run(self) -> None:
        first = self.warp.cta.launch.next_cluster()
        words = np.array([1, *first] if first else [0, _FULL, _FULL, _FULL], np.uint32)
        for cta, offset, barrier in self.targets:
            cta.shared.data[offset : offset + 16] = words.view(np.uint8)
            barrier.complete(16, self.clock)


class Groups:
    """Bulk or cp.async groups of the lanes of a warp; the lanes of one instruction share a list per lane."""

    def __init__(self):
        self.open: dict[int, list] = {}
        self.closed: dict[int, list] = {}

    def add(self, lane: int, op: Operation) -> None:
        self.open.setdefault(lane, []).append(op)

    def commit(self, lane: int) -> None:
        self.closed.setdefault(lane, []).append(self.open.pop(lane, []))

    def older_than(self, lane: int, keep: int) -> list:
        groups = self.closed.get(lane, [])
        return groups[: len(groups) - keep] if keep else list(groups)

    def unfinished(self) -> bool:
        return any(self.open.values()) or any(any(groups) for groups in self.closed.values())

    def forget(self, lane: int, keep: int) -> None:
        groups = self.closed.get(lane, [])
        self.closed[lane] = groups[len(groups) - keep :] if keep else []


def groups_of(w, family: str) -> Groups:
    return w.state.setdefault(family, Groups())


@effect("cp")
def copy(i: Instr, kernel: Kernel):
    rest = i.parts[1:]
    if rest[0] == "reduce" or "bulk" in rest:
        if "prefetch" in rest:
            after = i.pc + 1
            return lambda w, mask: after
        if "commit_group" in rest:
            return _commit(i, "bulk")
        if "wait_group" in rest:
            return _wait(i, "bulk")
        return _tensor(i) if "tensor" in rest else _bulk(i)
    if "commit_group" in rest:
        return _commit(i, "cp.async")
    if "wait_group" in rest or "wait_all" in rest:
        return _wait(i, "cp.async")
    if "mbarrier" in rest:
        return _async_arrive(i)
    return _cp_async(i)


def _direction(i: Instr) -> str:
    """'load', 'store' or 'peer': from the order of the spaces in the name."""
    spaces = [p.split("::")[0] for p in i.parts if p in ("global", "shared::cta", "shared::cluster", "shared")]
    return {("shared", "global"): "load", ("global", "shared"): "store", ("shared", "shared"): "peer"}[
        tuple(spaces[:2])
    ]


def _tensor(i: Instr):
    if (
        not any(p in i.parts for p in ("1d", "2d", "3d", "4d", "5d"))
        or "im2col" in i.op
        or "gather4" in i.op
        or "scatter4" in i.op
    ):
        raise UnknownInstruction(i.op)
    loading = _direction(i) == "load"
    mapping: Mem = i.args[1] if loading else i.args[0]
    coords = [access.scalar(c, "s32") for c in mapping.coords]
    map_address = access.address_scalar(mapping)
    shared_address = access.address_scalar(i.args[0] if loading else i.args[1])
    return (
        _tensor_load(i, map_address, coords, shared_address)
        if loading
        else _tensor_store(i, map_address, coords, shared_address)
    )


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _read_map(w, mask, map_address) -> tensormap.TensorMap:
    raw = w.cta.host.bytes_at(map_address(w, mask), 128).tobytes()
    cache = w.cta.launch.tensor_maps
    if raw not in cache:
        cache[raw] = tensormap.decode(raw)
    return cache[raw]


def _lanes(mask):
    """One single-lane mask per active lane: these instructions are per thread."""
    if mask is not True and mask.sum() == 1:
        return [mask]
    singles = []
    for lane in access.lanes_of(mask):
        one = np.zeros(32, np.bool_)
        one[lane] = True
        singles.append(one)
    return singles


def _destinations(w, address: int, barrier: int, multicast: int | None, paired: bool) -> list:
    """(cta, offset, mbarrier) of every copy. A paired load may signal the mbarrier of the other CTA of its pair."""
    own = address >> 24
    ranks = [own] if multicast is None else [r for r in range(len(w.cta.cluster.ctas)) if multicast >> r & 1]
    found = []
    for rank in ranks:
        told = barrier >> 24
        if paired:
            told = (rank & ~1) | (told & 1)
        elif multicast is not None:
            told = rank
        found.append((w.cta.peer(rank, w), address & 0xFFFFFF, w.cta.mbarrier(told << 24 | barrier & 0xFFFFFF, w)))
    return found


def _tensor_load(i: Instr, map_address, coords: list, shared_address):
    barrier = access.address_scalar(i.args[2])
    multicast = access.scalar(i.args[3]) if "multicast::cluster" in i.parts else None
    paired, after = "cta_group::2" in i.parts, i.pc + 1

    def step(w, mask):
        for one in _lanes(mask):
            tmap = _read_map(w, one, map_address)
            at = tuple(_signed(c(w, one)) for c in coords)
            address = shared_address(w, one)
            _check_tile(w, tmap, at, address)
            chosen = multicast(w, one) & 0xFFFF if multicast else None
            targets = _destinations(w, address, barrier(w, one), chosen, paired)
            host = w.cta.host
            w.cta.engine.issue(
                Load(w, targets, tmap.box_bytes, lambda m=tmap, a=at: tensormap.load_box(host, m, a), tmap.swizzle)
            )
        return after

    return step


def _check_tile(w, tmap, coords: tuple, address: int) -> None:
    if len(coords) != tmap.rank:
        raise w.fail(IllegalInstruction, f"{len(coords)} coordinates for a tensor map of rank {tmap.rank}")
    if address & 127:
        raise w.fail(
            IllegalInstruction, f"TMA shared memory address {address & 0xFFFFFF:#x} is not aligned to 128 bytes"
        )


def _reduction(i: Instr):
    """The combine function of cp.reduce, on raw unsigned words, or None for a plain store."""
    if i.parts[1] != "reduce":
        return None
    op = next(p for p in i.parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor"))
    return op


def _combiner(op: str | None, kind: str):
    if op is None:
        return None
    dtype = _dtype(kind)

    def combine(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        raw = new.dtype
        return np.ascontiguousarray(_combine(op, kind, old.view(dtype), new.view(dtype))).view(raw)

    return combine


def _tensor_store(i: Instr, map_address, coords: list, shared_address):
    op, after = _reduction(i), i.pc + 1

    def step(w, mask):
        for one in _lanes(mask):
            tmap = _read_map(w, one, map_address)
            at = tuple(_signed(c(w, one)) for c in coords)
            address = shared_address(w, one)
            _check_tile(w, tmap, at, address)
            combine, host = _combiner(op, tmap.kind), w.cta.host

            def send(data, m=tmap, a=at, c=combine):
                tensormap.store_box(host, m, a, data.reshape(-1, m.box[0] * m.size), c)

            store = Store(w, w.cta.peer(address >> 24, w), address & 0xFFFFFF, tmap.box_bytes, send, tmap.swizzle)
            groups_of(w, "bulk").add(access.first(one), store)
            w.cta.engine.issue(store)
        return after

    return step


def _bulk(i: Instr):
    """1-D copies: global to shared, shared to global (or reduced into it), shared to a peer's shared."""
    direction, op, kind = _direction(i), _reduction(i), i.parts[-1]
    to, source = access.address_scalar(i.args[0]), access.address_scalar(i.args[1])
    size, after = access.scalar(i.args[2]), i.pc + 1
    barrier = access.address_scalar(i.args[3]) if direction != "store" else None
    multicast = access.scalar(i.args[4]) if "multicast::cluster" in i.parts else None
    if direction == "peer" and op:
        raise UnknownInstruction(i.op)

    def step(w, mask):
        host = w.cta.host
        for one in _lanes(mask):
            nbytes, target, origin = size(w, one), to(w, one), source(w, one)
            if nbytes % 16 or target % 16 or origin % 16:
                raise w.fail(
                    IllegalInstruction,
                    f"bulk copy of {nbytes} bytes from {origin:#x} to {target:#x}: 16-byte units are needed",
                )
            if direction == "store":
                store = _bulk_store(w, host, target, origin, nbytes, _combiner(op, kind))
                groups_of(w, "bulk").add(access.first(one), store)
                w.cta.engine.issue(store)
                continue
            chosen = multicast(w, one) & 0xFFFF if multicast else None
            targets = _destinations(w, target, barrier(w, one), chosen, False)
            fetch = _bulk_source(w, host, origin, nbytes, direction)
            w.cta.engine.issue(Load(w, targets, nbytes, fetch))
        return after

    return step


def _bulk_source(w, host, origin: int, nbytes: int, direction: str):
    if direction == "load":
        return lambda: host.bytes_at(origin, nbytes).copy()
    cta = w.cta.peer(origin >> 24, w)
    return lambda: _fetch(cta.shared, origin & 0xFFFFFF, nbytes, "0")


def _bulk_store(w, host, target: int, origin: int, nbytes: int, combine) -> Store:
    def send(data):
        place = host.bytes_at(target, nbytes, write=True)
        place[:] = data if combine is None else combine(place.copy(), data)

    return Store(w, w.cta.peer(origin >> 24, w), origin & 0xFFFFFF, nbytes, send)


def _commit(i: Instr, family: str):
    after = i.pc + 1

    def step(w, mask):
        for lane in access.lanes_of(mask):
            groups_of(w, family).commit(int(lane))
        return after

    return step


def _wait(i: Instr, family: str):
    keep = access.scalar(i.args[0]) if i.args else (lambda w, mask: 0)
    after = i.pc + 1

    def step(w, mask):
        groups, n = groups_of(w, family), keep(w, mask)
        for lane in access.lanes_of(mask):
            for group in groups.older_than(int(lane), n):
                for op in group:
                    if not op.done:
                        w.cta.engine.finish(op)
                    if w.cta.order is not None:
                        w.cta.order.learn(w, op.actor, op.epoch)
            groups.forget(int(lane), n)
        return after

    return step


class ThreadCopy(Operation):
    """cp.async: per-thread copies of one warp instruction."""

    def __init__(self, warp, addresses: np.ndarray, sources: np.ndarray, sizes: np.ndarray, nbytes: int):
        super().__init__(warp)
        self.addresses, self.sources, self.sizes, self.nbytes = addresses, sources, sizes, nbytes
        self.track(("cp.async", warp))
        if warp.cta.order is not None:
            cells = (addresses // GRANULE)[:, None] + np.arange((nbytes + GRANULE - 1) // GRANULE)
            warp.cta.order.async_access(warp.cta.shadow, cells.ravel(), self, write=True)

    def run(self) -> None:
        counters = self.warp.cta.launch.counters
        counters.shared_written += self.nbytes * len(self.addresses)
        counters.l2_read += int(self.sizes.sum())
        shared, host = self.warp.cta.shared, self.warp.cta.host
        shared.check(self.addresses, self.nbytes)
        for address, source, size in zip(self.addresses, self.sources, self.sizes, strict=False):
            shared.data[address : address + self.nbytes] = 0
            if size:
                shared.data[address : address + size] = host.bytes_at(int(source), int(size))


def _cp_async(i: Instr):
    to, source, nbytes, after = access.address(i.args[0]), access.address(i.args[1]), i.args[2].value, i.pc + 1
    limited = access.row(i.args[3], "u32") if len(i.args) > 3 and "cache_hint" not in i.op else None

    def step(w, mask):
        addresses = access.pick(to(w), mask)
        addresses = np.where(addresses >= SHARED_WINDOW, addresses - SHARED_WINDOW, addresses) & 0xFFFFFF
        sizes = access.pick(limited(w), mask).astype(np.int64) if limited else np.full(len(addresses), nbytes)
        op = ThreadCopy(w, addresses, access.pick(source(w), mask), sizes, nbytes)
        for lane in access.lanes_of(mask):
            groups_of(w, "cp.async").add(int(lane), op)
        w.cta.engine.issue(op)
        return after

    return step


class CopyArrival(Operation):
    """cp.async.mbarrier.arrive: arrives when the cp.asyncs before it are complete."""

    def __init__(self, warp, barrier, lanes: int):
        super().__init__(warp)
        self.barriers, self.lanes = (barrier,), lanes
        self.earlier = [op for op in warp.cta.engine.pending if isinstance(op, ThreadCopy) and op.warp is warp]
        self.track(("cp.async", warp))

    def ready(self) -> bool:
        return all(op.done for op in self.earlier)

    def run(self) -> None:
        self.barriers[0].arrive(self.lanes, self.clock)


def _async_arrive(i: Instr):
    address, after = access.address(i.args[0]), i.pc + 1
    increments = "noinc" not in i.parts

    def step(w, mask):
        active = access.pick(address(w), mask)
        for where, lanes in zip(*np.unique(active, return_counts=True), strict=False):
            barrier = w.cta.mbarrier(int(where), w)
            if increments:
                barrier.pending += int(lanes)
            w.cta.engine.issue(CopyArrival(w, barrier, int(lanes)))
        return after

    return step


__all__ = ["BLOCKED", "CancelResponse", "Load", "RemoteStore", "Store"]
