"""Our Hopper kernels for packed sequences, emulated, against float64: lengths, masks, NaN next door, wrong lengths.

Every run: each case under one schedule, rotating by day. scripts/test --all: each case under four.
"""

import contextlib
import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

import cute_flash
from cute_flash import varlen
from cute_flash.arch.sm90 import sequences
from cute_flash.spec import device as device_facts
from cute_flash.spec import settings

from .. import oracle, packed
from ..packed import LONG, SHORT, SHORTEST, Inputs, PackedCase, cases, make_inputs, same
from .hopper import ARCH, SCHEDULES, SMS, Schedule, counters_left_at_zero, turn

ERROR = 4e-3  # of bfloat16's output, as tests/emulator/test_hopper_forward.py


@contextlib.contextmanager
def emulated(schedule: Schedule, sms: int = SMS):
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(counters_left_at_zero())
        enter(mock.patch.dict(device_facts._SM_COUNTS, {device_facts.ARCHES[ARCH]: sms}))
        enter(settings.override(cache_dir=None, backend=None, strict=False))
        enter(cute_flash.emulate(ARCH, **schedule.knobs))
        yield


def attend(case: PackedCase, inputs: Inputs, schedule: Schedule, sms: int = SMS, hints: dict = LONG):
    qkv, options = (inputs.q, inputs.k, inputs.v), {**inputs.lengths, **case.options, **hints}
    with emulated(schedule, sms):
        return cute_flash.attention_varlen(*qkv, **options, return_lse=True, backend="sm90")


def gradients(
    case: PackedCase, inputs: Inputs, schedule: Schedule, sms: int = SMS, through_lse: bool = False, **options: bool
):
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with emulated(schedule, sms):
        out, lse = cute_flash.attention_varlen(
            *leaves, **inputs.lengths, **LONG, **case.options, **options, return_lse=True, backend="sm90"
        )
        outputs, given = ([out, lse], [inputs.dout, inputs.dlse]) if through_lse else ([out], [inputs.dout])
        return torch.autograd.grad(outputs, leaves, given)


def check_gradients(found: tuple[torch.Tensor, ...], exact: oracle.Gradients, rows: tuple = (..., ...)) -> None:
    """`rows`: of q, and of k and v, that are looked at."""
    for name, grad, right in zip(("dq", "dk", "dv"), found, exact, strict=True):
        at = rows[0] if name == "dq" else rows[1]
        grad, right = grad[at], right[at]
        if right.norm() <= 1e-3 * math.sqrt(right.numel()):  # one key: P = 1 and dP = delta, but for rounding
            assert grad.numel() == 0 or grad.abs().max() <= 2e-2, name
        else:
            assert oracle.relative_error(grad, right) < 6e-3, name


