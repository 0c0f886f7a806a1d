"""Every Hopper Plan compiles for sm_90a with no GPU: registers reported, no spills, no serialised wgmma."""

import itertools
import re
from dataclasses import replace

import pytest

from cute_flash.arch.sm90.backend import BACKEND
from cute_flash.arch.sm90.cached.tiles import BARRIERS, SMEM_OF_TWO, STATS, smem_bytes
from cute_flash.arch.sm90.schedule import BUDGETS, WARPGROUP
from cute_flash.arch.sm90.tiles import (
    SMALL,
    SMEM_LIMIT,
    forward_smem_bytes,
    forward_tile,
    o_apart,
    width,
)
from cute_flash.spec.device import Device
from cute_flash.spec.mask import CAUSAL, FULL, Mask
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, CACHE, CACHE_FEW, FORWARD, PACKED, Problem
from scripts import dump, sass

HOPPER = Device("cuda", 0, "imagined", (9, 0), 132)
REGISTER_FILE = 65_536
WIDTHS = range(32, 257, 32)
PAIRS = [(w, w) for w in WIDTHS] + [(192, 128), (64, 256), (256, 64)]


def plan(
    head_dims: tuple[int, int],
    causal: bool,
    dtype: str = "bfloat16",
    lse: bool = True,
    short: bool = False,
    small: bool = False,
) -> Plan:
    mask, sizes = CAUSAL if causal else FULL, {"heads_q": 8, "heads_kv": 2}
    return BACKEND.plan(
        Problem(FORWARD, HOPPER, dtype, *head_dims, **sizes, mask=mask, lse=lse, short=short, small=small)
    )


def allowed_spill(chosen: Plan) -> int:
    """Bytes a thread. One plan keeps three words aside, whatever its tile_n, once a query tile and not in its loops."""
    if chosen.backend == "sm100":
        return 0
    if chosen.direction == BACKWARD and chosen.softcap and chosen.head_dim + chosen.head_dim_v == 256:
        return 8  # the slopes of a softcap beside dK and dV of width 128
    if chosen.direction == BACKWARD and chosen.variant == "apart":
        return 16  # kept aside once a unit, not in a loop: beside dK and dV of 128 keys, or by a window's load warp
    return 16 if (chosen.head_dim, chosen.variant, chosen.lse, chosen.mask) == (224, "split", True, CAUSAL) else 0


def compile_and_report(backend, chosen: Plan, capfd, record_property) -> None:
    backend.build(chosen, "remarks{ptx}")
    captured = capfd.readouterr()
    text = re.sub(r"\x1b\[[0-9;]*m", "", captured.out + captured.err)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    record_property("compiled", (str(chosen), max(registers, default=0), max(spills, default="")))
    assert registers, "ptxas reported nothing"
    assert spills and max(spills) <= allowed_spill(chosen), f"{chosen} spills: {spills} bytes"
    assert "C75" not in text, f"{chosen}: wgmma is serialised"


def bounded(head_dims: tuple[int, int], mask: Mask, *features: str) -> Plan:
    options = {"mask": mask, "lse": True, "features": frozenset(features)}
    return BACKEND.plan(Problem(FORWARD, HOPPER, "bfloat16", *head_dims, heads_q=8, heads_kv=2, **options))


WINDOW = Mask(left=True, right=True)
BOUNDED = [bounded((128, 128), Mask(left=True, right=True, causal=True)), bounded((64, 64), WINDOW, "softcap")]
EVERY_BOUNDED = [
    bounded(dims, mask, *features)
    for dims in ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
    for mask, features in ((WINDOW, ()), (WINDOW, ("softcap",)), (CAUSAL, ("softcap",)), (FULL, ("softcap",)))
]
COMMON = [
    plan((128, 128), True),
    plan((128, 128), True, small=True),
    plan((64, 64), True),
    plan((64, 64), False, short=True),
    plan((256, 256), False),
]
VARIANTS = itertools.product(PAIRS, (False, True), ("bfloat16", "float16"), *[(False, True)] * 3)
EVERY = list(dict.fromkeys(plan(*each) for each in VARIANTS))


