"""ld and st of every space, and ldu/prefetch relatives."""

from __future__ import annotations

import numpy as np

from . import access
from .effects import effect
from .emit import type_bits
from .errors import UnknownInstruction
from .memory import SHARED_WINDOW, check_alignment
from .polls import wait_for_change
from .ptx import Instr, Kernel, Vec
from .registers import LANES
from .warp import BLOCKED

_SPACES = ("param", "shared", "shared::cta", "shared::cluster", "global", "local", "const")


def space_of(i: Instr) -> str:
    found = next((p for p in i.parts[1:] if p in _SPACES or p.startswith("param")), "generic")
    return {"shared::cta": "shared", "shared::cluster": "shared", "const": "global"}.get(found, found.split("::")[0])


def vector_of(i: Instr) -> int:
    return next((int(p[1:]) for p in i.parts[1:-1] if p in ("v2", "v4", "v8")), 1)


def _register_kind(arg, kind: str) -> str:
    """The view a value of memory type `kind` takes in its (possibly wider) register."""
    cls = getattr(arg, "cls", "")
    bits = {"H": 16, "R": 32, "D": 64, "Q": 128}.get(cls, type_bits(kind))
    return f"{'s' if kind[0] == 's' else 'u'}{bits}" if bits <= 64 else "b128"


@effect("ld", "ldu")
def load(i: Instr, kernel: Kernel):
    space, kind, count = space_of(i), i.parts[-1], vector_of(i)
    size = type_bits(kind) // 8
    targets = i.args[0].items if isinstance(i.args[0], Vec) else (i.args[0],)
    if space == "param":
        return _load_param(i, targets, kind, size)
    writers = [access.setter(t, _register_kind(t, kind)) for t in targets]
    address, after = access.address(i.args[1]), i.pc + 1
    signed = np.dtype(f"i{size}") if kind[0] == "s" and size <= 8 else None
    acquiring = "acquire" in i.parts and space != "shared"
    units = (size // 8) if size > 8 else 1
    unit = size // units

    def step(w, mask):
        where = access.pick(address(w), mask)
        check_alignment(where, size * count)
        found = read(w, space, where, unit, count * units)
        if acquiring:
            if space == "global" and wait_for_change(w, i.pc, where, found):
                return BLOCKED
            w.acquired = i
        if signed is not None:
            found = found.view(signed)
        _write_rows(w, writers, found, mask, units)
        return after

    return step


def _write_rows(w, writers: list, found: np.ndarray, mask, units: int) -> None:
    table = found.reshape(len(found), -1)
    for n, write in enumerate(writers):
        part = table[:, n * units : (n + 1) * units]
        if mask is True:
            write(w, part.ravel(), True)
        elif units == 1:
            full = np.zeros(LANES, table.dtype)
            full[mask] = part[:, 0]
            write(w, full, mask)
        else:
            full = np.zeros((LANES, units), table.dtype)
            full[mask] = part
            write(w, full.ravel(), mask.repeat(units))


def _load_param(i: Instr, targets, kind: str, size: int):
    writers = [access.setter(t, _register_kind(t, kind)) for t in targets]
    address, after = access.address(i.args[1]), i.pc + 1
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{size}")

    def step(w, mask):
        base = int(address(w)[access.first(mask)])
        values = w.cta.host.bytes_at(base, size * len(writers)).view(dtype)
        for value, write in zip(values, writers, strict=False):
            write(w, np.full(LANES, value), mask)
        return after

    return step


@effect("st")
def store(i: Instr, kernel: Kernel):
    if "async" in i.parts or "bulk" in i.parts:
        return _store_async(i)
    space, kind, count = space_of(i), i.parts[-1], vector_of(i)
    size = type_bits(kind) // 8
    sources = i.args[1].items if isinstance(i.args[1], Vec) else (i.args[1],)
    readers = [access.row(s, _register_kind(s, kind)) for s in sources]
    address, after = access.address(i.args[0]), i.pc + 1
    units = (size // 8) if size > 8 else 1
    unit = size // units
    dtype = np.dtype(f"u{unit}")

    def step(w, mask):
        where = access.pick(address(w), mask)
        check_alignment(where, size * count)
        rows = [r(w).reshape(LANES, -1) for r in readers]
        values = np.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]
        values = access.pick(values, mask).astype(dtype)
        write(w, space, where, unit, values)
        return after

    return step


def _store_async(i: Instr):
    """st.async: a store into a CTA of the cluster that completes on an mbarrier there."""
    kind, count = i.parts[-1], vector_of(i)
    size = type_bits(kind) // 8
    sources = i.args[1].items if isinstance(i.args[1], Vec) else (i.args[1],)
    readers = [access.row(s, _register_kind(s, kind)) for s in sources]
    address, barrier, after = access.address(i.args[0]), access.address(i.args[2]), i.pc + 1
    from .copies import RemoteStore

    def step(w, mask):
        values = np.stack([r(w) for r in readers], axis=1)
        for lane in access.lanes_of(mask):
            w.cta.engine.issue(
                RemoteStore(
                    w, int(address(w)[lane]), values[lane].astype(f"u{size}"), int(barrier(w)[lane]), size * count
                )
            )
        return after

    return step


def read(w, space: str, where: np.ndarray, size: int, count: int) -> np.ndarray:
    """Rows of memory for the active lanes: -> (lanes,) or (lanes, count)."""
    if space in ("global", "local"):
        return w.cta.host.load(where, size, count)
    if space == "generic":
        shared = where >= SHARED_WINDOW
        if not shared.any():
            return w.cta.host.load(where, size, count)
        if not shared.all():
            raise w.fail(UnknownInstruction, "one access to both shared and global memory")
        where = where - SHARED_WINDOW
    elif space != "shared":
        raise w.fail(UnknownInstruction, f"space {space}")
    return _shared(w, where, size, count, None)


def write(w, space: str, where: np.ndarray, size: int, values: np.ndarray) -> None:
    if values.ndim > 1 and values.shape[1] == 1:
        values = values[:, 0]
    if space == "generic" and (where >= SHARED_WINDOW).any():
        space, where = "shared", where - SHARED_WINDOW
    if space in ("global", "local", "generic"):
        w.cta.host.store(where, size, values)
    elif space == "shared":
        _shared(w, where, size, values.shape[1] if values.ndim > 1 else 1, values)
    else:
        raise w.fail(UnknownInstruction, f"space {space}")


def _shared(w, where: np.ndarray, size: int, count: int, values) -> np.ndarray | None:
    """Load (values is None) or store shared memory of any CTA in the cluster."""
    cta = w.cta
    ranks = where >> 24
    offsets = where & 0xFFFFFF
    rank = int(ranks[0])
    w.cta.launch.counters.shared(w, len(where) * size * count, values is not None)
    if (ranks == rank).all():
        return _one_cta(w, cta.peer(rank, w), offsets, size, count, values)
    found = None
    for rank in np.unique(ranks):
        chosen = ranks == rank
        part = _one_cta(
            w, cta.peer(int(rank), w), offsets[chosen], size, count, None if values is None else values[chosen]
        )
        if values is None:
            found = np.zeros((len(where), *part.shape[1:]), part.dtype) if found is None else found
            found[chosen] = part
    return found


def _one_cta(w, cta, offsets: np.ndarray, size: int, count: int, values) -> np.ndarray | None:
    if values is None:
        if cta.order is not None:
            cta.order.shared_access(w, cta, offsets, size * count, write=False)
        return cta.shared.load(offsets, size, count)
    if cta.order is not None:
        cta.order.shared_access(w, cta, offsets, size * count, write=True)
    cta.shared.store(offsets, size, values)
    return None
