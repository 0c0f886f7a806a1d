"""Every Triton Plan compiles with no GPU and fits its capability's shared memory (and tensor memory)."""

import importlib

import pytest
import torch

from cute_flash.spec.device import Device
from cute_flash.spec.mask import CAUSAL, FULL, Mask
from cute_flash.spec.plan import Plan
from cute_flash.spec.problem import BACKWARD, CACHE, DENSE, FORWARD, PACKED, Problem

pytest.importorskip("triton")

from cute_flash.arch.triton import tiles
from cute_flash.arch.triton.backend import BACKEND

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
TENSOR_MEMORY_COLUMNS = 512
LIMITS = (64, 128, 256)


def plan_for(direction: str, capability, dims, dtype="bfloat16", ieee=True, mask: Mask = CAUSAL, **fields) -> Plan:
    device = Device("cuda", 0, "simulated", capability, 1)
    fields = {"lse": True, **fields}
    problem = Problem(direction, device, dtype, *dims, 4, 4, mask, ieee_float32=ieee, **fields)
    assert BACKEND.refuse(problem) == ()
    return BACKEND.plan(problem)


def check(plan: Plan) -> None:
    capability = tuple(int(part) for part in plan.arch.split("."))
    module = "cache" if plan.form == CACHE else plan.direction
    kernels = importlib.import_module(f"cute_flash.arch.triton.{module}").compile_ahead(plan)
    assert len(kernels) == {FORWARD: 1, BACKWARD: 2, "cache": 4}[module]
    for kernel in kernels:
        assert kernel.metadata.shared <= tiles.shared_memory(capability), (kernel.metadata.name, str(plan))
        assert (kernel.metadata.tmem_size or 0) <= TENSOR_MEMORY_COLUMNS, (kernel.metadata.name, str(plan))
        assert kernel.asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(("direction", "dims"), [(FORWARD, (128, 128)), (BACKWARD, (256, 256))], ids=str)
def test_widest_rows_fit(capability, direction, dims):
    check(plan_for(direction, capability, dims))


WINDOW = Mask(left=True, right=True)
SLIDING = Mask(left=True, right=True, causal=True)
CAPPED = frozenset({"softcap"})


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_windows_and_softcaps_fit(capability, direction):
    """Both together: whatever either takes of registers and shared memory."""
    check(plan_for(direction, capability, (128, 128), mask=WINDOW, features=CAPPED))


@pytest.mark.parametrize("few", [(0, 0), (16, 16), (64, 0)], ids=str)
@pytest.mark.parametrize("capability", [(8, 6), (9, 0)], ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_packed_sequences_fit(capability, direction, few):
    check(plan_for(direction, capability, (128, 128), form=PACKED, few_rows=few[0], few_keys=few[1]))


@pytest.mark.parametrize(("few", "page_size", "mask"), [(16, 0, FULL), (16, 16, FULL), (0, 64, CAUSAL)], ids=str)
@pytest.mark.parametrize("capability", [(8, 6), (9, 0)], ids=str)
def test_caches_fit(capability, few, page_size, mask):
    check(plan_for(FORWARD, capability, (128, 128), form=CACHE, few_rows=few, page_size=page_size, mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("few", [16, 32, 64, 0])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [0, 1, 64])
def test_every_cache_fits(capability, dtype, few, page_size):
    for dims in ((96, 96), (256, 256)):
        fields = {"form": CACHE, "few_rows": few, "page_size": page_size, "features": CAPPED}
        check(plan_for(FORWARD, capability, dims, dtype, mask=WINDOW, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("few", [(0, 0), (16, 64), (32, 32), (64, 0), (0, 16)], ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_hint_fits(capability, direction, dtype, few):
    for dims in ((64, 64), (256, 256)):
        check(plan_for(direction, capability, dims, dtype, form=PACKED, few_rows=few[0], few_keys=few[1], mask=WINDOW))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, SLIDING, Mask(left=True), Mask(right=True), WINDOW], ids=str)
@pytest.mark.parametrize("features", [CAPPED, frozenset()], ids=["softcap", "plain"])
def test_every_bound_and_cap_fits(capability, direction, mask, features):
    for dims in ((64, 64), (256, 256)):
        check(plan_for(direction, capability, dims, mask=mask, features=features))


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    "fields", [{"mask": FULL}, {"lse": False}, {"lse_grad": True}, {"dtype": "float16"}, {"mask": SLIDING}], ids=str
)
def test_variants_compile(direction, fields):
    check(plan_for(direction, (9, 0), (80, 64), **fields))


@pytest.mark.parametrize("form", [DENSE, PACKED])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, SLIDING], ids=str)
def test_wgmma_of_the_forward_is_not_serialised(mask, form):
    """ptxas waits after every single wgmma when it cannot follow the accumulator: then waits are as many as matmuls."""
    forward = importlib.import_module("cute_flash.arch.triton.forward")
    (kernel,) = forward.compile_ahead(plan_for(FORWARD, (9, 0), (128, 128), mask=mask, form=form))
    sass = kernel.asm["sass"]
    matmuls, waits = sass.count("HGMMA"), sass.count("WARPGROUP.DEPBAR")
    assert matmuls
    assert waits <= matmuls / 2


