"""Where a mask meets a tile's edge on Hopper, emulated: the only key that a tile hides, the only row that sees one.

A score of 30 stands there, nearly all of its row: hidden, it must not weigh; seen, it must not be left out.
"""

import math
from dataclasses import dataclass
from unittest import mock

import pytest

from cute_flash.arch.sm90 import tiles

from .. import oracle
from ..cases import Case, make_inputs
from . import gradients as checker
from .gradients import EVERY_DAY, Cell
from .hopper import SCHEDULES, attend, turn, way_of_today
from .test_hopper_diagonal import TILES, TOLERANCE

SCORE = 30.0


@dataclass(frozen=True)
class Edge:
    case: Case
    at: tuple[int, int]  # (row, key) of the score
    tile: str = ""  # of TILES


def edge(dims, lengths, at, tile="", **options) -> Edge:
    return Edge(Case(1, *lengths, 2, 1, *(dims if isinstance(dims, tuple) else (dims, dims)), **options), at, tile)


def planted(case: Case, at: tuple[int, int]):
    """Inputs whose row and key at `at` are alike."""
    inputs, size = make_inputs(case), math.sqrt(SCORE / math.sqrt(case.head_dim))
    inputs.q[:, at[0]], inputs.k[:, at[1]] = size, size
    return inputs


FORWARD = (
    edge(128, (100, 219), (0, 127), window=(None, 7)),  # hidden from the first row alone, the last key of a tile
    edge(128, (256, 258), (127, 128), window=(0, None)),  # from the last row of a tile, the first key of one
    edge(64, (192, 193), (191, 192), "skips", causal=True),  # seen by a warpgroup's last row alone, a first key
    edge(64, (192, 193), (127, 128), "both", causal=True),
    edge(256, (128, 145), (63, 80), "one slot", causal=True),
    edge(128, (130, 67), (127, 64), "halves", causal=True),  # the first key of a half
)


def due(edges):
    """Half of them a day; the others are slow."""
    for at, each in enumerate(edges):
        marks = [] if way_of_today(at, 2, 1) is not None else [pytest.mark.slow]
        yield pytest.param(each, id=f"{each.case}-{each.at}-{each.tile}", marks=marks)


@pytest.mark.parametrize("each", due(FORWARD))
def test_forward(each, poisoned_empty):
    """One CTA takes all query tiles: the scores of one run into the next one's."""
    case, schedule = each.case, SCHEDULES[turn() % len(SCHEDULES)]
    inputs, chosen = planted(case, each.at), tiles.forward_tile
    if each.tile:
        chosen = lambda *_, **__: TILES[each.tile][1]  # noqa: E731
    with mock.patch.object(tiles, "forward_tile", chosen):
        answer = attend(inputs, case.causal, 1, window=case.window, sms=1, strict_exit=True, **schedule.knobs)
    exact = oracle.forward(*inputs.qkv, causal=case.causal, window=case.window)
    assert oracle.relative_error(answer.out, exact.out) < TOLERANCE
    assert oracle.lse_excess(answer.lse, exact.lse) <= 1


BACKWARD = (
    edge(64, (194, 192), (128, 127), causal=True),  # hidden from a query tile's first row, the last key of a tile
    edge(64, (130, 130), (127, 0), window=(126, None)),  # from its last row, the first key
    edge(64, (200, 200), (128, 127), window=(1, None)),  # seen by its first row alone, the last key
    edge(64, (200, 201), (127, 128), causal=True),  # by its last row, the first key
    edge(256, (100, 101), (63, 64), causal=True),  # in two kernels: both leave out what a warpgroup does not see
    edge((192, 128), (100, 101), (63, 64), causal=True),
)


@pytest.mark.parametrize("each", due(BACKWARD))
def test_backward(each):
    case, short = each.case, each.case.head_dim > 128  # two kernels where there are few keys
    with mock.patch.object(checker, "make_inputs", lambda case: planted(case, each.at)):
        found, inputs, _ = checker.gradients(Cell(case, short=short), EVERY_DAY[turn() % len(EVERY_DAY)])
    options = {"causal": case.causal, "window": case.window}
    out = oracle.forward(*inputs.qkv, **options).out
    # delta is made of O as it was rounded, which is 5% of dQ where one key has nearly all weight; likewise here
    slip = ((out.to(case.torch_dtype) - out) * inputs.dout).sum(-1).transpose(1, 2)
    right = oracle.backward(*inputs.qkv, inputs.dout, -slip, **options)
    for name, value, reference in zip(checker.NAMES, found, right, strict=True):
        assert oracle.relative_error(value, reference) < 0.01, name
