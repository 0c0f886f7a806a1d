"""The reference backend against the oracle, through the contract, on CPU tensors."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cute_flash.arch.reference import tiles
from cute_flash.arch.reference.backend import BACKEND
from cute_flash.spec.device import Device
from cute_flash.spec.mask import CAUSAL, FULL, Bounds, Mask
from cute_flash.spec.plan import Tile
from cute_flash.spec.problem import FORWARD
from tests import cases, direct, oracle
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Hundreds of ulps (2.2e-16, 1.2e-7): another order of summing some hundred products costs tens, and dP - delta cancels.
TOLERANCE = {"float64": 1e-13, "float32": 1e-5}

SHAPES = [
    Case(2, 300, 700, 4, 2, 64, 64),
    Case(2, 700, 300, 7, 1, 33, 40),
    Case(1, 257, 1, 4, 4, 8, 16),
    Case(3, 1, 600, 8, 1, 16, 16),
    Case(2, 1, 1, 2, 2, 192, 128),
    Case(1, 256, 512, 3, 3, 20, 250),
]


def check(case: Case, tile: Tile | None = None, tolerance: float | None = None) -> None:
    """Output, LSE and gradients (with one arriving through LSE) against the oracle."""
    given_inputs = cases.make_inputs(case)
    q, k, v, dout = *given_inputs.qkv, given_inputs.dout
    options = case.options
    expected = oracle.forward(q, k, v, **options)
    got = direct.forward(BACKEND, q, k, v, tile=tile, **options)
    dlse = torch.randn(got.lse.shape, generator=torch.Generator().manual_seed(1)).to(got.lse.dtype)
    grads = direct.backward(BACKEND, dout, q, k, v, got, dlse, tile=tile, **options)
    wanted = oracle.backward(q, k, v, dout, dlse, **options)
    tolerance = TOLERANCE[case.dtype] if tolerance is None else tolerance
    assert got.lse.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    assert oracle.relative_error(got.out, expected.out) <= tolerance
    assert oracle.lse_excess(got.lse, expected.lse) <= 1
    for name, value, reference in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        # Where the true gradient vanishes (one key a row and no dlse) only its size can be bounded.
        if reference.norm() > 1e-3 * value.numel() ** 0.5:
            assert oracle.relative_error(value, reference) <= tolerance, name
        else:
            assert (value - reference).abs().max() <= 100 * tolerance, name


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_exact(case, causal, dtype):
    check(replace(case, causal=causal, dtype=dtype))


@pytest.mark.parametrize("case", cases.window_cases()[::4], ids=str)
def test_windows(case):
    check(replace(case, dtype="float64", batch=1))


@pytest.mark.parametrize("case", cases.softcap_cases()[::3], ids=str)
def test_softcaps(case):
    check(replace(case, dtype="float64", batch=1), tolerance=1e-11)  # scores reach 70: see below


BOUNDS = st.none() | st.integers(0, 45)


@st.composite
def small_cases(draw):
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return Case(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(st.integers(1, 40)),
        seqlen_k=draw(st.integers(1, 40)),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=draw(st.integers(8, 24)),
        head_dim_v=draw(st.integers(8, 24)),
        causal=draw(st.booleans()),
        dtype="float64",
        layout=draw(st.sampled_from(cases.LAYOUTS)),
        values=draw(st.sampled_from(("normal", "large", "outliers", "tiny"))),
        scale=draw(st.sampled_from((None, 0.3, 1.7))),
        window=draw(st.none() | st.tuples(BOUNDS, BOUNDS)),
        softcap=draw(st.sampled_from((None, None, 0.5, 20.0))),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(small_cases(), st.integers(1, 17), st.integers(1, 17))
def test_any_shape_any_tile(case, tile_m, tile_n):
    # Scores reach about 100 with large values and scale 1.7, and exp turns an ulp of the score into 100 of the result.
    check(case, Tile(tile_m, tile_n), tolerance=1e-11)


@pytest.mark.parametrize("values", cases.VALUES)
@pytest.mark.parametrize("lengths", [(160, 256), (300, 130)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_adversarial_values(values, lengths, causal):
    # Scores reach 200, so exp multiplies an ulp by 200: 200 * 2.2e-16 * sqrt of a few hundred roundings.
    case = Case(1, *lengths, 2, 1, 64, 64, causal, dtype="float64", values=values)
    check(case, Tile(64, 48), tolerance=1e-11)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_16_bits_are_rounded_once(dtype, causal):
    case = Case(2, 130, 257, 4, 2, 64, 64, causal, dtype=dtype)
    q, k, v = cases.make_inputs(case).qkv
    got = direct.forward(BACKEND, q, k, v, causal=causal)
    exact = oracle.forward(q, k, v, causal=causal)
    # The exact answer rounded to 16 bits, but for ties that float32's own error tips over.
    assert oracle.relative_error(got.out, exact.out) <= 1.001 * oracle.relative_error(exact.out.to(q.dtype), exact.out)
    assert (got.lse - exact.lse).abs()[exact.lse > -math.inf].max() < 1e-5  # float32, 16 bits would be off by 1e-2


@pytest.mark.parametrize("layout", cases.LAYOUTS[1:])
def test_layouts_change_no_bit(layout):
    case = Case(2, 40, 40, 4, 4, 16, 16, causal=True, dtype="bfloat16", layout=layout)
    given_inputs = cases.make_inputs(case)
    results = []
    for q, k, v in (given_inputs.qkv, [x.contiguous() for x in given_inputs.qkv]):
        got = direct.forward(BACKEND, q, k, v, causal=True)
        results.append((*got, *direct.backward(BACKEND, given_inputs.dout, q, k, v, got, causal=True)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_writes_into_strided_outputs():
    case = Case(2, 33, 50, 4, 2, 16, 24, dtype="float64")
    q, k, v = cases.make_inputs(case).qkv
    wide = torch.full((2, 4, 33, 30), math.nan, dtype=torch.float64)
    out = wide.transpose(1, 2)[..., 3:27]
    kernel = BACKEND.build(BACKEND.plan(direct.problem(FORWARD, q, k, v)))
    kernel(q, k, v, out, None, 0.25)
    assert oracle.relative_error(out, oracle.forward(q, k, v, scale=0.25).out) <= TOLERANCE["float64"]
    assert wide[..., :3].isnan().all()
    assert wide[..., 27:].isnan().all()


def test_pieces_of_the_batch_change_nothing(monkeypatch):
    monkeypatch.setattr(tiles, "SCORES_AT_ONCE", 2 * 4 * 64 * 64)
    check(Case(5, 100, 70, 4, 2, 16, 16, causal=True, dtype="float64"), Tile(64, 64))


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operator returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_memory_is_linear_in_length():
    largest = []
    for seqlen in (1024, 2048):
        q, k, v = cases.make_inputs(Case(1, seqlen, seqlen, 2, 2, 16, 16, dtype="float32")).qkv
        with LargestTensor() as seen:
            got = direct.forward(BACKEND, q, k, v)
            direct.backward(BACKEND, q, q, k, v, got)
        largest.append(seen.elements)
    assert max(largest) < 1024 * 1024  # never a whole score matrix
    assert largest[1] <= 2 * largest[0]


def test_fully_masked_tiles_are_skipped():
    geometry = tiles.Geometry(CAUSAL, Tile(128, 128), 4096, 4096)
    visited = [len(list(geometry.key_tiles(rows))) for rows in geometry.query_tiles()]
    assert visited == list(range(1, 33))
    masked = tiles.Geometry(CAUSAL, Tile(128, 128), 512, 128)
    assert [len(list(masked.key_tiles(rows))) for rows in masked.query_tiles()] == [0, 0, 0, 1]
    window = tiles.Geometry(Mask(left=True, right=True), Tile(128, 128), 1024, 1024, Bounds(128, 128))
    assert [len(list(window.key_tiles(rows))) for rows in window.query_tiles()] == [2, *[3] * 6, 2]


def test_only_diagonal_tiles_are_masked():
    geometry = tiles.Geometry(CAUSAL, Tile(64, 64), 256, 256)
    for rows in geometry.query_tiles():
        needs_mask = [geometry.hidden(rows, keys, torch.device("cpu")) is not None for keys in geometry.key_tiles(rows)]
        assert needs_mask == [False] * (len(needs_mask) - 1) + [True]
    window = tiles.Geometry(Mask(left=True, right=True), Tile(64, 64), 640, 640, Bounds(128, 128))
    rows = list(window.query_tiles())[4]
    hides = [window.hidden(rows, keys, torch.device("cpu")) is not None for keys in window.key_tiles(rows)]
    assert hides == [True, False, False, False, True]


def test_bitwise_repeatable():
    q, k, v = cases.make_inputs(Case(2, 300, 300, 4, 2, 32, 32, dtype="float32")).qkv
    first, second = (direct.forward(BACKEND, q, k, v) for _ in range(2))
    assert torch.equal(first.out, second.out)
    a, b = (direct.backward(BACKEND, q, q, k, v, first) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_autocast_does_not_reach_inside():
    q, k, v = cases.make_inputs(Case(1, 40, 40, 2, 2, 16, 16, dtype="float32")).qkv
    plain = direct.forward(BACKEND, q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = direct.forward(BACKEND, q, k, v)
    assert torch.equal(plain.out, cast.out)


def test_nan_reaches_only_the_rows_that_see_it():
    q, k, v = cases.make_inputs(Case(1, 8, 8, 1, 1, 8, 8, causal=True, dtype="float64")).qkv
    q[0, 5] = math.nan
    got = direct.forward(BACKEND, q, k, v, causal=True)
    assert got.out[0, 5].isnan().all()
    assert got.lse[0, 0, 5].isnan()
    assert got.out[0, [0, 1, 2, 3, 4, 6, 7]].isfinite().all()


CPU = Device("cpu", 0, "cpu", None, 0)
H200 = Device("cuda", 0, "NVIDIA H200", (9, 0), 132)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_dim": 7}, "head_dim=7 is outside 8..256"),
        ({"head_dim": 257}, "head_dim=257 is outside 8..256"),
        ({"head_dim_v": 300}, "head_dim_v=300 is outside 8..256"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not one of"),
        ({"dtype": "int32"}, "dtype int32 is not one of"),
        ({"features": frozenset({"sink"})}, "sink= is not built yet"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refuses_with_the_number(fields, words):
    q, k, v = cases.make_inputs(SHAPES[0]).qkv
    problem = replace(direct.problem(FORWARD, q, k, v), **fields)
    assert [words in sentence for sentence in BACKEND.refuse(problem)] == [True]


def test_serves_every_device():
    q, k, v = cases.make_inputs(SHAPES[0]).qkv
    problem = direct.problem(FORWARD, q, k, v)
    assert not BACKEND.refuse(problem)
    assert not BACKEND.refuse(replace(problem, device=H200))
    assert BACKEND.native(CPU)
    assert not BACKEND.native(H200)


def test_the_plan_carries_the_question():
    q, k, v = cases.make_inputs(SHAPES[0]).qkv
    problem = direct.problem(FORWARD, q, k, v, deterministic=True)
    plan = BACKEND.plan(problem)
    assert (plan.backend, plan.direction, plan.mask, plan.lse) == ("reference", FORWARD, FULL, True)
    assert plan.deterministic
    assert plan == BACKEND.plan(problem)