class Recorder:
    """Stands in for a kernel: kernel[grid](*arguments) only notes the arguments."""

    def __init__(self):
        self.arguments = ()

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **options):
        self.arguments = arguments


@pytest.mark.parametrize("seqlen", [1, 64, 77])
@pytest.mark.parametrize("heads_kv", [1, 3])
@pytest.mark.parametrize("with_lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize(
    ("mask", "form"), [(CAUSAL, DENSE), (WINDOW, DENSE), (SLIDING, DENSE), (CAUSAL, PACKED), (WINDOW, PACKED)], ids=str
)
def test_a_launch_finds_what_was_compiled_ahead(monkeypatch, seqlen, heads_kv, with_lse, mask, form):
    """The source that Triton makes of a launch is the one compiled ahead, whatever the lengths and head counts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    monkeypatch.setattr(triton, "compile", lambda source, **options: source)
    batch = 1 if form == PACKED else 2
    q, out, *grads = (torch.empty(batch, seqlen, 3, 64, dtype=torch.bfloat16) for _ in range(5))
    k, v = (torch.empty(batch, seqlen, heads_kv, 64, dtype=torch.bfloat16) for _ in range(2))
    lse = torch.empty(batch, 3, seqlen)
    dlse = lse if with_lse else None
    numbers = (0.1, 16 * seqlen, 0 if mask.causal else seqlen, 30.0) if mask.windowed else (0.1,)
    if form == PACKED:
        numbers = (*(torch.zeros(9, dtype=torch.int32) for _ in range(2)), *numbers)
    features = CAPPED if mask.windowed else frozenset()
    launches = {
        FORWARD: (q, k, v, out, lse if with_lse else None, *numbers),
        BACKWARD: (out, q, k, v, out, lse, dlse, *grads, *numbers),
    }
    names = {FORWARD: ["attention_forward"], BACKWARD: ["attention_backward_dq", "attention_backward_dkdv"]}
    for direction, arguments in launches.items():
        module = importlib.import_module(f"cute_flash.arch.triton.{direction}")
        lse_fields = {"lse": with_lse, "lse_grad": with_lse}
        plan = plan_for(direction, (9, 0), (64, 64), mask=mask, features=features, form=form, **lse_fields)
        ahead = module.compile_ahead(plan)
        launch = module.build(plan)
        kernels = [getattr(module, name) for name in names[direction]]
        recorders = [Recorder() for _ in kernels]
        for name, recorder in zip(names[direction], recorders, strict=True):
            monkeypatch.setattr(module, name, recorder)
        launch(*arguments)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        for kernel, recorder, source in zip(kernels, recorders, ahead, strict=True):
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            bound, specialization, options = bind(*recorder.arguments)
            packed = kernel._pack_args(backend, {}, bound, specialization, options)
            assert ASTSource(kernel, *packed[1:]).hash() == source.hash()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_cache_launch_finds_what_was_compiled_ahead(monkeypatch, splits, page_size, batch):
    """Whatever the batch, the lengths and the counts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    from cute_flash.arch.triton import cache

    monkeypatch.setattr(triton, "compile", lambda source, **options: source)
    plan = plan_for(FORWARD, (9, 0), (64, 64), mask=FULL, form=CACHE, few_rows=16, page_size=page_size)
    alone, sharing, merge, append = cache.compile_ahead(plan)
    launch = cache.build(plan)
    expected = [(cache.attention_cache, alone)] if splits == 1 else [(cache.attention_cache, sharing)]
    expected += [(cache.append_keys, append)] + ([] if splits == 1 else [(cache.merge_shares, merge)])
    recorders = {"attention_cache": Recorder(), "append_keys": Recorder(), "merge_shares": Recorder()}
    for name, recorder in recorders.items():
        monkeypatch.setattr(cache, name, recorder)
    q, out = (torch.empty(batch, 1, 4, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(batch, page_size or 96, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    table = torch.zeros(batch, 6, dtype=torch.int32) if page_size else None
    lens = torch.zeros(batch, dtype=torch.int32)
    new = torch.empty(batch, 3, 2, 64, dtype=torch.bfloat16)
    launch(q, k, v, out, torch.empty(batch, 4, 1), lens, table, None, new, new, splits, 0, 0.1)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    for (kernel, source), recorder in zip(expected, recorders.values(), strict=False):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*recorder.arguments)
        packed = kernel._pack_args(backend, {}, bound, specialization, options)
        assert ASTSource(kernel, *packed[1:]).hash() == source.hash()


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", tiles.WIDTHS)
def test_all_widths_fit(capability, direction, width):
    check(plan_for(direction, capability, (width, width)))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", LIMITS)
@pytest.mark.parametrize("ieee", [True, False], ids=["ieee", "tf32"])
def test_float32_fits(capability, direction, width, ieee):
    check(plan_for(direction, capability, (width, width), "float32", ieee))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", LIMITS)
def test_full_mask_fits(capability, direction, width):
    check(plan_for(direction, capability, (width, width), mask=FULL))
