"""The worked numbers of the papers: the merge of two blocks, the bytes moved, the skipped tiles."""

import math

import pytest
import torch

from cute_flash.arch.reference import tiles
from cute_flash.arch.reference.backend import BACKEND
from cute_flash.spec.mask import CAUSAL, FULL
from cute_flash.spec.plan import Tile
from tests import direct, oracle

SCORES = (1.0, 3.0, 2.0, 5.0, 4.0, 7.0, 6.0, 2.0)
VALUES = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0)
PRINTED, PRINTED_SUM = 1e-4, 1e-3  # the worked numbers are given to four and three digits; a unit in the last place


def one_row(scores, values):
    """q, k, v of one query whose scores (at scale 1) and values are these; unused dimensions are 0."""
    q, k, v = (torch.zeros(1, n, 1, 8, dtype=torch.float64) for n in (1, len(scores), len(scores)))
    q[..., 0] = 1.0
    k[0, :, 0, 0] = torch.tensor(scores, dtype=torch.float64)
    v[0, :, 0, 0] = torch.tensor(values, dtype=torch.float64)
    return q, k, v


def attend(scores, values, tile_n=4):
    """(maximum, sum of exponentials, unnormalised output, output) of one row, through the reference backend."""
    got = direct.forward(BACKEND, *one_row(scores, values), scale=1.0, tile=Tile(1, tile_n))
    out, lse, row_max = got.out[0, 0, 0, 0].item(), got.lse.item(), max(scores)
    row_sum = math.exp(lse - row_max)
    return row_max, row_sum, out * row_sum, out


def test_first_block():
    row_max, row_sum, acc, out = attend(SCORES[:4], VALUES[:4])
    assert row_max == 5
    assert row_sum == pytest.approx(1.2034, abs=PRINTED)
    assert acc == pytest.approx(44.383, abs=PRINTED_SUM)
    assert out == pytest.approx(36.88, abs=5e-3)  # given to two digits


def test_second_block():
    row_max, row_sum, acc, _ = attend(SCORES[4:], VALUES[4:])
    assert row_max == 7
    assert row_sum == pytest.approx(1.4244, abs=PRINTED)
    assert acc == pytest.approx(88.780, abs=PRINTED_SUM)


def test_merging_two_blocks():
    first_max, first_sum, first_acc, _ = attend(SCORES[:4], VALUES[:4])
    second_max, second_sum, second_acc, _ = attend(SCORES[4:], VALUES[4:])
    alpha = math.exp(first_max - second_max)
    assert alpha == pytest.approx(0.1353, abs=PRINTED)
    row_sum, acc = alpha * first_sum + second_sum, alpha * first_acc + second_acc
    assert row_sum == pytest.approx(1.5873, abs=PRINTED)
    assert acc == pytest.approx(94.786, abs=PRINTED_SUM)
    assert acc / row_sum == pytest.approx(59.717, abs=PRINTED_SUM)
    online = attend(SCORES, VALUES, tile_n=4)
    assert online == pytest.approx((7, row_sum, acc, acc / row_sum), rel=1e-14)


@pytest.mark.parametrize("tile_n", [1, 2, 3, 4, 5, 8])
def test_every_tiling_is_plain_softmax(tile_n):
    weights = [math.exp(s) for s in SCORES]
    plain = sum(w * x for w, x in zip(weights, VALUES, strict=True)) / sum(weights)
    assert attend(SCORES, VALUES, tile_n)[3] == pytest.approx(plain, rel=1e-14)


def test_safe_softmax():
    """exp(1000) overflows float64; less the maximum, nothing does, and shifting all scores shifts only the LSE."""
    with pytest.raises(OverflowError):
        math.exp(1000)
    low, high = ([base, base + 1, base + 2] for base in (0.0, 1000.0))
    assert attend(high, VALUES[:3])[3] == pytest.approx(attend(low, VALUES[:3])[3], rel=1e-13)
    shifted = direct.forward(BACKEND, *one_row(high, VALUES[:3]), scale=1.0).lse.item()
    assert shifted == pytest.approx(1000 + math.log(1 + math.e + math.e**2), rel=1e-15)


# --------------------------------------------------------- N = 4096, head_dim 64, 32 heads, bf16, tile 128; per head

N, HEAD_DIM, BYTES, TILE = 4096, 64, 2, 128
MB = 1e6


def tile_pairs(mask) -> int:
    geometry = tiles.Geometry(mask, Tile(TILE, TILE), N, N)
    return sum(len(list(geometry.key_tiles(rows))) for rows in geometry.query_tiles())


def test_tiles_of_a_head():
    assert tile_pairs(FULL) == 32 * 32
    assert tile_pairs(CAUSAL) == 32 * 33 // 2


def test_bytes_of_standard_attention():
    scores = N * N * BYTES  # S in memory
    assert scores == pytest.approx(33.5 * MB, rel=2e-3)
    assert 4 * scores == pytest.approx(134 * MB, rel=2e-3)  # S written and read, P written and read
    qkvo = 4 * N * HEAD_DIM * BYTES  # Q, K, V in, O out
    assert qkvo == pytest.approx(2 * MB, rel=5e-2)


def test_bytes_of_tiled_attention():
    key_value_tile = 2 * TILE * HEAD_DIM * BYTES
    assert tile_pairs(FULL) * key_value_tile == 32 * 2**20  # every query tile reads all of K and V
    assert 2 * N * HEAD_DIM * BYTES == 2**20  # Q in, O out, once
    assert tile_pairs(CAUSAL) * key_value_tile == pytest.approx(17 * MB, rel=2e-2)


def test_bytes_of_the_statistics():
    q = torch.zeros(1, N, 1, 8)
    lse = direct.forward(BACKEND, q, q, q).lse
    assert lse.numel() * lse.element_size() == 16 * 1024  # LSE in float32; m and l kept apart would be two of them


@pytest.mark.parametrize("seqlen", [4096, 16384, 65536])
def test_causal_costs_close_to_half(seqlen):
    """Work is quadratic either way: causal visits (n + 1) / 2n of the tile pairs, the diagonal ones whole."""
    counts = []
    for mask in (CAUSAL, FULL):
        geometry = tiles.Geometry(mask, Tile(TILE, TILE), seqlen, seqlen)
        counts.append(sum(len(list(geometry.key_tiles(rows))) for rows in geometry.query_tiles()))
    n = seqlen // TILE
    assert counts == [n * (n + 1) // 2, n * n]


def test_two_heads_of_the_walkthrough_are_exact():
    """The walkthrough's numbers describe a computation that is right: a shorter one of its heads against float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 512, 2, HEAD_DIM, generator=generator).bfloat16() for _ in range(3))
    got = direct.forward(BACKEND, q, k, v, causal=True, tile=Tile(TILE, TILE))
    # One rounding to bf16: 0.29 ulp of 2^-7 at the top of a binade, less below it.
    assert oracle.relative_error(got.out, oracle.forward(q, k, v, causal=True).out) < 2.5e-3
