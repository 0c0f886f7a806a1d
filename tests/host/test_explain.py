"""explain(): the walk as text and as facts, with nothing compiled."""

from dataclasses import replace

import pytest
import torch

from cute_flash import Decision, attention, explain
from cute_flash.runtime import compiler
from cute_flash.spec import settings
from cute_flash.spec.plan import Tile

from ..fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("office")


def qkv(head_dim=64, dtype=torch.bfloat16, requires_grad=False):
    return tuple(torch.zeros(2, 9, heads, head_dim, dtype=dtype, requires_grad=requires_grad) for heads in (4, 2, 2))


def test_the_walk_reads_from_top_to_bottom(simulated):
    simulated((9, 0))
    decision = explain(*qkv(requires_grad=True), causal=True)
    assert isinstance(decision, Decision)
    lines = str(decision).splitlines()
    problem, device = (
        "forward bfloat16 head_dim=64 heads=4/2 causal lse keys<=1024",
        "simulated 9.0 (cuda:0, capability 9.0)",
    )
    assert lines[0] == f"{problem} on {device}"
    assert lines[1].startswith("  runs: sm90 forward sm_90a bfloat16 d=64 causal tile ")
    assert lines[2].startswith("  sm100: runs on compute capability 10.0 and 10.3")
    backward = lines.index(next(line for line in lines if line.startswith("backward ")))
    assert lines[backward + 1].startswith("  runs: ")


@pytest.mark.parametrize(("capability", "backend", "words"), [
    ((9, 0), "sm90", ""), ((9, 0), "triton", ""), ((9, 0), "reference", ""),
    ((8, 6), "triton", "run on Hopper only so far"), ((12, 0), "triton", "run on Hopper only so far"),
    ((10, 0), "sm100", "not yet run on silicon"), ((10, 0), "triton", "run on Hopper only so far"),
])  # fmt: skip
def test_what_has_not_run_on_such_a_gpu_says_so(simulated, capability, backend, words):
    simulated(capability)
    decision = explain(*qkv(), backend=backend)
    caveats = [line for line in str(decision).splitlines() if line.startswith(f"  {backend}: ")]
    assert decision.facts()["caveat"] == decision.caveat and len(caveats) == bool(words)
    assert words in decision.caveat and bool(decision.caveat) == bool(words)


def test_the_backward_is_explained_only_where_gradients_are_on():
    assert explain(*qkv()).backward is None
    assert explain(*qkv(requires_grad=True)).backward.problem.direction == "backward"
    with torch.no_grad():
        assert explain(*qkv(requires_grad=True)).backward is None


def test_nothing_is_compiled_and_nothing_runs(backends):
    def kernel(*operands):
        pytest.fail("explain must not launch")

    (backend,) = backends(FakeBackend("sm90", kernel=kernel))
    explain(*qkv(requires_grad=True))
    assert backend.built == [] and compiler.stats.compiles == 0


def test_explain_names_what_would_be_copied(simulated):
    simulated((9, 0))
    q, k, v = qkv()
    assert explain(q, k, v).copies == ()
    row_65 = torch.zeros(2, 9, 4, 65, dtype=torch.bfloat16)[..., :64]
    assert explain(row_65, k, v).copies == ("q: copied, its heads stride of 130 bytes is not a multiple of 16",)
    last = torch.zeros(2, 9, 64, 2, dtype=torch.bfloat16).transpose(2, 3)
    assert explain(q, last, v).copies == ("k: copied, its last dimension has stride 2, not 1",)
    shifted = torch.zeros(2 * 9 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 9, 2, 64)
    assert explain(q, k, shifted).copies == ("v: copied, it starts 2 bytes past a multiple of 16",)
    odd = explain(*qkv(33))
    assert [copy[:2] for copy in odd.copies] == ["q:", "k:", "v:"]
    assert "q: copied, its last dimension 33 is not a multiple of 8" in str(odd)


def test_what_a_backend_reads_in_place_is_not_called_a_copy(simulated):
    simulated((8, 0))
    assert explain(*qkv(33)).copies == ()


def test_strides_of_single_elements_say_nothing(simulated):
    simulated((9, 0))
    q = torch.zeros(1, 1, 1, 65, dtype=torch.bfloat16)[..., :64]
    assert explain(q, q, q).copies == ()
    wide = torch.zeros(2, 1, 2, 64, dtype=torch.bfloat16).as_strided((2, 1, 2, 64), (128, 33, 64, 1))
    assert explain(wide, wide, wide).copies == ()


