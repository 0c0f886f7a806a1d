"""Calls are remembered by kind: what a call runs is its own plan, whatever ran before it.

The plan here is the whole Problem, so that a fact which a key leaves out brings another call's plan to light.
`explain`, which remembers nothing, says what is right.
"""

import contextlib
from dataclasses import replace

import pytest
import torch

import cute_flash
from cute_flash import api, kvcache, varlen
from cute_flash.runtime import cache_ops, ops, packed_ops, request
from cute_flash.runtime.caches import Cache
from cute_flash.runtime.packed import Lengths
from cute_flash.spec import settings
from cute_flash.spec.plan import Tile
from cute_flash.spec.problem import SMALL_ROWS, SMALL_ROWS_FULL

from ..fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("office")

FACTS = (
    {}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"dtype": torch.float32, "tf32": True}, {"heads_q": 8},
    {"heads_kv": 4}, {"head_dim": 24}, {"head_dim_v": 24}, {"grad": True}, {"torch_deterministic": True},
    {"forced": "triton"}, {"backend": "triton"}, {"causal": True}, {"window": (3, None)}, {"window": (None, 3)},
    {"window": (3, 3)}, {"window": (3, None), "causal": True}, {"softcap": 2.0}, {"return_lse": True},
    {"deterministic": True}, {"grad": True, "return_lse": True},
)  # fmt: skip
OPTIONS = ("backend", "causal", "window", "softcap", "return_lse", "deterministic")
BOUNDS = ({}, {"causal": True}, {"window": (3, None)}, {"softcap": 2.0})
OF_DENSE = (
    *({"keys": keys, "grad": grad} for keys in (1024, 1025) for grad in (False, True)),
    *({"rows": few // 4 + more, **each} for few in (SMALL_ROWS_FULL, SMALL_ROWS) for more in (0, 1) for each in BOUNDS),
)  # fmt: skip
HINTS = ((None, None), (16, None), (17, None), (64, 64), (65, 64), (65, 65), (65, 1024), (65, 1025))
OF_PACKED = tuple({"hints": hints} for hints in HINTS)
OF_CACHE = (
    *({"rows": rows} for rows in (1, 2, 4, 5, 9, 33)), {"rows": 1, "causal": True}, {"page_size": 4}, {"page_size": 8},
    {"chosen": True}, {"new": 1}, {"new": 0}, {"page_size": 4, "new": 1},
)  # fmt: skip
NO_GRADIENTS = ("grad", "deterministic", "torch_deterministic")


class Telling(FakeBackend):
    """What it builds says which plan runs."""

    def __init__(self, name: str, ran: list) -> None:
        super().__init__(name)
        self.ran = ran

    def plan(self, problem):
        words = repr(replace(problem, unaligned=()))
        return replace(super().plan(problem), form=problem.form, variant=words, tile=Tile(64, 64))

    def build(self, plan):
        return lambda *operands: self.ran.append(plan)


@contextlib.contextmanager
def surroundings(facts: dict):
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.use_deterministic_algorithms(facts.get("torch_deterministic", False), warn_only=True)
        torch.backends.cuda.matmul.fp32_precision = "tf32" if facts.get("tf32") else "ieee"
        if "forced" in facts:
            with settings.override(backend=facts["forced"]):
                yield
        else:
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cuda.matmul.fp32_precision = precision


def operands(facts: dict, rows: int, keys: int) -> list[torch.Tensor]:
    heads_q, heads_kv = facts.get("heads_q", 4), facts.get("heads_kv", 2)
    dim, dim_v = facts.get("head_dim", 16), facts.get("head_dim_v", 16)
    shapes = (1, rows, heads_q, dim), (1, keys, heads_kv, dim), (1, keys, heads_kv, dim_v)
    dtype, grad = facts.get("dtype", torch.bfloat16), facts.get("grad", False)
    return [torch.zeros(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def starts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(facts: dict):
    return operands(facts, facts.get("rows", 3), facts.get("keys", 5)), {}


def packed(facts: dict):
    hints = dict(zip(("max_seqlen_q", "max_seqlen_k"), facts.get("hints", (4096, 4096)), strict=True))
    qkv = [x[0].detach().requires_grad_(x.requires_grad) for x in operands(facts, 3, 5)]
    return qkv, {"cu_seqlens_q": starts(0, 3), "cu_seqlens_k": starts(0, 5), **hints}


def cached(facts: dict):
    q, k, v = operands(facts, facts.get("rows", 2), facts.get("page_size", 40))
    tables = {"cache_seqlens": starts(3)}
    if "page_size" in facts:
        tables["page_table"] = torch.zeros((1, 10), dtype=torch.int32)
    if "chosen" in facts:
        tables["cache_batch_idx"] = starts(0)
    if "new" in facts:
        tables |= {"k_new": k[:, : facts["new"]].clone(), "v_new": v[:, : facts["new"]].clone()}
    return (q, k, v), tables


def _dense_operator(q, k, v, **options):
    return ops.attention(q, k, v, request.check_options(options, {}, settings.BACKEND_NAMES))


def _packed_operator(q, k, v, **given):
    lengths = Lengths(*(given.pop(name) for name in Lengths._fields))
    options = request.check_options(given, {}, settings.BACKEND_NAMES)
    return packed_ops.attention_varlen(q, k, v, lengths, options)


def _cache_operator(q, k, v, **given):
    names = ("cache_seqlens", "page_table", "cache_batch_idx", "k_new", "v_new")
    cache = Cache(k, v, *(given.pop(name, None) for name in names))
    return cache_ops.attention_kvcache(
        q, cache, request.check_options(given, {}, settings.BACKEND_NAMES), (None, False)
    )


CALLS = {
    "attention": (cute_flash.attention, dense, FACTS + OF_DENSE),
    "attention, operator": (_dense_operator, dense, FACTS + OF_DENSE),
    "attention_varlen": (cute_flash.attention_varlen, packed, FACTS + OF_PACKED),
    "attention_varlen, operator": (_packed_operator, packed, FACTS + OF_PACKED),
    "attention_kvcache": (cute_flash.attention_kvcache, cached, FACTS + OF_CACHE),
    "attention_kvcache, operator": (_cache_operator, cached, FACTS + OF_CACHE),
}


@pytest.fixture
def ran(backends):
    found: list = []
    backends(Telling("sm90", found), Telling("triton", found))
    for table in (ops._forwards, ops._backwards, packed_ops._forwards, packed_ops._backwards, cache_ops._calls):
        table.clear()
    return found


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_kind_runs_its_own_plan(ran, name, backwards):
    call, arguments, kinds = CALLS[name]
    if arguments is cached:
        kinds = [facts for facts in kinds if not any(word in facts for word in NO_GRADIENTS)]
    for facts in (*kinds[:: -1 if backwards else 1], *kinds):
        given, tables = arguments(facts)
        options = {word: facts[word] for word in OPTIONS if word in facts}
        with surroundings(facts):
            right = cute_flash.explain(*given, **tables, **options)
            ran.clear()
            result = call(*given, **tables, **options)
            plans = [right.plan]
            if right.backward is not None:
                outputs = result if options.get("return_lse") else [result]
                torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
                plans.append(right.backward.plan)
        assert ran == plans, facts


def test_what_is_remembered_is_found_again(ran):
    """Else the test above would pass with no memory at all."""
    for name, table in (
        ("attention", api._warm),
        ("attention_varlen", varlen._warm),
        ("attention_kvcache", kvcache._warm),
    ):
        call, arguments, _ = CALLS[name]
        given, tables = arguments({})
        call(*given, **tables)
        (remembered,) = table.values()
        call(*given, **tables)
        assert list(table.values()) == [remembered]
