"""Kernels whose CTAs draw their tiles, beside each other: no two that may overlap share a counter, all leave zero."""

import pytest
import torch

import cute_flash
from cute_flash.runtime import counters
from tests import cases
from tests.cases import Case
from tests.device.gpu import BACKENDS, DEVICE

pytestmark = pytest.mark.skipif("sm90" not in BACKENDS, reason="another GPU's kernels draw nothing")

# about 0.2 ms each: long enough that launches on two streams do overlap
SHAPES = [
    Case(2, 2048, 2048, 16, 16, 64, 64, causal=True),
    Case(1, 2048, 2048, 16, 4, 128, 128, causal=True),
    Case(1, 1500, 2500, 8, 8, 256, 256, causal=True),
    Case(1, 4096, 4096, 16, 16, 64, 64),
]
REPEATS = 30


@pytest.fixture
def drawn():
    every = [(cases.make_inputs(shape, DEVICE).qkv, shape.causal) for shape in SHAPES]
    expected = [cute_flash.attention(*qkv, causal=causal, backend="sm90") for qkv, causal in every]
    torch.cuda.synchronize()
    yield every, expected
    torch.cuda.synchronize()
    made = counters._devices[torch.cuda.current_device()]
    assert made.of_stream
    assert not any(counter.item() for counter in (*made.of_stream.values(), *made.captured))


def run(every):
    return [cute_flash.attention(*qkv, causal=causal, backend="sm90") for qkv, causal in every]


def same(outs, expected):
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_repeats_are_equal(drawn):
    every, expected = drawn
    for _ in range(REPEATS):
        assert same(run(every), expected)


def test_streams_at_once(drawn):
    every, expected = drawn
    streams, outs = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(REPEATS):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(run(every))
    assert all(same(each, expected) for each in outs)


def test_graph_replay_beside_eager_calls(drawn):
    every, expected = drawn
    graphs, captured = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(run(every) + run(every))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(REPEATS):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        outs = run(every)
        assert same(outs, expected)
        assert all(same(each, expected + expected) for each in captured)


def test_foreign_stream(drawn):
    every, expected = drawn
    made = torch.cuda.Stream()
    foreign = torch.cuda.ExternalStream(made.cuda_stream)
    with torch.cuda.stream(foreign):
        outs = run(every)
    assert same(outs, expected)
