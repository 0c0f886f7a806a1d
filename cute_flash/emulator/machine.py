"""CTAs, clusters and the launch: who is resident, who runs next, and what to say when nobody can."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from .barriers import ClusterBarrier, MBarrier, MBarrierWait, NamedBarrier
from .counters import Counters
from .engine import MODES, STARVED, Engine
from .errors import BadAccess, Deadlock, EmulatorError, IllegalInstruction, StepLimit
from .memory import DYNAMIC_BASE, HostMemory, SharedMemory
from .order import Order, Shadow
from .polls import PATIENCE, MemoryWait
from .ptx import Kernel
from .registers import LANES, RegisterPool, Registers
from .succession import Unfinished
from .tmem import Tmem
from .warp import Warp

HOST = HostMemory()
SCHEDULERS = ("round_robin", "random", "priority")


@dataclass
class Options:
    """How to run: see docs/emulator.md."""

    mode: str = "random"
    scheduler: str = "random"
    seed: int = 0
    race: bool = True
    resident: int = 4  # clusters in flight at once
    max_steps: int | None = None
    strict_exit: bool = False  # a warp may not exit with bulk stores it has not waited for

    def __post_init__(self):
        """ValueError or TypeError, naming knob, value and rule."""
        for name, allowed in (("mode", MODES), ("scheduler", SCHEDULERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name in ("race", "strict_exit"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not True or False")
        for name, least in (("seed", 0), ("resident", 1), ("max_steps", 1)):
            value = getattr(self, name)
            if value is None and name == "max_steps":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is not an integer")
            if value < least:
                raise ValueError(f"{name}={value} is less than {least}")


class Cta:
    def __init__(self, launch: Launch, cluster: Cluster, coords: tuple, rank: int):
        self.launch, self.cluster, self.coords, self.rank = launch, cluster, coords, rank
        self.program, self.host, self.engine, self.order = launch.program, launch.host, launch.engine, cluster.order
        kernel = launch.program.kernel
        dynamic = DYNAMIC_BASE + kernel.shared_bytes
        self.dynamic_base = (dynamic + 1023) // 1024 * 1024
        self.shared = SharedMemory(self.dynamic_base + launch.shared_bytes)
        self.shadow = Shadow(len(self.shared.data) // 4, f"shared memory of CTA {coords}") if self.order else None
        self.tmem = Tmem(self)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        threads = int(np.prod(launch.block))
        self.registers = RegisterPool(threads)
        self.warps = [Warp(self, i, threads) for i in range((threads + LANES - 1) // LANES)]
        if self.order is not None:
            for warp in self.warps:
                self.order.join_warp(warp)
        local = kernel.local_bytes
        self.local = np.full((len(self.warps) * LANES, (local + 15) // 16 * 16), 0xDE, np.uint8) if local else None
        if self.local is not None:
            self.host.allow(self.local.ctypes.data, self.local.ctypes.data + self.local.size)

    # --- names -----------------------------------------------------------------------------------
    def peer(self, rank: int, warp=None) -> Cta:
        if rank == self.rank:
            return self
        if rank >= len(self.cluster.ctas):
            raise BadAccess(f"shared memory of rank {rank}, in a cluster of {len(self.cluster.ctas)}")
        found = self.cluster.ctas[rank]
        found.check_alive()
        return found

    def check_alive(self) -> None:
        if not self.live_warps():
            raise BadAccess(f"shared memory of CTA {self.coords} is used after it has exited")

    def symbol(self, warp: Warp, name: str):
        kernel, launch = self.program.kernel, self.launch
        if name in launch.param_offsets:
            return launch.param_address + launch.param_offsets[name]
        if name in kernel.shared:
            return (self.rank << 24) + DYNAMIC_BASE + kernel.shared[name]
        if name in kernel.local:
            first = warp.index * LANES
            base = self.local.ctypes.data + kernel.local[name]
            return base + np.arange(first, first + LANES, dtype=np.int64) * self.local.shape[1]
        if "dynamic" in name or "shmem" in name or "smem" in name:
            return (self.rank << 24) + self.dynamic_base
        raise warp.fail(BadAccess, f"symbol {name} has no address here")

    def special(self, warp: Warp, name: str) -> np.ndarray:
        launch = self.launch
        thread = np.arange(warp.index * LANES, (warp.index + 1) * LANES)
        bx, by, _ = launch.block
        lane = np.arange(LANES)
        axis = "xyz".find(name[-1]) if "." in name else -1
        cluster = launch.cluster
        base = name.split(".")[0]
        table = {
            "%tid": lambda: (thread % bx, thread // bx % by, thread // (bx * by))[axis],
            "%ntid": lambda: launch.block[axis],
            "%ctaid": lambda: self.coords[axis],
            "%nctaid": lambda: launch.grid[axis],
            "%clusterid": lambda: self.coords[axis] // cluster[axis],
            "%nclusterid": lambda: launch.grid[axis] // cluster[axis],
            "%cluster_ctaid": lambda: self.coords[axis] % cluster[axis],
            "%cluster_nctaid": lambda: cluster[axis],
            "%cluster_ctarank": lambda: self.rank,
            "%cluster_nctarank": lambda: len(self.cluster.ctas),
            "%is_explicit_cluster": lambda: int(np.prod(cluster)) > 1,
            "%laneid": lambda: lane,
            "%warpid": lambda: warp.index,
            "%nwarpid": lambda: len(self.warps),
            "%smid": lambda: (self.cluster.number * len(self.cluster.ctas) + self.rank) % launch.sms,
            "%nsmid": lambda: launch.sms,
            "%gridid": lambda: 0,
            "%lanemask_eq": lambda: 1 << lane,
            "%lanemask_lt": lambda: (1 << lane) - 1,
            "%lanemask_le": lambda: (2 << lane) - 1,
            "%lanemask_gt": lambda: ~((2 << lane) - 1) & 0xFFFFFFFF,
            "%lanemask_ge": lambda: ~((1 << lane) - 1) & 0xFFFFFFFF,
            "%clock": lambda: launch.steps & 0xFFFFFFFF,
            "%clock64": lambda: launch.steps,
            "%globaltimer": lambda: launch.steps,
            "%globaltimer_lo": lambda: launch.steps & 0xFFFFFFFF,
            "%dynamic_smem_size": lambda: launch.shared_bytes,
            "%total_smem_size": lambda: self.shared.limit,
            "%envreg0": lambda: 0,
        }
        if base not in table:
            raise warp.fail(EmulatorError, f"special register {name}")
        return np.broadcast_to(np.asarray(table[base](), np.int64), (LANES,))

    # --- barriers ------------------------------------------------------------------------------------
    def init_mbarrier(self, warp: Warp, address: int, count: int) -> None:
        cta, offset = self.peer(address >> 24, warp), address & 0xFFFFFF
        if offset % 8:
            raise warp.fail(BadAccess, f"mbarrier address {offset:#x} is not aligned to 8 bytes")
        cta.mbarriers[offset] = MBarrier(cta, offset, count)
        cta.mbarriers[offset].author = warp

    def show_mbarriers(self, warp: Warp) -> None:
        """A fence of the warp: from now on copies may complete on the mbarriers it has initialised."""
        for cta in self.cluster.ctas:
            for barrier in cta.mbarriers.values():
                if barrier.author is warp:
                    barrier.author = None

    def drop_mbarrier(self, address: int) -> None:
        del self.peer(address >> 24).mbarriers[address & 0xFFFFFF]

    def mbarrier(self, address: int, warp: Warp | None = None) -> MBarrier:
        address &= 0xFFFFFFFF  # generic shared addresses carry the window above
        cta, offset = self.peer(address >> 24, warp), address & 0xFFFFFF
        found = cta.mbarriers.get(offset)
        if found is None:
            raise IllegalInstruction(f"no mbarrier was initialised at {offset:#x} of CTA {cta.coords}")
        return found

    def named_barrier(self, number: int) -> NamedBarrier:
        if not 0 <= number < 16:
            raise IllegalInstruction(f"named barrier {number}: 0 to 15 exist")
        if number not in self.named:
            self.named[number] = NamedBarrier(self, number)
        return self.named[number]

    def live_warps(self) -> int:
        return sum(not w.done for w in self.warps)

    def warp_done(self, warp: Warp) -> None:
        self.launch.counters.add_hits(warp)
        groups = warp.state.get("bulk")
        if groups is not None and self.launch.options.strict_exit and groups.unread():
            raise IllegalInstruction(f"{warp.describe()} exits with bulk stores it has not waited for")
        for named in self.named.values():
            if named.expected is None:
                named.settle()
        if not self.live_warps():
            self.tmem.cta_done()


class Cluster:
    def __init__(self, launch: Launch, number: int, first: tuple):
        self.launch, self.number, self.first = launch, number, first
        self.order = Order() if launch.options.race else None
        self.ctas: list[Cta] = []
        self.barrier = ClusterBarrier(self)
        self.rendezvous: dict = {}
        cx, cy, cz = launch.cluster
        for rank in range(cx * cy * cz):
            coords = (first[0] + rank % cx, first[1] + rank // cx % cy, first[2] + rank // (cx * cy))
            self.ctas.append(Cta(launch, self, coords, rank))
        launch.counters.ctas += len(self.ctas)

    def live(self) -> list[Warp]:
        return [w for cta in self.ctas for w in cta.warps if not w.done]

    def free(self) -> None:
        """Let go of its memory, 35 MB for a CTA of 16 warps; registers, which take long to make, serve the next one.

        Warps, CTAs and operations know each other, so that no reference count would fall to zero, and the garbage
        collector comes late: it knows nothing of the size of arrays."""
        for cta in self.ctas:
            for warp in cta.warps:
                self.launch.spare.append(warp.registers)
                vars(warp).clear()
            vars(cta).clear()
        vars(self).clear()


@dataclass
class Launch:
    """One kernel launch. `params` holds the bytes of the kernel parameters in their declared layout."""

    program: object
    grid: tuple
    block: tuple
    cluster: tuple
    shared_bytes: int
    params: np.ndarray
    options: Options = field(default_factory=Options)
    sms: int = 132
    host: HostMemory = HOST
    ahead: Unfinished | None = None  # of the launch before
    lets_start: bool = False  # did a warp let the next launch start
    lets_start_early: bool = False  # before what was ahead had landed?

    def __post_init__(self):
        kernel: Kernel = self.program.kernel
        self.param_address = self.params.ctypes.data
        self.host.allow(self.param_address, self.param_address + self.params.size)
        self.param_offsets = {p.name: p.offset for p in kernel.params}
        self.rng = random.Random(self.options.seed)
        self.engine = Engine(self.options.mode, self.rng)
        self.counters = Counters()
        self.steps = 0
        self.queue = self._clusters()
        self.resident: list[Cluster] = []
        self.exited: list[Cluster] = []  # with operations in flight
        self.taken = 0
        self.spare: list[Registers] = []  # of warps that are gone
        self.tensor_maps: dict = {}
        self._priority: dict = {}

    def _clusters(self):
        cx, cy, cz = self.cluster
        gx, gy, gz = self.grid
        if gx >= 1 << 31 or max(gy, gz) >= 1 << 16:
            raise IllegalInstruction(f"grid {self.grid} is beyond what a GPU takes: (2147483647, 65535, 65535)")
        if gx % cx or gy % cy or gz % cz:
            raise IllegalInstruction(f"grid {self.grid} is not a multiple of the cluster {self.cluster}")
        return iter([(x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)])

    def registers(self) -> Registers:
        """For a new warp, poisoned."""
        if not self.spare:
            return Registers(self.program.kernel.counts)
        self.spare[-1].poison()
        return self.spare.pop()

    def next_cluster(self) -> tuple | None:
        """Take a cluster off the grid: for residency, or for cluster launch control."""
        self.taken += 1
        return next(self.queue, None)

    def run(self) -> Counters:
        with np.errstate(all="ignore"):
            self._admit(self.options.resident)
            while self.resident:
                self._turn()
                self._retire()
                self._admit(self.options.resident)
            while self.engine.advance(set()):  # stores nobody waited for still land
                pass
            self._retire()
        return self.counters

    def _retire(self) -> None:
        """Clusters without a live warp make room, and are freed once nothing in flight is theirs."""
        self.exited += [c for c in self.resident if not c.live()]
        if not self.exited:
            return
        self.resident = [c for c in self.resident if c.live()]
        needed = {op.warp.cta.cluster for op in self.engine.pending}
        for cluster in self.exited:
            if cluster not in needed:
                for cta in cluster.ctas:
                    for warp in cta.warps:
                        self._priority.pop(warp, None)
                cluster.free()
        self.exited = [c for c in self.exited if c in needed]

    def _admit(self, wanted: int) -> bool:
        before = len(self.resident)
        while len(self.resident) < wanted:
            first = self.next_cluster()
            if first is None:
                break
            self.resident.append(Cluster(self, self.taken, first))
        return len(self.resident) > before

    def _turn(self) -> None:
        """One pass over the warps, in the scheduler's order."""
        warps = [w for c in self.resident for w in c.live()]
        able = [w for w in warps if w.runnable()]
        if not able:
            self._stalled(warps)
            return
        for warp in self._ordered(able):
            if warp.runnable():
                self.steps += self._run(warp)
                self.engine.tick()
        self._relieve_polls()

    def _ordered(self, able: list) -> list:
        if self.options.scheduler == "round_robin":
            return able
        if self.options.scheduler == "random":
            return [self.rng.choice(able) for _ in able]
        return self._by_priority(able)

    def _by_priority(self, able: list) -> list:
        """One warp runs as far as it can before the next gets a turn; now and then the favourite changes."""
        for warp in able:
            self._priority.setdefault(warp, self.rng.random())
        if self.rng.random() < 0.02:
            self._priority[self.rng.choice(able)] = self.rng.random()
        return [max(able, key=lambda warp: self._priority[warp])]

    def _run(self, warp: Warp) -> int:
        quantum = self.rng.randint(1, 8) if self.options.scheduler == "random" else 16
        try:
            return warp.run(quantum)
        except EmulatorError as error:
            if "PTX line" in str(error):
                raise
            raise warp.fail(type(error), str(error)) from None

    def _relieve_polls(self) -> None:
        """A loop that polls memory must not starve the operation it waits for."""
        if self.options.max_steps is not None and self.steps > self.options.max_steps:
            limit = self.options.max_steps
            raise StepLimit(f"more than max_steps={limit} steps; who stands where:\n{self._report()}")
        mark = getattr(self, "_poll_mark", 0)
        if self.steps - mark > STARVED:
            self._poll_mark = self.steps
            if not self.engine.advance(set()) and self.ahead is not None:
                self.ahead.land()

    def _stalled(self, warps: list) -> None:
        """Nobody can run: complete an operation or the launch before, let lanes overtake, polls look again, bring more
        clusters in, or report."""
        awaited = {f.wait.barrier for w in warps for f in w.fragments if isinstance(f.wait, MBarrierWait)}
        if self.engine.advance(awaited) or (self.ahead is not None and self.ahead.land()):
            return
        for warp in warps:
            if len(warp.fragments) > 1 and not warp.independent:
                warp.independent = True
                if warp.runnable():
                    return
        if self._look_again([f for w in warps for f in w.fragments if isinstance(f.wait, MemoryWait)]):
            return
        if self._admit(len(self.resident) + 1):
            return
        raise Deadlock("no warp can run and nothing is in flight:\n" + self._report())

    def _look_again(self, polls: list) -> bool:
        """More clusters do not come in for these: who polls may hold what another needs to start."""
        if polls and min(fragment.wait.times for fragment in polls) > PATIENCE:
            raise Deadlock(f"nothing is in flight, and polls looked {PATIENCE} times in vain:\n" + self._report())
        for fragment in polls:
            fragment.wait = None
        return bool(polls)

    def _report(self) -> str:
        lines = [line for c in self.resident for w in c.live() for line in w.standing()]
        pending = [f"{type(op).__name__} not ready: {op.describe()}" for op in self.engine.pending]
        return "\n".join("  " + line for line in [*lines, *pending])
