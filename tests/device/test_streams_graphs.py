"""Kernels run on the current stream, inside CUDA graphs, and from several threads."""

import threading

import pytest
import torch

import cute_flash
from tests import cases
from tests.cases import Case
from tests.device.gpu import BACKENDS, DEVICE, GRADIENT_BACKENDS, runner

SHAPE = Case(2, 256, 256, 4, 2, 64, 64, causal=True)
CYCLES = 20_000_000  # about 10 ms: longer than any launch below, so that a launch on another stream comes too early


def delayed_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On the current stream, and late."""
    torch.cuda._sleep(CYCLES)
    target.copy_(source)


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_on_the_current_stream(backend):
    """q arrives late on a side stream: only a kernel queued behind it there sees the right values."""
    q, k, v = cases.make_inputs(SHAPE, DEVICE).qkv
    run, late = runner(backend), torch.zeros_like(q)
    expected = run(q, k, v, causal=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        delayed_copy(late, q)
        out = run(late, k, v, causal=True)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
def test_backward_runs_on_the_current_stream(backend):
    inputs = cases.make_inputs(SHAPE, DEVICE)
    run = runner(backend)
    (_, _), expected = run.gradients(*inputs.qkv, inputs.dout, causal=True, deterministic=True)
    late, side = torch.zeros_like(inputs.dout), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        leaves = inputs.leaves()
        out = run(*leaves, causal=True, deterministic=True)
        delayed_copy(late, inputs.dout)
        grads = torch.autograd.grad(out, leaves, late)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_replay_sees_new_inputs(backend):
    q, k, v = cases.make_inputs(SHAPE, DEVICE).qkv
    run = runner(backend)
    run(q, k, v, causal=True, return_lse=True)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(q, k, v, causal=True, return_lse=True)
    for seed in (1, 2):
        q.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
        graph.replay()
        expected = run(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("backend", GRADIENT_BACKENDS, ids=str)
def test_graph_replay_of_forward_and_backward(backend):
    inputs = cases.make_inputs(SHAPE, DEVICE)
    run, leaves = runner(backend), inputs.leaves()

    def step():
        out = run(*leaves, causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, inputs.dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd wants its warm-up on a side stream, too
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_first_call_inside_a_capture(backend):
    """A variant met for the first time inside a capture either raises, or works; the next calls work in any case."""
    q, k, v = cases.make_inputs(Case(1, 100, 100, 2, 2, 56, 56, dtype="float16"), DEVICE).qkv
    run = runner(backend, torch.float16)
    graph, out = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph):
            out = run(q, k, v)
    except RuntimeError as error:
        assert str(error)
        out = None
    torch.cuda.synchronize()
    expected = run(q, k, v)
    run.check(q, k, v, result=run(q, k, v, return_lse=True))
    if out is not None:
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads(backend):
    """Eight threads with a stream each, all meeting the variant for the first time at once."""
    every = [cases.make_inputs(Case(1, 100 + i, 200, 2, 1, 88, 88, causal=True), DEVICE).qkv for i in range(8)]
    run, outs, errors = runner(backend), [None] * len(every), []
    barrier = threading.Barrier(len(every))

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for _ in range(20):
                    outs[i] = run(*every[i], causal=True)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(every))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for qkv, out in zip(every, outs, strict=True):
        assert torch.equal(out, run(*qkv, causal=True))


def test_no_synchronisation():
    """A warm call never waits for the GPU."""
    inputs = cases.make_inputs(SHAPE, DEVICE)
    leaves = inputs.leaves()
    for _ in range(2):
        torch.autograd.grad(cute_flash.attention(*leaves, causal=True), leaves, inputs.dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(cute_flash.attention(*leaves, causal=True), leaves, inputs.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