def backward(head_dims: tuple[int, int], mask: Mask, *features: str, dtype: str = "bfloat16", **options) -> Plan:
    options = {"heads_q": 8, "heads_kv": 2, "mask": mask, "lse": True, "features": frozenset(features), **options}
    return BACKEND.plan(Problem(BACKWARD, HOPPER, dtype, *head_dims, **options))


COMMON_BACKWARD = [
    backward((128, 128), CAUSAL),
    backward((64, 64), FULL),
    backward((256, 256), CAUSAL),
    backward((192, 192), CAUSAL),
    backward((128, 128), FULL),
    backward((128, 128), CAUSAL, small=True),
    backward((64, 64), Mask(left=True, right=True, causal=True), "softcap"),
]
EVERY_BACKWARD = list(
    dict.fromkeys(
        backward(dims, mask, *features, dtype=dtype, lse_grad=lse_grad)
        for dims, mask, features, (dtype, lse_grad) in itertools.product(
            [*PAIRS, (64, 128), (128, 64), (32, 128)],
            (FULL, CAUSAL, WINDOW),
            ((), ("softcap",)),
            (("bfloat16", False), ("float16", True)),
        )
    )
    | dict.fromkeys(
        backward(dims, mask, *features, deterministic=True, short=short)
        for dims, mask, features, short in itertools.product(
            [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128)],
            (FULL, CAUSAL, WINDOW),
            ((), ("softcap",)),
            (False, True),
        )
    )
    | dict.fromkeys(
        backward(dims, mask, short=True, dtype=dtype)
        for dims, mask, dtype in itertools.product(
            [(96, 96), (128, 128), (192, 192), (192, 128)], (FULL, CAUSAL), ("bfloat16", "float16")
        )
    )
    | dict.fromkeys(
        backward(dims, CAUSAL, short=short, small=True)
        for dims, short in itertools.product([(64, 64), (96, 96), (128, 128)], (False, True))
    )
)


def cached(head_dims: tuple[int, int], mask: Mask = FULL, *features: str, **fields) -> Plan:
    options = {"mask": mask, "lse": True, "features": frozenset(features), "form": CACHE, **fields}
    return BACKEND.plan(Problem(FORWARD, HOPPER, "bfloat16", *head_dims, heads_q=8, heads_kv=2, **options))


COMMON_CACHED = [cached((128, 128), few_rows=8), cached((128, 128), CAUSAL, page_size=16, appends=True)]
EVERY_CACHED = [
    cached(dims, mask, *features, page_size=page_size, chosen=page_size == 0, few_rows=few_rows)
    for dims, (mask, features), (page_size, few_rows) in itertools.product(
        PAIRS, ((FULL, ()), (CAUSAL, ()), (WINDOW, ("softcap",))), ((0, 8), (1, 16), (64, 32), (0, 0))
    )
]


@pytest.mark.parametrize(
    "chosen", [*COMMON, BACKEND.split(COMMON[0]), *BOUNDED, *COMMON_BACKWARD, *COMMON_CACHED], ids=str
)
def test_common_plans_compile_without_spills(chosen, capfd, record_property):
    compile_and_report(BACKEND, chosen, capfd, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [*EVERY, *(BACKEND.split(each) for each in EVERY), *EVERY_BOUNDED, *EVERY_BACKWARD, *EVERY_CACHED],
    ids=str,
)
def test_every_plan_compiles_without_spills(chosen, capfd, record_property):
    compile_and_report(BACKEND, chosen, capfd, record_property)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_cache_has_a_tile_that_fits(head_dim):
    for head_dim_v, few_rows, page_size in itertools.product((8, head_dim, 256), (0, *CACHE_FEW), (0, 1, 2, 64)):
        plan = cached((head_dim, head_dim_v), few_rows=few_rows, page_size=page_size)
        tile, widths = plan.tile, (plan.head_dim, plan.head_dim_v)
        assert widths[0] >= head_dim and widths[1] >= head_dim_v
        # a box, which is at least as many keys as a page has, ends where TMA may write the next one
        assert all(page_size * 2 * (width & -width) % 128 == 0 for width in widths if page_size)
        assert tile.tile_m == few_rows or (few_rows == 0 and tile.tile_m == 64)
        assert tile.stages > 1 and smem_bytes(tile, *widths) <= SMEM_LIMIT
        assert 4 * 8 * tile.stages <= BARRIERS  # full and empty, of K and of V
        assert 4 * 4 * tile.tile_m + 1024 <= STATS  # a number a warp and query row, and Q starts at a multiple of 1024
        assert 2 * (SMEM_OF_TWO + 1024) == 228 * 1024


