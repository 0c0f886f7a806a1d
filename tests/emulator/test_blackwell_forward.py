"""Our Blackwell forward, emulated, against float64: tile edges, masks, groups, lengths, head dims, hard values.

Every run: each case under one schedule, rotating by day. scripts/test --all: each case under all of them.
"""

import pytest

from .. import oracle
from ..cases import Case, make_inputs
from ..runner import Runner
from .hopper import SCHEDULES, Schedule, attend, turn

ON_BLACKWELL = {"arch": "sm_100a"}


def case(dims, lengths, heads=(1, 1), batch=1, causal=False, **fields) -> Case:
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    return Case(batch, *lengths, *heads, *dims, causal, **fields)


def causal(dims, lengths, **fields) -> Case:
    return case(dims, lengths, causal=True, **fields)


# Neighbours share a kernel: a process compiles each once. Two query tiles of 128 rows in a CTA up to width_v 128, one
# beyond; 128 keys a step.
CASES = (
    case(64, (1, 1), batch=2),
    case(64, (127, 129)),
    case(64, (129, 127)),
    case(64, (257, 255), heads=(2, 1)),
    case(64, (64, 1025)),  # nine steps through a ring of eight
    case(40, (129, 64), heads=(4, 1)),
    case(64, (65, 191), heads=(2, 1), layout="heads_first", values="outliers"),
    case(96, (64, 127), heads=(2, 2)),
    case(80, (193, 129)),
    case(128, (1, 1), heads=(7, 1)),
    case(128, (128, 128)),
    case(128, (129, 257)),
    case(128, (256, 512)),
    case(128, (65, 160), values="very_negative"),
    case(128, (64, 300), values="huge_score"),
    case(128, (63, 193), values="constant"),
    case(128, (130, 513), values="falling"),  # tiles are visited from the last: maxima rise at each
    case(128, (130, 385), values="rising"),
    case(192, (129, 113)),
    case((192, 128), (257, 129)),
    case(256, (129, 81)),
    case(256, (64, 385), values="falling"),
    case((256, 64), (130, 200)),
    case((64, 256), (130, 200)),
    case(64, (65, 129), dtype="float16"),
    case(128, (129, 200), dtype="float16"),
    causal(64, (129, 129)),
    causal(64, (257, 257)),
    causal(64, (65, 1)),  # 64 rows see no key
    causal(64, (64, 192)),
    causal(40, (127, 65), heads=(7, 1)),
    causal(96, (127, 193)),
    causal(72, (63, 129), heads=(2, 1)),
    causal(128, (127, 127)),
    causal(128, (128, 192)),
    causal(128, (256, 256)),  # the first query tile sits out a step
    causal(128, (256, 320)),  # and here no row of the second sees all of its last one
    causal(128, (513, 130), heads=(2, 1), batch=2),  # query tiles that see no key at all
    causal(128, (300, 513), values="falling"),
    causal(128, (191, 191), values="rising"),
    causal(128, (65, 65), heads=(4, 1)),
    causal(128, (129, 129), values="very_negative"),
    causal(192, (129, 129)),
    causal((192, 128), (257, 300)),
    causal(256, (129, 65)),
    causal(256, (65, 321)),
    causal(128, (257, 129), dtype="float16"),
)


def schedules():
    """Every case under every schedule; those whose turn it is not are slow."""
    for index, each in enumerate(CASES):
        for number, schedule in enumerate(SCHEDULES):
            due = (index + turn()) % len(SCHEDULES) == number
            yield pytest.param(each, schedule, id=f"{each}-{schedule}", marks=[] if due else [pytest.mark.slow])


def check(each: Case, schedule: Schedule, **knobs):
    inputs = make_inputs(each)
    answer = attend(inputs, each.causal, None, strict_exit=True, **ON_BLACKWELL, **schedule.knobs, **knobs)
    result = (answer.out, answer.lse)
    Runner(inputs.q.device, each.torch_dtype).check(*inputs.qkv, result=result, causal=each.causal)
    return answer


def test_at_least_forty_shapes():
    assert len(set(CASES)) == len(CASES) >= 40


@pytest.mark.parametrize("each, schedule", schedules())
def test_right_under_every_schedule(each: Case, schedule: Schedule, poisoned_empty):
    check(each, schedule)


@pytest.mark.parametrize("dims", [64, 128, 192], ids=str)
def test_persistent_ctas_take_several_tiles(dims, poisoned_empty):
    """Two multiprocessors, three work tiles or more: barriers, ring and tensor memory carry over."""
    check(case(dims, (200, 260), heads=(3, 1)), Schedule("late", "random", 5), sms=2)


def test_without_lse(poisoned_empty):
    """A kernel of its own: what inference calls."""
    each = causal(64, (65, 129), heads=(2, 1))
    inputs = make_inputs(each)
    knobs = Schedule("late", "random", 4).knobs
    answer = attend(inputs, True, None, return_lse=False, **ON_BLACKWELL, **knobs)
    assert answer.lse is None
    assert oracle.relative_error(answer.out, oracle.forward(*inputs.qkv, causal=True).out) < 4e-3


def rescaled_share(each: Case) -> float:
    """Of the warps' chances to rescale O, how many were taken: told by what was stored to tensor memory."""
    answer = check(each, Schedule("eager", "round_robin", 0))
    steps = -(-each.seqlen_k // 128)
    warps = 4 * 2 * -(-each.seqlen_q // 256) * each.batch * each.heads_q
    row = 32 * 4  # bytes of one column of a warp's rows
    products = (each.head_dim // 16) * 128 + 8 * each.head_dim_v  # accumulator columns that matrix products write
    always = warps * steps * row * (64 + products)  # 64: P
    return (answer.counters[0].tmem_written - always) / (warps * (steps - 1) * row * each.head_dim_v)


def test_most_rescales_are_skipped_on_normal_inputs():
    assert rescaled_share(case(64, (256, 1024))) <= 0.1


def test_rising_maxima_are_rescaled():
    assert rescaled_share(case(64, (256, 512), values="falling")) >= 0.5