def test_expanded_tensors_are_read_in_place(simulated):
    simulated((9, 0))
    q = torch.zeros(1, 9, 1, 64, dtype=torch.bfloat16).expand(2, 9, 4, 64)
    assert explain(q, q, q).copies == ()


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_moves_into_q_is_named_as_a_copy(scale, capfd):
    q, k, v = qkv()
    sentence = f"q: copied to fold scale={scale} in"
    assert any(sentence in copy for copy in explain(q, k, v, scale=scale).copies)
    assert sentence in str(explain(q, k, v, scale=scale))
    with settings.override(log=frozenset({"dispatch"})):
        attention(q, k, v, scale=scale)
        attention(q, k, v, scale=scale)
    assert capfd.readouterr().err.count(sentence) == 1


def test_what_is_no_tensor_is_refused_by_name():
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor, got NoneType"):
        explain(None, None, None)


def test_deterministic_and_lse_are_part_of_the_problem():
    text = str(explain(*qkv(), deterministic=True, return_lse=True))
    assert "lse deterministic" in text.splitlines()[0]


def test_explain_and_attention_agree(backends):
    backends(FakeBackend("sm90", is_native=False, refusals=("not here",)), FakeBackend("triton"))
    q, k, v = qkv(requires_grad=True)
    decision = explain(q, k, v, causal=True)
    attention(q, k, v, causal=True).sum().backward()
    assert {decision.plan, decision.backward.plan} == set(decision.backend.built)


def few_rows(seqlen_q, seqlen_k, **sizes):
    heads_kv, group, batch = (sizes.get(name, 1) for name in ("heads_kv", "group", "batch"))
    shapes = ((batch, seqlen_q, heads_kv * group, 64), *[(batch, seqlen_k, heads_kv, 64)] * 2)
    return tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=str)
def test_plans_that_run_instead_where_query_rows_are_few_are_named(simulated, capability):
    simulated(capability)
    shared = explain(*few_rows(5, 1000), causal=True)
    (sentence,) = shared.sharing
    assert sentence == f"few query rows: 8 CTAs share the keys of a query tile, by {shared.backend.split(shared.plan)}"
    assert f"  {sentence}" in str(shared).splitlines()
    packed = explain(*few_rows(1, 1000, heads_kv=2, group=3), causal=True)
    rows, keys = packed.sharing
    assert rows.startswith("one query row: the 3 heads of a group share a tile, by ") and " full tile " in rows
    assert (
        keys.startswith("few query rows: 8 CTAs share the keys") and keys.endswith(" split") and " full tile " in keys
    )


def test_packed_query_rows_are_named(simulated):
    simulated((10, 0))
    packed = explain(*few_rows(5, 1000, heads_kv=2, group=3), causal=True)
    plan = packed.backend.pack(packed.plan)
    assert packed.sharing == (f"few query rows: the 3 heads of a group share a tile and 8 CTAs its keys, by {plan}",)
    many = explain(*few_rows(43, 1000, heads_kv=2, group=3), causal=True)  # 129 rows of a group
    assert all("share the keys" in sentence and sentence.endswith(" split") for sentence in many.sharing)


def test_where_nothing_is_shared_nothing_is_said_of_it(simulated):
    simulated((9, 0))
    for inputs in (few_rows(5, 128), few_rows(4096, 4096, heads_kv=16), few_rows(0, 1000), few_rows(1, 0, group=2)):
        assert explain(*inputs).sharing == ()
    inputs = few_rows(1, 1000, group=2)
    for options in ({"window": (9, 0)}, {"softcap": 9.0}, {"backend": "triton"}):
        assert explain(*inputs, **options).sharing == ()


class SharingBackend(FakeBackend):
    """Splits keys, and packs the rows of a group, as a plain plan's backend may."""

    def plan(self, problem):
        return replace(super().plan(problem), tile=Tile(128, 64))

    def split(self, plan):
        return replace(plan, variant="split") if plan.plain else None

    def pack(self, plan):
        return replace(plan, variant="packed") if plan.plain else None


@pytest.mark.parametrize(
    "inputs",
    [
        few_rows(5, 1000),
        few_rows(1, 1000, heads_kv=2, group=3),
        few_rows(1, 100, group=2),
        few_rows(42, 1000, heads_kv=2, group=3),
        few_rows(43, 1000, heads_kv=2, group=3),
    ],
)
def test_what_explain_says_of_few_query_rows_is_what_runs(simulated, backends, inputs):
    simulated((9, 0))
    (backend,) = backends(SharingBackend())
    decision = explain(*inputs)
    attention(*inputs)
    assert len(decision.sharing) == len({sentence.split(", by ")[1] for sentence in decision.sharing}) > 0
    assert {str(plan) for plan in backend.built} >= {sentence.split(", by ")[1] for sentence in decision.sharing}
    shared = bool({"split", "packed"} & {plan.variant for plan in backend.built})
    assert shared == any("CTAs" in said for said in decision.sharing)
