"""cp and cp.reduce with their bulk forms: TMA tile loads, stores and reductions, 1-D bulk copies, groups and waits."""

from __future__ import annotations

import functools

import numpy as np

from . import access, cp_async, tensormap
from .atomics import _combine, _dtype
from .copies import Load, Store, fetch, groups_of
from .effects import effect
from .errors import IllegalInstruction, UnknownInstruction
from .ptx import Instr, Kernel, Mem


@effect("cp")
def copy(i: Instr, kernel: Kernel):
    rest = i.parts[1:]
    if rest[0] == "reduce" or "bulk" in rest:
        if "prefetch" in rest:
            after = i.pc + 1
            return lambda w, mask: after
        if "commit_group" in rest:
            return cp_async.commit(i, "bulk")
        if "wait_group" in rest:
            return cp_async.wait(i, "bulk")
        return _tensor(i) if "tensor" in rest else _bulk(i)
    if "commit_group" in rest:
        return cp_async.commit(i, "cp.async")
    if "wait_group" in rest or "wait_all" in rest:
        return cp_async.wait(i, "cp.async")
    if "mbarrier" in rest:
        return cp_async.arrive(i)
    return cp_async.copy(i)


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
            load = functools.partial(tensormap.load_box, w.cta.host, tmap, at)
            w.cta.engine.issue(Load(w, targets, tmap.box_bytes, load, tmap.swizzle))
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


def _same_for_all(w, mask, getters: list) -> bool:
    """Whether every active lane names the same box and the same shared memory."""
    return all((access.pick(get(w), mask) == get(w)[access.first(mask)]).all() for get in getters)


def _tensor_store(i: Instr, map_address, coords: list, shared_address):
    op, after = _reduction(i), i.pc + 1
    rows = [access.row(c, "s32") for c in i.args[0].coords] + [access.address(i.args[0]), access.address(i.args[1])]

    def step(w, mask):
        # A warp that stores one box from all its lanes writes the same bytes 32 times: done, and counted, once.
        once = op is None and _same_for_all(w, mask, rows)
        for one in _lanes(mask)[: 1 if once else None]:
            tmap = _read_map(w, one, map_address)
            at = tuple(_signed(c(w, one)) for c in coords)
            address = shared_address(w, one)
            _check_tile(w, tmap, at, address)
            combine, host = _combiner(op, tmap.kind), w.cta.host

            def send(data, m=tmap, a=at, c=combine, host=host):
                tensormap.store_box(host, m, a, data.reshape(-1, m.box[0] * m.size), c)

            store = Store(w, w.cta.peer(address >> 24, w), address & 0xFFFFFF, tmap.box_bytes, send, tmap.swizzle)
            for lane in access.lanes_of(mask if once else one):
                groups_of(w, "bulk").add(int(lane), store)
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
            load = _bulk_source(w, host, origin, nbytes, direction)
            w.cta.engine.issue(Load(w, targets, nbytes, load))
        return after

    return step


def _bulk_source(w, host, origin: int, nbytes: int, direction: str):
    if direction == "load":
        return lambda: host.bytes_at(origin, nbytes).copy()
    cta = w.cta.peer(origin >> 24, w)
    return lambda: fetch(cta.shared, origin & 0xFFFFFF, nbytes, "0")


def _bulk_store(w, host, target: int, origin: int, nbytes: int, combine) -> Store:
    def send(data):
        place = host.bytes_at(target, nbytes, write=True)
        place[:] = data if combine is None else combine(place.copy(), data)

    return Store(w, w.cta.peer(origin >> 24, w), origin & 0xFFFFFF, nbytes, send)
