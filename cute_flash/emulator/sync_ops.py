"""mbarrier, bar, barrier.cluster, fences, cluster launch control."""

from __future__ import annotations

import numpy as np

from . import access
from .barriers import ClusterWait, MBarrierWait, NamedBarrierWait
from .effects import effect
from .errors import UnknownInstruction
from .ptx import Instr, Kernel, Mem, Reg
from .registers import LANES
from .warp import BLOCKED
from .warp_ops import member_lanes


def _clock(w):
    return w.cta.order.release(w) if w.cta.order is not None else None


def _acquire(w, released) -> None:
    if w.cta.order is not None and released is not None and w.cta.order.acquire(w, released):
        w.cta.launch.counters.taught.add(w.instr().line)


@effect("mbarrier")
def mbarrier(i: Instr, kernel: Kernel):
    build = {
        "init": _init, "inval": _inval, "arrive": _arrive, "arrive_drop": _arrive, "expect_tx": _transaction,
        "complete_tx": _transaction, "try_wait": _wait, "test_wait": _wait, "pending_count": _pending,
    }[i.parts[1]]  # fmt: skip
    return build(i)


def _groups(addresses: np.ndarray, mask):
    """(address, number of lanes) of the active lanes; nearly always one."""
    active = access.pick(addresses, mask)
    if (active == active[0]).all():
        return [(int(active[0]), len(active))]
    values, counts = np.unique(active, return_counts=True)
    return [(int(v), int(c)) for v, c in zip(values, counts, strict=False)]


def _init(i: Instr):
    address, count, after = access.address(i.args[0]), access.scalar(i.args[1]), i.pc + 1

    def step(w, mask):
        for where, _ in _groups(address(w), mask):
            w.cta.init_mbarrier(w, where, count(w, mask))
        return after

    return step


def _inval(i: Instr):
    address, after = access.address(i.args[0]), i.pc + 1

    def step(w, mask):
        for where, _ in _groups(address(w), mask):
            w.cta.mbarrier(where, w)
            w.cta.drop_mbarrier(where)
        return after

    return step


def _memory_arg(i: Instr) -> int:
    return next(n for n, a in enumerate(i.args) if isinstance(a, Mem))


def _arrive(i: Instr):
    at = _memory_arg(i)
    address = access.address(i.args[at])
    amount = access.scalar(i.args[at + 1]) if len(i.args) > at + 1 else None
    put = access.setter(i.args[0], "b64") if at == 1 and isinstance(i.args[0], Reg) else None
    expecting, dropping = "expect_tx" in i.parts, i.parts[1] == "arrive_drop"
    after = i.pc + 1

    def step(w, mask):
        clock = _clock(w)
        for where, lanes in _groups(address(w), mask):
            barrier = w.cta.mbarrier(where, w)
            phase = barrier.phase
            if expecting:
                barrier.expect(amount(w, mask) * lanes)
            count = 1 if expecting or amount is None else amount(w, mask)
            (barrier.drop if dropping else barrier.arrive)(count * lanes, clock)
            if put:
                put(w, np.full(LANES, phase, np.uint64), mask)
        return after

    return step


def _transaction(i: Instr):
    address, amount, after = access.address(i.args[0]), access.scalar(i.args[1]), i.pc + 1
    completing = i.parts[1] == "complete_tx"

    def step(w, mask):
        for where, lanes in _groups(address(w), mask):
            barrier = w.cta.mbarrier(where, w)
            (barrier.complete if completing else barrier.expect)(amount(w, mask) * lanes)
        return after

    return step


def _wait(i: Instr):
    """A wait that fails once answers false (a peek must be able to); failing again with nothing done in between, it
    blocks."""
    target = i.args[0]
    put = access.setter(target, "pred")
    address, parity_of, after, pc = access.address(i.args[1]), access.scalar(i.args[2]), i.pc + 1, i.pc
    by_parity = "parity" in i.parts

    def step(w, mask):
        where, _ = _groups(address(w), mask)[0]
        barrier = w.cta.mbarrier(where, w)
        parity = parity_of(w, mask)
        if not by_parity:
            parity &= 1
        if barrier.passed(parity):
            _acquire(w, barrier.released)
            w.polling = None
            put(w, True, mask)
            return after
        if w.polling == (pc, where, parity, w.effects):
            w.fragment.wait = MBarrierWait(barrier, parity)
            return BLOCKED
        w.polling = (pc, where, parity, w.effects + 1)
        put(w, False, mask)
        return after

    return step


def _pending(i: Instr):
    raise UnknownInstruction(i.op)


