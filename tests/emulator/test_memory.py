"""Memory instructions on a bare kernel: spaces, vectors, matrices, atomics, copies, barriers, clusters, TMEM."""

import gc
import re
import weakref

import numpy as np
import pytest

from cute_flash.emulator import BadAccess, Deadlock, IllegalInstruction, Race, StepLimit, machine
from cute_flash.emulator.registers import POISON16, POISON32, POISON64

from .bare import per_lane, run

RNG = np.random.default_rng(1)
LANE = np.arange(32)
WORDS = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)

# %r20: address of dynamic shared memory; %r21: 4 * lane; %d20: %d0 + 4 * thread
PROLOGUE = """
    mov.u32 %r20, dynamic_smem;
    and.b32 %r22, %r0, 31;
    shl.b32 %r21, %r22, 2;
    mul.wide.u32 %d20, %r0, 4;
    add.s64 %d20, %d20, %d0;
"""
# An mbarrier at %r20 + 2048 that expects one arrival; all threads see it.
MBARRIER = (
    PROLOGUE
    + """
    add.u32 %r23, %r20, 2048;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [%r23], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
)
WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p9, [%r23], 0;
    @!%p9 bra WAIT;
"""


def test_shared_vectors_and_bytes():
    body = (
        PROLOGUE
        + """
    shl.b32 %r24, %r22, 4; add.u32 %r24, %r24, %r20;
    ld.global.b32 %r1, [%d20];
    add.u32 %r2, %r1, 1; add.u32 %r3, %r1, 2; add.u32 %r4, %r1, 3;
    st.shared.v4.b32 [%r24], {%r1, %r2, %r3, %r4};
    ld.shared.v2.b32 {%r5, %r6}, [%r24+8];
    ld.shared.s8 %r7, [%r24];
    add.u32 %r6, %r6, %r7;
    st.global.b32 [%d20], %r6;
"""
    )
    data = WORDS.copy()
    run(body, data)
    assert (data == WORDS + 3 + WORDS.astype(np.int8).astype(np.uint32)).all()


def test_ldmatrix_stmatrix_round_trip():
    """stmatrix then ldmatrix.trans gives each 8x8 tile transposed."""
    body = (
        PROLOGUE
        + """
    ld.global.b32 %r1, [%d20]; ld.global.b32 %r2, [%d20+128];
    ld.global.b32 %r3, [%d20+256]; ld.global.b32 %r4, [%d20+384];
    shl.b32 %r24, %r22, 4; add.u32 %r24, %r24, %r20;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r24], {%r1, %r2, %r3, %r4};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r5, %r6, %r7, %r8}, [%r24];
    st.global.b32 [%d20], %r5; st.global.b32 [%d20+128], %r6;
    st.global.b32 [%d20+256], %r7; st.global.b32 [%d20+384], %r8;
"""
    )
    tiles = RNG.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    data = tiles.copy()
    run(body, data)
    assert (data == tiles.transpose(0, 2, 1)).all()


@pytest.mark.parametrize(
    "kind, op, values, want",
    [
        ("u32", "add", LANE.astype(np.uint32), np.uint32(496)),
        ("s32", "min", (LANE - 9).astype(np.int32), np.int32(-9)),
        ("f32", "add", np.full(32, 0.5, np.float32), np.float32(16)),
        ("u32", "xor", WORDS, np.bitwise_xor.reduce(WORDS)),
    ],
)
def test_reductions_into_global_memory(kind, op, values, want):
    total = np.zeros(1, values.dtype)
    run(PROLOGUE + f"ld.global.b32 %r1, [%d20]; red.global.{op}.{kind} [%d1], %r1;", values, total)
    assert total[0] == want


def test_vector_reduction_and_compare_and_swap():
    totals = np.zeros(4, np.float32)
    run(
        "red.global.add.v4.f32 [%d0], {%r1, %r1, %r2, %r2};".replace("%r1", "0f3F800000").replace("%r2", "0f40000000"),
        totals,
    )
    assert (totals == [32, 32, 64, 64]).all()
    seen, lock = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    run(
        PROLOGUE + "add.u32 %r2, %r0, 1; atom.global.cas.b32 %r1, [%d1], %r0, %r2; st.global.b32 [%d20], %r1;",
        seen,
        lock,
    )
    assert lock[0] == 32 and (seen == LANE).all()


def test_bulk_copy_in_and_reduce_out():
    body = (
        MBARRIER
        + """
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d30, [%r23], 128;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%d0], 128, [%r23];
"""
        + WAIT
        + """
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r20], 128;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""
    )
    source, target = np.arange(32, dtype=np.float32), np.ones(32, np.float32)
    backing = np.zeros(64 + 8, np.float32)  # 16-byte aligned places
    start = -backing.ctypes.data % 16 // 4
    a, b = backing[start : start + 32], backing[start + 32 : start + 64]
    a[:], b[:] = source, target
    for mode in ("eager", "late"):
        b[:] = target
        run(body, a, b, mode=mode)
        assert (b == source + 1).all()


def test_cp_async_groups():
    body = (
        PROLOGUE
        + """
    add.u32 %r24, %r20, %r21;
    cp.async.ca.shared.global [%r24], [%d20], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.b32 %r1, [%r24];
    add.u32 %r1, %r1, 1;
    st.global.b32 [%d20], %r1;
"""
    )
    data = WORDS.copy()
    run(body, data, mode="late")
    assert (data == WORDS + 1).all()
    with pytest.raises(Race):
        run(body.replace("cp.async.wait_group 0;", ""), WORDS.copy(), mode="eager")


SWAP = (
    PROLOGUE
    + """
    shl.b32 %r30, %r0, 2; add.u32 %r31, %r30, %r20;
    ld.global.b32 %r1, [%d20];
    st.shared.b32 [%r31], %r1;
    bar.sync 0;
    xor.b32 %r32, %r30, 128; add.u32 %r32, %r32, %r20;
    ld.shared.b32 %r2, [%r32];
    st.global.b32 [%d20], %r2;
"""
)


def test_exchange_between_warps_needs_its_barrier():
    data = RNG.integers(0, 1 << 32, 64, dtype=np.uint32)
    swapped = data.copy()
    run(SWAP, swapped, block=64)
    assert (swapped == np.roll(data, 32)).all()
    with pytest.raises(Race, match="bytes 0x"):
        run(SWAP.replace("bar.sync 0;", ""), data.copy(), block=64, scheduler="round_robin")


def test_cluster_exchange():
    """Each CTA of a pair reads the other's shared memory between two cluster barriers."""
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    body = (
        PROLOGUE
        + """
    mov.u32 %r40, %cluster_ctarank; shl.b32 %r41, %r40, 5; add.u32 %r41, %r41, %r0;
    mul.wide.u32 %d21, %r41, 4; add.s64 %d21, %d21, %d0;
    add.u32 %r31, %r21, %r20;
    ld.global.b32 %r1, [%d21];
    st.shared.b32 [%r31], %r1;
    SYNC
    xor.b32 %r42, %r40, 1; mapa.shared::cluster.u32 %r43, %r31, %r42;
    ld.shared::cluster.b32 %r2, [%r43];
    SYNC
    st.global.b32 [%d21], %r2;
"""
    )
    data = RNG.integers(0, 1 << 32, 64, dtype=np.uint32)
    swapped = data.copy()
    run(body.replace("SYNC", sync), swapped, grid=2, cluster=2)
    assert (swapped == np.roll(data, 32)).all()
    with pytest.raises(Race):
        run(body.replace("SYNC", "", 1).replace("SYNC", sync), data.copy(), grid=2, cluster=2)
    with pytest.raises((BadAccess, Race), match=r"exited|race"):
        run(
            body.replace("SYNC", sync, 1).replace("SYNC", ""),
            data.copy(),
            grid=2,
            cluster=2,
            scheduler="priority",
            seed=3,
        )


TMEM = """
    mov.u32 %r20, dynamic_smem;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 64;
    ld.shared.b32 %r50, [%r20];
    mul.wide.u32 %d20, %r0, 4; add.s64 %d20, %d20, %d0;
"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r50, 64;"


@pytest.mark.parametrize(
    "shape, registers, rows, columns",
    [
        ("16x256b.x1", 4, LANE // 4, 2 * (LANE % 4)),
        ("16x128b.x1", 2, LANE // 4, LANE % 4),
        ("16x64b.x1", 1, LANE // 4 + 8 * (LANE % 2), LANE // 2 % 2),
    ],
)
def test_tmem_shapes(shape, registers, rows, columns):
    """Store by rows, load by the shape: register 0 of lane l must be the element the shape names."""
    names = ", ".join(f"%r{n}" for n in range(1, 9))
    loads = "".join(f"add.u32 %r{n + 1}, %r0, {1000 * n};" for n in range(8))
    found = ", ".join(f"%r{60 + n}" for n in range(registers))
    body = (
        TMEM
        + loads
        + f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r50], {{{names}}};"
        + "tcgen05.wait::st.sync.aligned;"
        + f"tcgen05.ld.sync.aligned.{shape}.b32 {{{found}}}, [%r50];"
        + "tcgen05.wait::ld.sync.aligned; st.global.b32 [%d20], %r60;"
        + FREE
    )
    out = np.zeros(32, np.uint32)
    run(body, out, mode="late")
    assert (out == rows + 1000 * columns).all()


def test_tmem_store_needs_its_wait():
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r50], {%r0};"
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r60}, [%r50];"
    body = TMEM + store + load + FREE
    with pytest.raises(Race, match="TMEM"):
        run(body, np.zeros(32, np.uint32))


def test_one_kernel_names_one_cta_group():
    with pytest.raises(IllegalInstruction, match="mixes cta_group::1 and cta_group::2"):
        run(TMEM + FREE.replace("group::1", "group::2"), np.zeros(32, np.uint32))


def test_tmem_of_a_pair_is_allocated_by_both_or_not_at_all():
    both = (TMEM + FREE).replace("group::1", "group::2")
    run(both, np.zeros(32, np.uint32), grid=2, cluster=2)
    only_even = "mov.u32 %r30, %cluster_ctarank; setp.eq.u32 %p1, %r30, 0; @!%p1 bra END;" + both + "END:"
    with pytest.raises(Deadlock, match="other CTA of its pair"):
        run(only_even, np.zeros(32, np.uint32), grid=2, cluster=2)


def test_tmem_left_allocated():
    with pytest.raises(IllegalInstruction, match="still allocated"):
        run(TMEM, np.zeros(32, np.uint32))


@pytest.mark.parametrize(
    "body, error",
    [
        ("mov.u64 %d1, 64; ld.global.b32 %r1, [%d1];", BadAccess),
        ("ld.global.b64 %d1, [%d0+4];", BadAccess),
        ("mov.u32 %r1, 200000; ld.shared.b32 %r2, [%r1];", BadAccess),
        ("mov.u32 %r20, dynamic_smem; mbarrier.arrive.shared.b64 %d1, [%r20];", IllegalInstruction),
        ("bar.sync 3, 64;", Deadlock),
        (
            "setp.eq.u32 %p1, %r0, 0; @!%p1 bra END; elect.sync %r1|%p2, -1; bra END2; END: bar.sync 2, 64; END2:",
            Deadlock,
        ),
    ],
)
def test_mistakes_are_named(body, error):
    with pytest.raises(error, match="PTX line"):
        run(body, np.zeros(4, np.float64))


def test_a_step_limit_is_not_a_deadlock():
    """A poll of memory that nobody will write."""
    body = "AGAIN: ld.global.b32 %r1, [%d0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN;"
    with pytest.raises(StepLimit, match=r"more than max_steps=500 steps(.|\n)*PTX line") as caught:
        run(body, np.zeros(1, np.uint32), max_steps=500)
    assert not isinstance(caught.value, Deadlock)


def test_a_poll_of_what_nobody_writes_is_a_deadlock():
    body = "AGAIN: ld.acquire.gpu.global.b32 %r1, [%d0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN;"
    with pytest.raises(
        Deadlock, match=r"1000 times in vain(.|\n)*polls global address(.|\n)*which holds 0(.|\n)*PTX line"
    ):
        run(body, np.zeros(1, np.uint32))


def test_who_counts_how_often_it_polls_may_give_up():
    body = """mov.u32 %r2, 0;
        AGAIN: ld.acquire.gpu.global.b32 %r1, [%d0]; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 700; @%p1 bra AGAIN;
        st.global.b32 [%d0], %r2;"""
    out = np.zeros(1, np.uint32)
    run(body, out)
    assert out == 700


def test_memory_starts_as_nan():
    out = per_lane("mov.u32 %r20, dynamic_smem; ld.shared.b32 %r9, [%r20];", WORDS).view(np.float32)
    assert np.isnan(out).all()
    assert np.isnan(per_lane("mov.b32 %r9, %r100;", WORDS).view(np.float32)).all()


def test_results_land_as_late_as_allowed():
    """Without the wait the load has not landed: late mode shows poison even with race detection off."""
    body = (
        MBARRIER
        + """
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d30, [%r23], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%d1], 16, [%r23];
    ld.shared.b32 %r1, [%r20];
    st.global.b32 [%d20], %r1;
"""
        + WAIT
    )
    backing = np.zeros(8, np.float32)
    source = backing[-backing.ctypes.data % 16 // 4 :][:4]
    out = np.ones(32, np.float32)
    run(body, out, source, mode="late", race=False)
    assert np.isnan(out).all()
    run(body, out, source, mode="eager", race=False)
    assert (out == 0).all()
    with pytest.raises(Race):
        run(body, out, source, mode="eager")


def test_exit_with_a_load_in_flight():
    body = (
        MBARRIER
        + """
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d30, [%r23], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%d1], 16, [%r23];
"""
    )
    backing = np.zeros(8, np.float32)
    source = backing[-backing.ctypes.data % 16 // 4 :][:4]
    with pytest.raises(BadAccess, match="after it has exited"):
        run(body, np.ones(32, np.float32), source, mode="late")


# Thread n of a CTA adds its CTA's number, through shared memory and a bulk reduction, to element n of 32.
ADD_NUMBER = (
    MBARRIER
    + """
    mov.u32 %r2, %ctaid.x; add.u32 %r3, %r20, %r21;
    st.shared.b32 [%r3], %r2;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r20], 128;
    @%p1 cp.async.bulk.commit_group;
