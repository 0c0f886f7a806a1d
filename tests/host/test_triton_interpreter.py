"""Triton kernels run on a CPU by Triton's interpreter, against the dense float64 oracle.

Triton decides at import whether kernels are interpreted, so they run in one server process started with
TRITON_INTERPRET=1; it takes a case a line and answers with the errors it measured. float16 and float32 only: the
interpreter has no bfloat16 dot.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, replace

import pytest
import torch

from cute_flash.runtime import request
from cute_flash.spec.device import Device
from cute_flash.spec.plan import Tile
from cute_flash.spec.problem import BACKWARD, FORWARD, Problem
from tests import oracle

from .interpreted import check_answer, interpreter

H200 = Device("cuda", 0, "simulated", (9, 0), 132)
SENTINEL = 77.0  # around every output: a write outside shows


@dataclass(frozen=True)
class Case:
    seqlen_q: int
    seqlen_k: int
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    dtype: str = "float32"
    batch: int = 1
    layout: str = "plain"  # of q, k, v and dout, see `arranged`
    tile: tuple[int, int] | None = None  # (tile_m, tile_n); None = the Plan's
    gain: float = 1.0  # of q
    offset: float = 0.0  # added to q, subtracted from k: scores far below zero
    lse_grad: bool = True
    unseen_is_nan: bool = False  # what lies in tiles that no row sees, or whose rows see no key: a visit shows
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    variant: str = ""  # of the backward's Plan, where `tile` is given

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values() if value is not None)


SMALL = (32, 16)  # many tiles out of few rows
TINY = (16, 16)
EDGES = (1, 63, 64, 65, 127, 129)
UNEQUAL = ((1, 100), (33, 47), (64, 1), (95, 64), (32, 48), (47, 33))
BOTH = (False, True)
# Single keys, one-sided, narrower than a tile, at and beside tile edges, wider than everything.
WINDOWS = ((0, 0), (None, 7), (0, None), (5, 3), (31, 1), (32, 16), (None, 0), (33, None), (500, 500))
VARIANTS = ("mask-all", "dq-64x16x1x4")
LAYOUTS = ("bhsd", "expanded", "columns", "sliced")
CASES = [
    *(Case(n, n, causal=causal, dtype="float16", head_dim=32, head_dim_v=32) for n in EDGES for causal in BOTH),
    *(Case(*lengths, 1, 1, 16, 16, causal, tile=SMALL) for lengths in UNEQUAL for causal in BOTH),
    *(Case(20, 35, *h, 16, 16, causal, "float16", tile=SMALL) for h in ((4, 1), (7, 1), (4, 2)) for causal in BOTH),
    *(Case(65, 66, head_dim=d, head_dim_v=d, causal=True, tile=(64, 32)) for d in (8, 20, 40, 80, 96, 128)),
    *(Case(65, 66, 1, 1, *dims, dtype="float16") for dims in ((192, 128), (64, 20), (33, 80), (256, 256))),
    *(Case(18, 20, 2, 1, 24, 40, True, batch=2, layout=layout, tile=TINY) for layout in LAYOUTS),
    Case(160, 256, causal=True, offset=5.0),
    Case(40, 40, causal=True, lse_grad=False, tile=SMALL),
    *(Case(37, 50, causal=causal, tile=SMALL, variant="mask-all") for causal in BOTH),
    *(Case(37, 50, causal=causal, tile=SMALL, variant="dq-64x16x1x4") for causal in BOTH),
    *(
        Case(*lengths, 2, 1, 16, 16, tile=SMALL, window=w)
        for w in WINDOWS
        for lengths in ((95, 95), (40, 90), (90, 40))
    ),
    *(Case(95, 80, 1, 1, 16, 16, True, tile=SMALL, window=w) for w in ((0, None), (20, 5), (200, 200))),
    *(Case(95, 90, 4, 2, 16, 16, tile=TINY, window=w, variant=v) for w in ((20, 9), (None, 3)) for v in VARIANTS),
    *(Case(1, n, 4, 1, 16, 16, tile=SMALL, window=w) for n in (1, 70) for w in ((0, 0), (33, None))),
    Case(160, 170, 1, 1, 64, 64, dtype="float16", window=(50, 0)),
    *(Case(40, 50, 4, 2, 16, 16, causal, tile=SMALL, softcap=c, gain=6.0) for c in (0.5, 15.0) for causal in BOTH),
    *(Case(60, 47, 2, 1, 20, 24, tile=SMALL, window=(20, 9), softcap=3.0, gain=6.0, variant=v) for v in VARIANTS),
    Case(160, 256, causal=True, offset=5.0, softcap=20.0),  # every score is -200: tanh is -1, its derivative 1e-8
    Case(65, 66, dtype="float16", softcap=50.0, gain=4.0),
    *(Case(*n, 2, 1, 16, 16, tile=TINY, window=w, unseen_is_nan=True) for n in ((40, 130), (130, 40)) for w in WINDOWS),
]


# --------------------------------------------------------------------------------------------------- the server side


def arranged(shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Random values of that shape, laid out otherwise than contiguously."""
    batch, seqlen, heads, dim = shape
    if layout == "bhsd":
        return torch.randn(batch, heads, seqlen, dim).to(dtype).transpose(1, 2)
    if layout == "expanded":
        return torch.randn(1, seqlen, 1, dim).to(dtype).expand(shape)
    if layout == "columns":
        return torch.randn(batch, seqlen, dim, heads).to(dtype).transpose(2, 3)
    if layout == "sliced":  # with NaN around: what is read beside a row or after the last shows
        return torch.full((batch, 2 * seqlen, heads, dim + 3), math.nan, dtype=dtype)[:, ::2, :, 1 : dim + 1].normal_()
    return torch.randn(shape).to(dtype)