@effect("bar", "barrier")
def barrier(i: Instr, kernel: Kernel):
    if i.parts[1] == "warp":
        return _warp_sync(i)
    if i.parts[1] == "cluster":
        return _cluster_arrive(i) if "arrive" in i.parts else _cluster_wait(i)
    if "red" in i.parts:
        raise UnknownInstruction(i.op)
    number = access.scalar(i.args[0])
    count = access.scalar(i.args[1]) if len(i.args) > 1 else None
    arriving, after = "arrive" in i.parts, i.pc + 1

    def step(w, mask):
        fragment = w.fragment
        if fragment.token is None:
            if not w.converged(mask):
                return w.wait_for_lanes()
            named = w.cta.named_barrier(number(w, mask))
            generation = named.arrive(w, count(w, mask) if count else None, _clock(w))
            if arriving:
                return after
            fragment.token = (named, generation)
        named, generation = fragment.token
        if named.generation > generation:
            fragment.token = None
            _acquire(w, named.released)
            return after
        fragment.wait = NamedBarrierWait(named, generation)
        return BLOCKED

    return step


def _warp_sync(i: Instr):
    get_mask, after = access.row(i.args[0], "u32"), i.pc + 1

    def step(w, mask):
        if not w.converged(mask, None if mask is True else member_lanes(w, mask, get_mask)):
            return w.wait_for_lanes()
        return after

    return step


def _cluster_arrive(i: Instr):
    after = i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        w.cta.cluster.barrier.arrive(w, _clock(w))
        return after

    return step


def _cluster_wait(i: Instr):
    after = i.pc + 1

    def step(w, mask):
        if not w.converged(mask):
            return w.wait_for_lanes()
        barrier = w.cta.cluster.barrier
        phase = barrier.waits.get(w, 0) + 1
        if barrier.completed() < phase:
            w.fragment.wait = ClusterWait(barrier, phase)
            return BLOCKED
        barrier.waits[w] = phase
        for clock in barrier.clocks[:phase]:
            _acquire(w, clock)
        return after

    return step


@effect("fence")
def fence(i: Instr, kernel: Kernel):
    """Memory is sequentially consistent; only what stands between generic accesses and the async proxy is tracked."""
    after, acquiring = i.pc + 1, "acq_rel" in i.parts and "gpu" in i.parts
    to_async = "proxy" in i.parts and any(p.startswith("async") for p in i.parts)
    shows_barriers = to_async or "mbarrier_init" in i.parts

    def step(w, mask):
        if shows_barriers:
            w.cta.show_mbarriers(w)
        if to_async and w.cta.order is not None:
            w.cta.order.proxy_fence(w)
        if acquiring or to_async:
            w.acquired = None if to_async else i
        return after

    return step


@effect("clusterlaunchcontrol")
def cluster_launch_control(i: Instr, kernel: Kernel):
    return _try_cancel(i) if i.parts[1] == "try_cancel" else _query_cancel(i)


def _try_cancel(i: Instr):
    from .copies import CancelResponse

    address, barrier, after = access.address_scalar(i.args[0]), access.address_scalar(i.args[1]), i.pc + 1
    everywhere = any("multicast" in p for p in i.parts)

    def step(w, mask):
        w.cta.engine.issue(CancelResponse(w, address(w, mask), barrier(w, mask), everywhere))
        return after

    return step


def _query_cancel(i: Instr):
    """The response is ours to lay out: word 0 is 1 when a cluster was taken, words 1 to 3 its first CTA."""
    source = i.args[1]
    after = i.pc + 1
    words = access.row(source, "b128")
    if "is_canceled" in i.parts:
        put = access.setter(i.args[0], "pred")

        def step(w, mask):
            low = words(w)[0::2]
            put(w, (low & np.uint64(0xFFFFFFFF)) == 1, mask)
            return after

        return step
    names = i.args[0].items if hasattr(i.args[0], "items") else (i.args[0],)
    only = next((p[-1] for p in i.parts if p.startswith("get_first_ctaid::")), None)
    puts = [access.setter(n, "b32") for n in names]

    def step(w, mask):
        quad = words(w)
        low, high = quad[0::2], quad[1::2]
        xyz = [low >> np.uint64(32), high & np.uint64(0xFFFFFFFF), high >> np.uint64(32)]
        chosen = [xyz["xyz".index(only)]] if only else [*xyz, np.zeros(LANES, np.uint64)]
        for put, value in zip(puts, chosen, strict=False):
            put(w, value, mask)
        return after

    return step