def check(case: PackedCase, inputs: Inputs, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    right, _ = packed.exact(case, inputs)
    assert oracle.relative_error(found[0], right.out) < ERROR
    assert oracle.lse_excess(found[1], right.lse) <= 1


def grid() -> list[tuple[PackedCase, int, dict]]:
    """(case, multiprocessors, hints)."""
    d128 = {"head_dim": 128, "head_dim_v": 128, "dtype": "bfloat16"}
    grouped = cases(**d128, heads_q=4, heads_kv=2)
    found = [(case, (SMS, 3)[i % 2], LONG) for i, case in enumerate(grouped)]
    found += [(case, (3, SMS)[i % 2], SHORT) for i, case in enumerate(grouped)]
    found += [(case, (2, SMS)[i % 2], SHORTEST) for i, case in enumerate(grouped[::3])]
    found += [(case, SMS, LONG) for case in cases(head_dim=72, head_dim_v=40, dtype="float16")[::3]]
    found += [(case, 2, LONG) for case in cases(head_dim=256, head_dim_v=256, dtype="bfloat16", heads_q=1)[1::4]]
    found.append((same(5, 700, *range(8), causal=True, **d128), 4, LONG))  # one long among many short
    return found


GRID = grid()
HINTS = {4096: "", 64: "-short", 16: "-shortest"}
CHOSEN = [SCHEDULES[i] for i in (1, 4, 6, 11)]


def marks(at: int, n: int, days: int):
    """The at-th cell has its turn every so many days, under CHOSEN one after the other; the rest is slow."""
    due = (turn() + at) % days == 0 and (turn() // days + at + n) % len(CHOSEN) == 0
    return () if due else pytest.mark.slow


RUNS = [
    pytest.param(*cell, schedule, marks=marks(at, n, 5),
                 id=f"{cell[0]}-sms{cell[1]}{HINTS[cell[2]['max_seqlen_q']]}-{schedule}")
    for at, cell in enumerate(GRID) for n, schedule in enumerate(CHOSEN)
]  # fmt: skip


@pytest.mark.parametrize(("case", "sms", "hints", "schedule"), RUNS)
def test_against_float64(case, sms, hints, schedule, poisoned_empty):
    inputs = make_inputs(case)
    check(case, inputs, attend(case, inputs, schedule, sms, hints))


def test_a_single_row_of_any_stride():
    """The stride of a dimension of one entry says nothing, and may be no multiple of 16 bytes: here 1, and odd."""
    case = PackedCase((1,), (1,), 4, 2, 128, 128, dtype="bfloat16")
    inputs = make_inputs(case)
    q, k = (x.as_strided(x.shape, (row, 128, 1)) for x, row in ((inputs.q, 1), (inputs.k, 257)))
    lying = replace(inputs, q=q, k=k)
    check(case, inputs, attend(case, lying, SCHEDULES[1]))


@pytest.mark.parametrize("hints", [LONG, SHORT, SHORTEST], ids=["long", "short", "shortest"])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_stays_in_its_sequence(causal, hints):
    """Every second sequence is NaN; the others, which lie in the same tiles of memory, are right."""
    lengths = (3, 65, 5, 1, 64, 190, 2)
    case = same(*lengths, head_dim=128, head_dim_v=128, dtype="bfloat16", causal=causal)
    inputs, clean = make_inputs(case), make_inputs(case)
    hit = torch.zeros(sum(lengths), dtype=torch.bool)
    for first, last in itertools.islice(itertools.pairwise(inputs.cu_seqlens_q.tolist()), 0, None, 2):
        hit[first:last] = True
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor[hit] = math.nan
    right, _ = packed.exact(case, clean)
    out, lse = attend(case, inputs, SCHEDULES[1], 2, hints)
    assert oracle.relative_error(out[~hit], right.out[~hit]) < ERROR
    assert oracle.lse_excess(lse[:, ~hit], right.lse[:, ~hit]) <= 1
    assert out[hit].isnan().all()


def backward_grid() -> list[tuple[PackedCase, int, bool]]:
    """(case, multiprocessors, is there a gradient through LSE)."""
    found = []
    for dim, dtype, chosen in ((128, "bfloat16", slice(None)), (64, "float16", slice(0, None, 3))):
        grouped = cases(head_dim=dim, head_dim_v=dim, dtype=dtype, heads_q=4, heads_kv=2)[chosen]
        found += [(case, (SMS, 3)[i % 2], case.causal and case.window is None) for i, case in enumerate(grouped)]
    found += [(case, 2, False) for case in cases(head_dim=96, head_dim_v=72, dtype="bfloat16")[1:8:3]]
    found += [(case, 3, case.causal) for case in cases(head_dim=192, head_dim_v=128, dtype="bfloat16")[2::7]]
    found += [(case, 2, False) for case in cases(head_dim=160, head_dim_v=192, dtype="float16")[3::12]]
    return found


BACKWARD_RUNS = [
    pytest.param(*cell, schedule, marks=marks(at, n, 6),
                 id=f"{cell[0]}-sms{cell[1]}{'-dlse' if cell[2] else ''}-{schedule}")
    for at, cell in enumerate(backward_grid()) for n, schedule in enumerate(CHOSEN)
]  # fmt: skip


@pytest.mark.parametrize(("case", "sms", "through_lse", "schedule"), BACKWARD_RUNS)
def test_gradients_against_float64(case, sms, through_lse, schedule, poisoned_empty):
    inputs = make_inputs(case)
    exact = packed.exact(case, inputs)[1] if through_lse else packed.exact_without_lse(case, inputs)
    check_gradients(gradients(case, inputs, schedule, sms, through_lse), exact)


@pytest.mark.parametrize(
    ("head_dim", "causal", "window"),
    [
        (128, True, None),
        pytest.param(128, False, None, marks=pytest.mark.slow),
        pytest.param(64, False, (70, 20), marks=pytest.mark.slow),
        pytest.param(192, True, None, marks=pytest.mark.slow),
    ],
)
def test_deterministic_gradients_repeat(head_dim, causal, window, poisoned_empty):
    """Sequences of several key tiles, among which some CTAs wait for others."""
    dims = {"head_dim": head_dim, "head_dim_v": head_dim, "heads_q": 2, "heads_kv": 1}
    case = PackedCase((150, 3, 300), (290, 130, 200), causal=causal, window=window, dtype="bfloat16", **dims)
    inputs = make_inputs(case)
    first, again = (gradients(case, inputs, SCHEDULES[i], sms, deterministic=True) for i, sms in ((1, 4), (6, 3)))
    check_gradients(first, packed.exact_without_lse(case, inputs))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_nan_reaches_no_other_gradient():
    lengths = (3, 65, 5, 1, 64, 190, 2)
    case = same(*lengths, head_dim=128, head_dim_v=128, dtype="bfloat16", causal=True)
    inputs, exact = make_inputs(case), packed.exact_without_lse(case, make_inputs(case))
    hit = torch.zeros(sum(lengths), dtype=torch.bool)
    for first, last in itertools.islice(itertools.pairwise(inputs.cu_seqlens_q.tolist()), 0, None, 2):
        hit[first:last] = True
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout):
        tensor[hit] = math.nan
    check_gradients(gradients(case, inputs, SCHEDULES[1], 2), exact, (~hit, ~hit))


def test_more_sequences_than_are_sorted():
    """Two CTAs count the tiles of 1100 sequences; a search of three rounds finds each."""
    lengths = tuple((i * 7) % 3 for i in range(1100))
    case = same(*lengths, heads_q=1, head_dim=64, head_dim_v=64, dtype="bfloat16", causal=True)
    inputs = make_inputs(case)
    varlen._warm.clear()
    with mock.patch.object(sequences, "SORTED", 4):
        check(case, inputs, attend(case, inputs, SCHEDULES[1], 4, SHORT))
    varlen._warm.clear()


def test_lengths_out_of_order_do_not_hang():
    """Two sequences of the same rows, whose parts of dQ are added in turn: each counts the other's additions, too."""
    case = same(500, dtype="bfloat16")
    starts = torch.tensor((0, 500, 0, 500), dtype=torch.int32)
    lying = replace(make_inputs(case), cu_seqlens_q=starts, cu_seqlens_k=starts.clamp(max=256))
    found = gradients(case, lying, SCHEDULES[1], deterministic=True)
    assert all(grad.shape == x.shape for grad, x in zip(found, (lying.q, lying.k, lying.v), strict=True))


EXTREMES = [(0, 200, -(2**31), 210, 256), (-(2**31), 100, -(2**31), 2**31 - 1, -(2**31))]  # differences pass 32 bits


@pytest.mark.parametrize(("seed", "starts"), [*((seed, None) for seed in range(4)), *enumerate(EXTREMES)])
def test_lengths_out_of_order_touch_nothing_else(seed, starts):
    """The emulator watches every address, and that the counter is zero again; and the next call is right."""
    case = same(100, 30, 70, 56, dtype="bfloat16", causal=True)
    inputs = make_inputs(case)
    torch.manual_seed(seed)
    wild = torch.randint(-1000, 2000, (5,)) if starts is None else torch.tensor(starts)
    wild = wild.int()
    fields = {"cu_seqlens_q": wild, "cu_seqlens_k": wild.flip(0).contiguous()}
    gradients(case, Inputs(**{**vars(inputs), **fields}), SCHEDULES[seed], 3)
    check(case, inputs, attend(case, inputs, SCHEDULES[seed], 3))
