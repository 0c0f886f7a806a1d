"""Packed sequences through the Triton kernels, run on a CPU by Triton's interpreter, against float64.

As test_triton_interpreter does: one server process interprets, and answers a line a case.
"""

import json
import math
import sys
from dataclasses import asdict, replace

import pytest
import torch

from cute_flash.runtime import request
from cute_flash.spec.plan import Plan, Tile
from cute_flash.spec.problem import BACKWARD, FORWARD, PACKED, Problem
from tests.packed import PackedCase, errors, make_inputs, same

from .interpreted import check_answer, interpreter
from .test_triton_interpreter import H200, Output, repair_interpreter

TINY = {"tile": (16, 16)}
WINDOWS = ((0, 0), (None, 7), (5, 3), (31, None))
LITTLE = {"head_dim": 16, "head_dim_v": 16, "dtype": "float32"}
# Empty sequences first, last and side by side, on one side or both; beside a tile's edges; unequal both ways.
EDGES = (0, 1, 0, 0, 15, 16, 17, 33, 0)
UNEQUAL = ((5, 0, 20, 1, 33), (9, 4, 0, 40, 7))
MANY = {"heads_q": 1, **LITTLE}
# Lengths whose differences, or tiles times rows, pass 32 bits: nothing outside the tensors may be touched.
WILD = ((0, 200, -(2**31), 210, 256), (-(2**31), 100, -(2**31), 2**31 - 1, -(2**31)))

# (case, further fields of the plan)
CASES = [
    *((same(*EDGES, causal=causal, **LITTLE), TINY) for causal in (False, True)),
    *((PackedCase(*UNEQUAL, causal=c, tail=(33, 20), **LITTLE), TINY) for c in (False, True)),
    *((PackedCase(*UNEQUAL, window=w, tail=(1, 0), **LITTLE), TINY) for w in WINDOWS),
    (PackedCase(*UNEQUAL, window=(3, None), causal=True, softcap=2.0, **LITTLE), TINY),
    (PackedCase((), (), tail=(40, 3), **LITTLE), TINY),
    (PackedCase((3, 20), (0, 0), causal=True, **LITTLE), TINY),
    (same(20, 35, 0, 7, heads_q=4, heads_kv=2, causal=True, **LITTLE), {}),
    (same(20, 0, 7, head_dim=20, head_dim_v=40, dtype="float16"), TINY),
    (same(33, 3, 20, head_dim=96, head_dim_v=96, dtype="float32", causal=True), {"tile": (32, 16)}),
    (same(40, 20, causal=True, **LITTLE), {"few": (16, 16)}),  # hints that are wrong
    (same(40, 20, causal=True, **LITTLE), {"variant": "mask-all dq-32x16x1x4", "tile": (32, 16)}),
    (same(*(1,) * 32, 17, 3, causal=True, **MANY), {"few": (16, 16)}),  # more than the 32 probes of a search
    *((same(100, 30, 70, 56, **LITTLE), {"wild": wild}) for wild in WILD),
    pytest.param(same(*(1,) * 1100, **MANY), {}, marks=pytest.mark.slow),  # more than 32 * 32
]


# --------------------------------------------------------------------------------------------------- the server side


def plan_of(direction: str, case: PackedCase, fields: dict) -> Plan:
    from cute_flash.arch.triton.backend import BACKEND

    options = request.spell(case.causal, case.window, case.softcap)
    few = fields.get("few", (0, 0))
    problem = Problem(
        direction, H200, case.dtype, case.head_dim, case.head_dim_v, case.heads_q, case.heads_kv, options.mask,
        lse=True, lse_grad=direction == BACKWARD, features=options.features, form=PACKED,
        few_rows=few[0], few_keys=few[1],
    )  # fmt: skip
    plan = BACKEND.plan(problem)
    if "tile" in fields:
        plan = replace(plan, tile=Tile(*fields["tile"], stages=1, warps=4), variant=fields.get("variant", ""))
    return plan


def measure(case: PackedCase, fields: dict) -> dict[str, float]:
    from cute_flash.arch.triton.backend import BACKEND

    inputs = make_inputs(case)
    if "wild" in fields:
        starts = torch.tensor(fields["wild"], dtype=torch.int32)
        inputs = replace(inputs, cu_seqlens_q=starts, cu_seqlens_k=starts)
    q, k, v, dout = (x[None] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    lengths = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    numbers = (*lengths, case.head_dim**-0.5, *request.bounds(**case.options)[1])
    out, lse = Output(dout.shape, dout.dtype), Output(inputs.dlse[None].shape, torch.float32)
    BACKEND.build(plan_of(FORWARD, case, fields))(q, k, v, out.tensor, lse.tensor, *numbers)
    grads = [Output(x.shape, x.dtype) for x in (q, k, v)]
    written = [grad.tensor for grad in grads]
    backward = BACKEND.build(plan_of(BACKWARD, case, fields))
    backward(dout, q, k, v, out.tensor, lse.tensor, inputs.dlse[None], *written, *numbers)
    results = (out.tensor[0], lse.tensor[0]), tuple(grad[0] for grad in written)
    found = {} if "wild" in fields else errors(case, inputs, *results)
    for name, output in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        found[f"{name} margin"] = 0.0 if output.margin_kept() else math.inf
    return found


def serve() -> None:
    repair_interpreter()
    torch.set_num_threads(1)
    for line in sys.stdin:
        given, fields = json.loads(line)
        lists = ("lens_q", "lens_k", "window", "tail")
        case = PackedCase(**given | {name: given[name] and tuple(given[name]) for name in lists})
        print(json.dumps(measure(case, fields)), flush=True)


# ------------------------------------------------------------------------------------------------------ the test side


@pytest.fixture(scope="module")
def server():
    with interpreter("tests.host.test_triton_packed") as process:
        yield process


@pytest.mark.parametrize(("case", "fields"), CASES, ids=str)
def test_forward_and_gradients(server, case, fields):
    check_answer(server, [asdict(case), fields], case.dtype)


if __name__ == "__main__":
    serve()
