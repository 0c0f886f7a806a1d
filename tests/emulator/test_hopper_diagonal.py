"""What a Hopper warpgroup leaves out at the diagonal, and maxima taken from the bits of scores; emulated.

Key tiles that the diagonal hides from a warpgroup's 64 rows, and halves of them, depend on where query and key tiles
meet: on both lengths, and on the split that a CTA has.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from cute_flash.arch.sm90 import tiles
from cute_flash.spec.plan import Tile

from .. import oracle
from ..cases import Case, make_inputs
from .hopper import SCHEDULES, attend, turn, way_of_today

TOLERANCE = 4e-3  # P and the output are rounded to bfloat16, 2^-9 each

# Lengths: equal; more keys or fewer, by no multiple of a tile, so that the diagonal meets tiles elsewhere; rows without
# a key. Several query tiles a CTA: the next one's first scores are issued with the last P V of this one.
TILES = {
    "skips": (64, Tile(192, 96, stages=2, skips=True)),  # up to two hidden tiles, of which one is left out
    "both": (64, Tile(192, 128, stages=3, skips=True, halves=True)),
    "halves": (128, Tile(128, 128, stages=2, votes=True, late=True, ahead=16, halves=True)),
    "one slot": (256, Tile(128, 80, stages=2, votes=True, skips=True, triples=True)),  # of Q
}
LENGTHS = ((257, 257), (400, 431), (300, 203), (130, 65))


def run(inputs, tile: Tile, causal: bool, number: int, splits: int = 1):
    schedule = SCHEDULES[(number + turn()) % len(SCHEDULES)]
    with mock.patch.object(tiles, "forward_tile", lambda *_, **__: tile):
        return attend(inputs, causal, splits, sms=2, strict_exit=True, **schedule.knobs)


def combinations():
    """Each tile with half of the lengths a day, another half for its neighbour; the rest is slow."""
    for at, name in enumerate(TILES):
        for index, lengths in enumerate(LENGTHS):
            due = way_of_today(at + index, 2, 1) is not None
            yield pytest.param(name, lengths, id=f"{name}-{lengths}", marks=[] if due else [pytest.mark.slow])


@pytest.mark.parametrize("name, lengths", combinations())
def test_what_is_left_out_is_hidden(name, lengths, poisoned_empty):
    head_dim, tile = TILES[name]
    inputs = make_inputs(Case(1, *lengths, 2, 1, head_dim, head_dim, True))
    answer, exact = run(inputs, tile, True, LENGTHS.index(lengths)), oracle.forward(*inputs.qkv, causal=True)
    assert oracle.relative_error(answer.out, exact.out) < TOLERANCE
    assert oracle.lse_excess(answer.lse, exact.lse) <= 1


@pytest.mark.parametrize("splits", [2, 3])
def test_a_split_of_one_tile_keeps_it(splits, poisoned_empty):
    """Even where it is hidden from a warpgroup: each has scores of every split."""
    inputs = make_inputs(Case(1, 192, 384, 1, 1, 64, 64, True))
    answer, exact = run(inputs, TILES["both"][1], True, splits, splits), oracle.forward(*inputs.qkv, causal=True)
    assert oracle.relative_error(answer.out, exact.out) < TOLERANCE


def test_less_is_computed(poisoned_empty):
    """The first warpgroup of 128 rows leaves out a tile of 64 keys, or the scores of half a tile of 128; the latter not
    in a CTA's first query tile, here one of two."""
    inputs = make_inputs(Case(1, 512, 512, 1, 1, 64, 64, True))
    flops = [
        sum(counters.mma_flops for counters in run(inputs, tile, True, 0).counters)
        for tile in (Tile(128, 64), Tile(128, 64, skips=True), Tile(128, 128), Tile(128, 128, halves=True))
    ]
    product = 2 * 64 * 64 * 64  # 64 rows, keys and columns
    assert flops[0] - flops[1] == 4 * 2 * product
    assert flops[2] - flops[3] == 2 * product


@pytest.mark.parametrize("level", [-40.0, -0.0, 0.0, 40.0])
def test_maxima_from_bits(level, poisoned_empty):
    """Rows of one warp differ: all scores negative, some zero, a maximum that turns positive in a later tile."""
    inputs = make_inputs(Case(1, 65, 321, 1, 1, 256, 256, False))
    inputs.q[0, :, 0, 1:], inputs.k[0, :, 0, 1:] = 0.0, 0.0
    inputs.q[0, :, 0, 0] = 1.0
    inputs.k[0, :, 0, 0] = -torch.rand(321, generator=torch.Generator().manual_seed(1)).bfloat16() - 1
    inputs.k[0, 17, 0, 0] = level  # in the tile that is visited last
    inputs.q[0, ::3, 0, 0] = 16.0
    inputs.q[0, 1::3, 0, 0] = -16.0  # the same scores, positive
    answer, exact = run(inputs, TILES["one slot"][1], False, 0), oracle.forward(*inputs.qkv, causal=False)
    assert oracle.relative_error(answer.out, exact.out) < TOLERANCE
    assert oracle.lse_excess(answer.lse, exact.lse) <= 1


@pytest.mark.parametrize("hard", [np.nan, np.inf, -np.inf])
def test_hard_scores_stay_in_their_rows(hard, poisoned_empty):
    inputs = make_inputs(Case(1, 65, 161, 1, 1, 256, 256, False))
    inputs.q[0, 7::8, 0, 3] = hard
    answer, exact = run(inputs, TILES["one slot"][1], False, 1), oracle.forward(*inputs.qkv, causal=False)
    kept = torch.arange(65) % 8 != 7
    assert oracle.relative_error(answer.out[:, kept], exact.out[:, kept]) < TOLERANCE
    assert answer.out[:, ~kept].isnan().all()