def test_calls_of_few_query_rows_have_tiles_of_64():
    """tiles.SMALL says with what figures."""
    fields = {"heads_q": 8, "heads_kv": 2, "lse": True}

    def rows(mask: Mask = CAUSAL, dims: tuple[int, int] = (128, 128), sms: int = 132, **more) -> int:
        device = Device("cuda", 0, "imagined", (9, 0), sms)
        return BACKEND.plan(Problem(FORWARD, device, "bfloat16", *dims, mask=mask, **fields, **more)).tile.tile_m

    causal = [dims for *dims, mask in SMALL if mask == "causal"]
    assert {rows(small=True, short=short, dims=dims) for dims in causal for short in (False, True)} == {64}
    split = BACKEND.split(plan((64, 64), True, small=True))
    assert (split.tile.tile_m, split.ctas) == (192, 132) and plan((64, 64), True, small=True).ctas == 264
    assert rows(small=True, sms=128) == 64
    assert rows(FULL, small=True) == rows(FULL, small=True, dims=(64, 64)) == 64
    others = [rows(), rows(small=True, sms=127), rows(FULL, small=True, dims=(256, 256)), rows(WINDOW, small=True)]
    others += [rows(small=True, features=frozenset({"softcap"})), rows(small=True, form=PACKED)]
    assert set(others) == {128}


def test_wide_heads_take_one_kernel_where_it_won():
    """Head dims 129 to 192: tiles.wide_backward says where, and with what figures."""

    def variant(dims: tuple[int, int], mask: Mask, **options: bool) -> str:
        return backward(dims, mask, **options).variant

    assert {variant(dims, mask) for dims in ((192, 192), (136, 160), (192, 72)) for mask in (FULL, CAUSAL)} == {"wide"}
    assert {variant(dims, FULL) for dims in ((256, 256), (128, 192), (192, 64), (192, 200))} == {"apart"}
    assert variant((192, 192), FULL, short=True) == "wide"
    assert {variant((192, 192), CAUSAL, short=True), variant((192, 128), FULL, short=True)} == {"apart"}
    repeatable = [
        backward(dims, mask, deterministic=True) for dims in ((192, 192), (160, 104)) for mask in (FULL, CAUSAL)
    ]
    assert {(each.variant, each.deterministic) for each in repeatable} == {("wide", True)}
    assert variant((192, 192), FULL, short=True, deterministic=True) == "wide"
    assert not backward((192, 192), FULL).deterministic


def test_causal_heads_add_in_turn_unasked_where_it_won():
    """tiles.adds_in_turn says with what figures."""

    def in_turn(dims: int | tuple[int, int], mask: Mask, *features: str, **options) -> bool:
        dims = dims if isinstance(dims, tuple) else (dims, dims)
        return backward(dims, mask, *features, **{"heads_kv": 8, **options}).deterministic

    assert all(in_turn(dims, CAUSAL) for dims in (64, 96, 128, (72, 80), (40, 64), (104, 128)))
    assert in_turn(128, CAUSAL, short=True) and not any(in_turn(dim, CAUSAL, short=True) for dim in (64, 96))
    assert not any(in_turn(dim, FULL) or in_turn(dim, CAUSAL, "softcap") for dim in (64, 96, 128))
    assert not any(in_turn(dims, CAUSAL) for dims in (32, (64, 96), 192))
    assert all(in_turn(dim, CAUSAL, heads_kv=4) for dim in (64, 96, 128))  # no plan depends on head counts