def poison_unseen(case: Case, rows: tuple[torch.Tensor, ...], keys: tuple[torch.Tensor, ...]) -> None:
    """NaN in whole tiles of rows (q, dout) and keys (k, v) that take no part."""
    seen = oracle.visible_keys(case.seqlen_q, case.seqlen_k, case.causal, torch.device("cpu"), case.window)
    for tensors, used, tile in ((rows, seen.any(1), case.tile[0]), (keys, seen.any(0), case.tile[1])):
        first, *_, last = [*used.nonzero().flatten().tolist()] * 2
        for tensor in tensors:
            tensor[:, : first // tile * tile] = math.nan
            tensor[:, -(-(last + 1) // tile) * tile :] = math.nan


class Output:
    """A NaN-filled tensor with a margin of sentinels on every side but the batch's."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype):
        inner = tuple(slice(0, shape[0]) if i == 0 else slice(1, n + 1) for i, n in enumerate(shape))
        self.around = torch.full([n + 2 for n in shape], SENTINEL, dtype=dtype)
        self.tensor = self.around[inner].fill_(math.nan)

    def margin_kept(self) -> bool:
        outside = self.around.clone()
        outside.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(SENTINEL)
        return bool((outside == SENTINEL).all())


def plan_and_build(direction: str, case: Case):
    from cute_flash.arch.triton.backend import BACKEND

    options = request.spell(case.causal, case.window, case.softcap)
    problem = Problem(
        direction, H200, case.dtype, case.head_dim, case.head_dim_v, case.heads_q, case.heads_kv,
        options.mask, lse=True, lse_grad=direction == BACKWARD and case.lse_grad, features=options.features,
    )  # fmt: skip
    plan = BACKEND.plan(problem)
    if case.tile is not None:
        variant = case.variant if direction == BACKWARD else ""
        plan = replace(plan, tile=Tile(*case.tile, stages=1, warps=4), variant=variant)
    return BACKEND.build(plan)


def measure(case: Case) -> dict[str, float]:
    """Relative error of every output against the oracle; LSE's as a share of what it may be off."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    shape_q = (case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    shape_k = (case.batch, case.seqlen_k, case.heads_kv, case.head_dim)
    q = arranged(shape_q, case.layout, dtype) * case.gain + case.offset
    k = arranged(shape_k, case.layout, dtype) - case.offset
    v = arranged((*shape_k[:3], case.head_dim_v), case.layout, dtype)
    dout = arranged((*shape_q[:3], case.head_dim_v), case.layout, dtype)
    if case.unseen_is_nan:
        poison_unseen(case, (q, dout), (k, v))
    dlse = torch.randn(case.batch, case.heads_q, case.seqlen_q) if case.lse_grad else None
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    numbers = (case.head_dim**-0.5, *request.bounds(**options)[1])
    out, lse = Output(dout.shape, dtype), Output(torch.Size((case.batch, case.heads_q, case.seqlen_q)), torch.float32)
    plan_and_build(FORWARD, case)(q, k, v, out.tensor, lse.tensor, *numbers)
    grads = [Output(x.shape, dtype) for x in (q, k, v)]
    written = [grad.tensor for grad in grads]
    plan_and_build(BACKWARD, case)(dout, q, k, v, out.tensor, lse.tensor, dlse, *written, *numbers)

    q, k, v, dout = (x.nan_to_num(0.0) if case.unseen_is_nan else x for x in (q, k, v, dout))
    right = oracle.forward(q, k, v, **options)
    right_grads = oracle.backward(q, k, v, dout, dlse, **options)
    errors = {"out": oracle.relative_error(out.tensor, right.out), "lse": oracle.lse_excess(lse.tensor, right.lse)}
    for name, grad, reference in zip(("dq", "dk", "dv"), grads, right_grads, strict=True):
        errors[name] = oracle.relative_error(grad.tensor, reference)
    for name, output in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        errors[f"{name} margin"] = 0.0 if output.margin_kept() else math.inf
    return errors


def repair_interpreter() -> None:
    """Triton 3.6 calls int() on arrays of one element, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def serve() -> None:
    repair_interpreter()
    torch.set_num_threads(1)
    for line in sys.stdin:
        fields = json.loads(line)
        fields |= {name: fields[name] and tuple(fields[name]) for name in ("tile", "window")}
        print(json.dumps(measure(Case(**fields))), flush=True)


# ------------------------------------------------------------------------------------------------------ the test side


@pytest.fixture(scope="module")
def server():
    with interpreter("tests.host.test_triton_interpreter") as process:
        yield process


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(server, case: Case):
    check_answer(server, asdict(case), case.dtype)


if __name__ == "__main__":
    serve()