"""
)


@pytest.mark.parametrize("scheduler", machine.SCHEDULERS)
@pytest.mark.parametrize(
    "mode, waits, most", [("late", True, 6), ("random", True, 6), ("eager", False, 6), ("late", False, 40)]
)
def test_clusters_that_have_exited_hold_memory_only_for_what_is_in_flight(mode, waits, most, scheduler, monkeypatch):
    """Three clusters of two at a time, 20 in all. Found by reference counts: the garbage collector would come too
    late. A run of 300 CTAs had taken 8 GB."""
    alive, counts = weakref.WeakSet(), []

    class Counted(machine.Cta):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)
            counts.append(len(alive))

    monkeypatch.setattr(machine, "Cta", Counted)
    backing = np.zeros(36, np.uint32)
    total = backing[-backing.ctypes.data % 16 // 4 :][:32]
    body = ADD_NUMBER + "@%p1 cp.async.bulk.wait_group 0;" * waits
    gc.disable()
    try:
        run(body, total, grid=40, cluster=2, resident=3, mode=mode, scheduler=scheduler)
        assert not alive
    finally:
        gc.enable()
    assert (total == sum(range(40))).all()
    assert max(counts) == most and len(counts) == 40


def test_registers_start_as_nan_after_those_of_an_earlier_warp():
    """One a kind is read, then written; every second predicate starts as true."""
    body = """
    mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 5; add.u32 %r1, %r1, %r0;
    mul.wide.u32 %d9, %r1, 8; add.s64 %d9, %d9, %d0;
    cvt.u64.u32 %d10, %r60; cvt.u64.u16 %d11, %h60; add.s64 %d10, %d10, %d11; add.s64 %d10, %d10, %d60;
    selp.b64 %d12, 1, 0, %p60; add.s64 %d10, %d10, %d12;
    st.global.b64 [%d9], %d10;
    mov.b32 %r60, 1; mov.b16 %h60, 1; mov.b64 %d60, 1; setp.eq.u32 %p60, %r0, %r0;
"""
    out = np.zeros(3 * 32, np.uint64)
    run(body, out, grid=3, resident=1)
    assert (out.reshape(-1, 2) == POISON64 + POISON32 + POISON16 + np.array([0, 1], np.uint64)).all()


@pytest.mark.parametrize("grid", [(1, 1 << 16, 1), (1, 1, 1 << 16), (1 << 31, 1, 1)], ids=str)
def test_a_grid_that_no_gpu_takes_is_refused(grid):
    """CUDA programming guide, technical specifications; a GPU says `invalid configuration argument`."""
    with pytest.raises(IllegalInstruction, match=re.escape(f"grid {grid} is beyond")):
        run("", grid=grid)
