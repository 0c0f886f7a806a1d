"""Key-value caches through the Triton kernels, run on a CPU by Triton's interpreter, against float64.

As test_triton_interpreter does: one server process interprets, and answers a line a case.
"""

import json
import math
import sys
from dataclasses import asdict

import pytest
import torch

from cute_flash.runtime import request
from cute_flash.spec.problem import CACHE, FEW, FORWARD, Problem
from tests import oracle
from tests.cached import CacheCase, exact, lens_of, make_inputs, same, taken_out

from .interpreted import check_answer, interpreter
from .test_triton_interpreter import H200, Output, repair_interpreter

LITTLE = {"dtype": "float32"}
LENS = (0, 1, 31, 33, 100)
WILD = {"splits": 2, "new": 3, "wild": (2**31 - 1, -(2**31))}
ALONE, SHARED, INVARIANT = {"splits": 1}, {"splits": 3}, {"splits": 4, "split_keys": 32}

PAGES_OF_64 = CacheCase(lens_of(64), 4, causal=True, capacity=150, page_size=64, **LITTLE)
PAGES_OF_256 = CacheCase(lens_of(256), capacity=520, page_size=256, **LITTLE)
SLIDING = [CacheCase((3, 50, 100), 2, causal=True, window=(w, None), **LITTLE) for w in (0, 40)]

CASES = [
    *((CacheCase(LENS, **LITTLE), how) for how in (ALONE, SHARED, INVARIANT)),
    *((CacheCase(LENS, 3, causal=True, **LITTLE), how) for how in (ALONE, SHARED, INVARIANT)),
    (CacheCase((40, 100), 5, 8, 1, causal=True, **LITTLE), ALONE),  # 40 rows of a group
    (CacheCase((3, 20), 16, 7, 1, causal=True, **LITTLE), SHARED),  # 112: several tiles
    (CacheCase((33, 0, 100), chosen=True, **LITTLE), SHARED),
    *((CacheCase(lens_of(p)[:5], capacity=2 * p + 9, page_size=p, **LITTLE), SHARED) for p in (1, 16)),
    (CacheCase((0, 31, 32, 33, 90), 2, causal=True, page_size=32, **LITTLE), INVARIANT),
    *((case, how) for case in SLIDING for how in (SHARED, ALONE)),
    (CacheCase((3, 100), 4, window=(7, 2), page_size=16, softcap=1.5, **LITTLE), SHARED),
    (CacheCase((3, 100), window=(50, None), **LITTLE), INVARIANT),
    (CacheCase((60,), head_dim=20, head_dim_v=40, dtype="float16"), SHARED),
    (CacheCase((60, 3, 100), 2, causal=True, head_dim=20, head_dim_v=40, dtype="float16"), {"splits": 2, "new": 3}),
    (CacheCase((40, 17, 100), page_size=16, **LITTLE), {"splits": 2, "new": 2}),
    (CacheCase((40, 1), chosen=True, **LITTLE), {"splits": 1, "new": 1}),
    (CacheCase((60,), head_dim=96, head_dim_v=80, dtype="float16"), ALONE),
    (CacheCase((100, 5), **LITTLE), {"splits": 40}),  # more shares than keys, and than the merge reads at a time
    *((CacheCase((7, 40), page_size=p, **LITTLE), WILD) for p in (0, 16)),
    pytest.param(PAGES_OF_64, SHARED, marks=pytest.mark.slow),
    pytest.param(PAGES_OF_256, SHARED, marks=pytest.mark.slow),
]


# --------------------------------------------------------------------------------------------------- the server side


def measure(case: CacheCase, how: dict) -> dict[str, float]:
    from cute_flash.arch.triton.backend import BACKEND

    inputs = make_inputs(case)
    options = request.spell(case.causal, case.window, case.softcap)
    rows = case.seqlen_q * case.heads_q // case.heads_kv
    problem = Problem(
        FORWARD, H200, case.dtype, case.head_dim, case.head_dim_v, case.heads_q, case.heads_kv, options.mask,
        lse=True, features=options.features, form=CACHE, page_size=case.page_size,
        few_rows=next((few for few in FEW if rows <= few), 0),
    )  # fmt: skip
    shape = (len(case.lens), case.seqlen_q, case.heads_q, case.head_dim_v)
    out = Output(torch.Size(shape), inputs.q.dtype)
    lse = torch.full((shape[0], shape[2], shape[1]), math.nan)
    numbers = (case.head_dim**-0.5, *request.bounds(**case.options)[1])
    tables, new = list(inputs.tables.values()), (None, None)
    whole = [inputs.k.clone(), inputs.v.clone()]
    if how.get("new"):
        new, tables[0] = taken_out(inputs, how["new"])
    if "wild" in how:  # lengths that with new keys pass 32 bits: nothing outside the cache may be touched
        tables[0] = torch.tensor(how["wild"], dtype=torch.int32)
    BACKEND.build(BACKEND.plan(problem))(
        *inputs.qkv, out.tensor, lse, *tables, *new, how["splits"], how.get("split_keys", 0), *numbers
    )
    if "wild" in how:
        return {"margin": 0.0 if out.margin_kept() else math.inf}
    right = exact(case, inputs)
    return {
        "out": oracle.relative_error(out.tensor, right.out),
        "lse": oracle.lse_excess(lse, right.lse),
        "margin": 0.0 if out.margin_kept() else math.inf,
        "cache": 0.0 if all(map(same, whole, (inputs.k, inputs.v))) else math.inf,
    }


def serve() -> None:
    repair_interpreter()
    torch.set_num_threads(1)
    empty = torch.empty
    torch.empty = lambda *shape, **options: empty(*shape, **options).fill_(math.nan)  # partial results left unwritten
    for line in sys.stdin:
        given, how = json.loads(line)
        given |= {name: given[name] and tuple(given[name]) for name in ("lens", "window")}
        print(json.dumps(measure(CacheCase(**given), how)), flush=True)


# ------------------------------------------------------------------------------------------------------ the test side


@pytest.fixture(scope="module")
def server():
    with interpreter("tests.host.test_triton_cache") as process:
        yield process


@pytest.mark.parametrize(("case", "how"), CASES, ids=str)
def test_against_float64(server, case, how):
    check_answer(server, [asdict(case), how], case.dtype)


if __name__ == "__main__":
    serve()