def test_ctas_share_key_tiles_where_causal_rows_are_few():
    """tiles.shared_backward says with what figures."""

    def variant(dim: int, mask: Mask, *features: str, **options) -> str:
        return backward((dim, dim), mask, *features, **{"small": True, **options}).variant

    assert {variant(dim, CAUSAL, short=short) for dim in (40, 64, 96, 128) for short in (False, True)} == {"shared"}
    assert {variant(dim, CAUSAL, heads_kv=8) for dim in (64, 96, 128)} == {"shared"}
    assert not any(backward((dim, dim), CAUSAL, small=True).deterministic for dim in (64, 96, 128))
    alone = [backward((dim, dim), CAUSAL, small=True, short=True, heads_kv=8) for dim in (64, 96, 128)]
    assert all(each.deterministic and each.variant != "shared" for each in alone)
    others = [variant(128, FULL), variant(128, CAUSAL, "softcap"), variant(128, CAUSAL, deterministic=True)]
    others += [variant(128, CAUSAL, small=False), variant(128, Mask(left=True, right=True, causal=True))]
    assert not any([*others, variant(32, CAUSAL)]) and variant(192, CAUSAL) == "wide"


@pytest.mark.parametrize("heads, shares", [((8, 8), 2), ((8, 2), 8), ((16, 2), 16), ((17, 1), 2)])
def test_scratch_of_shared_key_tiles(heads, shares):
    """One share less, in float32, behind all that any plan has: of 8 key tiles, 128 of all query heads at most."""
    plan = backward((128, 128), CAUSAL, small=True)
    alone = replace(plan, variant="", deterministic=False)
    more = [BACKEND.scratch(each).elements(1, heads[0], 1000, 0, heads[1], 1000) for each in (plan, alone)]
    each = (shares - 1) * 128 * 256 + 8  # and a word for each of eight warps
    assert 0 <= more[0] - more[1] - 8 * heads[1] * each < 32


def test_long_heads_of_128_under_a_full_mask_have_tiles_of_80_queries():
    """tiles.tall_backward says with what figures."""
    assert {backward(dims, FULL).tile.tile_m for dims in ((128, 128), (120, 104))} == {80}
    others = [
        backward((128, 128), FULL, short=True),
        backward((128, 128), CAUSAL),
        backward((128, 128), FULL, "softcap"),
    ]
    assert {each.tile.tile_m for each in [*others, backward((128, 96), FULL)]} == {64}
    assert not any(each.variant for each in others)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_exponentials_of_heads_of_128_run_under_dp(mask):
    """As many as the plan says stand before the wait for dP, where ptxas left to itself has one or none."""
    tool = sass.disassembler()
    if tool is None:
        pytest.skip("no nvdisasm here")
    chosen = backward((128, 128), mask)
    ((_, _, cubin),) = dump.compiled(BACKEND, chosen)
    codes = sass.functions(sass.disassemble(cubin, tool)).values()
    (loop,) = [body for code in codes for body in sass.main_bodies(code)]
    of_s, of_dp, *_ = sass.ahead_of_waits(loop)
    assert of_s == 0 and chosen.tile.ahead == chosen.tile.tile_m // 4 <= of_dp


@pytest.mark.parametrize("head_dim", range(8, 257))
def test_every_head_dim_has_a_tile_that_fits(head_dim):
    every = itertools.product((8, head_dim, 128, 256), ("full", "causal"), *[(False, True)] * 2)
    for head_dim_v, mask, short, small in every:
        tile = forward_tile(head_dim, head_dim_v, mask, short, small=small)
        widths = width(head_dim), width(head_dim_v)
        assert forward_smem_bytes(tile, *widths, o_apart=o_apart(tile, *widths)) <= SMEM_LIMIT
        assert tile.tile_n % 16 == 0  # a k step of P V


def test_register_budgets_fit_what_a_cta_starts_with():
    for warpgroups, (load, mma) in BUDGETS.items():
        at_launch = min(255, REGISTER_FILE // (WARPGROUP * (1 + warpgroups))) // 8 * 8
        assert load + warpgroups * mma <= (1 + warpgroups) * at_launch
        assert load % 8 == mma % 8 == 0  # setmaxnreg counts in eights
