"""python -m cute_flash warmup: which kernels it compiles, for which GPU, and what it says."""

import json

import pytest
import torch

from cute_flash import cli, explain, warmup
from cute_flash.runtime import compiler
from cute_flash.spec import settings
from cute_flash.spec.problem import FORWARD

from ..fakes import FakeBackend, HostDslBackend

pytestmark = pytest.mark.usefixtures("office")


def test_warmup_fills_the_cache_that_the_call_then_finds(backends, capsys):
    (backend,) = backends(HostDslBackend())
    command = ["warmup", "--head-dim", "128", "--direction", "forward", "--lse", "no", "--causal", "no"]
    assert cli.main(command) == 0
    assert "compiled in" in capsys.readouterr().out
    compiler.forget()
    assert cli.main(command) == 0
    assert "from disk in" in capsys.readouterr().out and len(backend.built) == 1


def test_warmup_compiles_side_by_side(backends, capsys):
    backends(HostDslBackend())
    assert cli.main(["warmup", "--head-dim", "64", "--direction", "forward", "--causal", "no", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.count("compiled in") == 2
    assert len(list(settings.current.cache_dir.glob("*.so"))) == 2


def test_warmup_covers_the_grid_it_is_given(backends):
    backends(FakeBackend("sm90", exports=True))
    arguments = cli.parser().parse_args(
        ["warmup", "--head-dim", "64", "192,128", "--dtype", "bfloat16", "float16", "--direction", "both"]
    )
    plans, skipped = warmup.variants(arguments)
    forward = [plan for plan in plans if plan.direction == "forward"]
    assert len(forward) == 2 * 2 * 2 * 2 and len(plans) == len(forward) + 2 * 2 * 2 and skipped == []


def test_warmup_compiles_what_few_query_rows_run_too():
    command = ["warmup", "--head-dim", "128", "--direction", "forward", "--lse", "no", "--causal", "no"]

    def variants(*more):
        plans, _ = warmup.variants(cli.parser().parse_args([*command, *more]))
        return [plan.variant for plan in plans]

    assert sorted(variants()) == ["", "", "split"]  # tiles of 128 rows, and of 64 for few rows of all sequences
    assert variants("--split", "no") == ["", ""] and variants("--split", "yes") == ["split"]


def test_warmup_compiles_what_serving_calls():
    """The plans that calls of attention_kvcache and attention_varlen have, and no others."""

    def plans(*more):
        command = ["warmup", "--head-dim", "128", "--lse", "no", "--direction", "forward", *more]
        found, skipped = warmup.variants(cli.parser().parse_args(command))
        assert skipped == []
        return set(found)

    q, q3 = (torch.empty(2, rows, 32, 128, dtype=torch.bfloat16, device="meta") for rows in (1, 3))
    pages, table = (torch.empty(*sizes, device="meta") for sizes in ((9, 16, 8, 128), (2, 4)))
    tables = {"cache_seqlens": table[:, 0].contiguous().int(), "page_table": table.int()}
    new = {name: torch.empty(2, 1, 8, 128, dtype=torch.bfloat16, device="meta") for name in ("k_new", "v_new")}
    wanted = {
        explain(rows, pages.bfloat16(), pages.bfloat16(), **tables, **more, arch="9.0").plan
        for rows in (q, q3) for more in ({}, new, {"causal": True}, {"causal": True, **new})
    }  # fmt: skip
    assert wanted < plans("--form", "cache", "--page-size", "16", "--rows", "4", "12")
    assert plans("--form", "cache", "--page-size", "16", "--rows", "4", "--causal", "no", "--append", "no") < wanted
    rows, starts = torch.empty(1000, 8, 128, dtype=torch.bfloat16, device="meta"), torch.empty(3, device="meta").int()
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    hints = [{}, {"max_seqlen_q": 9000, "max_seqlen_k": 900}]
    hints += [{"max_seqlen_q": few, "max_seqlen_k": few} for few in (40, 16)]
    wanted = {explain(rows, rows, rows, **lengths, **hint, causal=True, arch="9.0").plan for hint in hints}
    assert plans("--form", "packed", "--causal", "yes") == wanted and len(wanted) == 4
    found = (explain(rows.requires_grad_(), rows, rows, **lengths, **hint, arch="9.0") for hint in hints)
    wanted = {each.backward.plan for each in found}
    assert plans("--form", "packed", "--causal", "no", "--direction", "backward") == wanted and len(wanted) == 2


def test_warmup_counts_the_multiprocessors_of_the_gpu_it_compiles_for(simulated):
    """The count is in the plan: a kernel of another count is never found."""

    def counts(*more):
        plans, _ = warmup.variants(cli.parser().parse_args(["warmup", *more]))
        return {plan.ctas for plan in plans if plan.direction == "forward"}  # a backward is not persistent

    assert counts() == {132, 264} and counts("--sms", "114") == {114}  # small tiles: two CTAs on each, if enough
    here = simulated((9, 0), sm_count=78)
    assert counts() == {here.sm_count} == {78} and counts("--sms", "114") == {114}


def kinds(*command):
    """(dtype, head dims, mask, softcap) of the forwards that warmup would compile."""
    plans, _ = warmup.variants(cli.parser().parse_args(["warmup", *command]))
    forwards = {plan for plan in plans if plan.direction == FORWARD}
    return {(p.dtype, p.head_dim, p.head_dim_v, str(p.mask), p.softcap) for p in forwards}


def test_warmup_reads_a_models_configuration(backends, tmp_path):
    backends(FakeBackend("sm90", exports=True))
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 512, "num_attention_heads": 8, "sliding_window": 128, "torch_dtype": "float16"}')
    wanted = {("float16", 64, 64, mask, False) for mask in ("full", "causal", "window(left,0)")}
    assert kinds("--config", str(path)) == wanted
    assert kinds("--config", str(path), "--dtype", "float32") == {("float32", *rest) for _, *rest in wanted}
    nested = {"head_dim": 256, "attn_logit_softcapping": 50.0, "sliding_window": 9, "use_sliding_window": False}
    path.write_text(json.dumps({"text_config": nested}))
    assert {kind[1:4] for kind in kinds("--config", str(path))} == {(256, 256, "full"), (256, 256, "causal")}
    latent = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    path.write_text(json.dumps(latent))
    assert {kind[1:3] for kind in kinds("--config", str(path))} == {(192, 128)}
    for text, sentence in (("{}", "has no 'hidden_size'"), ("{", "config.json: Expecting")):
        path.write_text(text)
        with pytest.raises(SystemExit, match=sentence):
            kinds("--config", str(path))


@pytest.mark.parametrize(("heads", "rows"), [((32, 8), 4), ((64, 4), 16), ((40, None), 1), ((8, 8), 1), ((71, 1), 71)])
def test_warmup_takes_a_models_group_for_its_cache(heads, rows, tmp_path):
    """How many query rows share a head of keys tells kernels over a cache apart."""
    path, (heads_q, heads_kv) = tmp_path / "config.json", heads
    path.write_text(json.dumps({"head_dim": 128, "num_attention_heads": heads_q, "num_key_value_heads": heads_kv}))

    def plans(*more):
        found, _ = warmup.variants(cli.parser().parse_args(["warmup", "--form", "cache", "--page-size", "16", *more]))
        return set(found)

    dims = ("--head-dim", "128")
    assert plans("--config", str(path)) == plans("--rows", str(rows), *dims)
    assert plans("--config", str(path), "--rows", "9") == plans("--rows", "9", *dims) != plans(*dims)
    assert plans("--rows", "1", *dims) == plans(*dims)


def test_warmup_reads_a_list(backends, tmp_path):
    backends(FakeBackend("sm90", exports=True))
    path = tmp_path / "kernels"
    path.write_text("# decoding\n--head-dim 128 --causal no\n\n--head-dim 64 --dtype float16 --window 7,0 # a window\n")
    assert kinds("--list", str(path)) == {
        ("bfloat16", 128, 128, "full", False),
        ("float16", 64, 64, "window(left,0)", False),
    }
    with pytest.raises(SystemExit, match="No such file"):
        kinds("--list", str(tmp_path / "absent"))


def test_warmup_counts_as_it_goes(backends, capsys):
    backends(HostDslBackend())
    command = ["warmup", "--head-dim", "64", "--direction", "forward", "--causal", "no", "--jobs", "1"]
    assert cli.main(command) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "2 kernels for simulated 9.0 (cuda:0, capability 9.0)"
    assert [line.split("]")[0] for line in lines] == ["[1/2", "[2/2"]


def test_warmup_compiles_for_the_gpu_that_is_here(simulated, backends):
    """Not for a Hopper that is not: unless it is asked for."""

    def targets(*more):
        plans, _ = warmup.variants(cli.parser().parse_args(["warmup", "--head-dim", "128", *more]))
        return {plan.arch for plan in plans}

    assert targets() == {"sm_90a"} and targets("--arch", "sm100") == {"sm_100a"}
    simulated((10, 3))
    assert targets() == {"sm_103a"} and targets("--arch", "9.0") == {"sm_90a"}


def test_warmup_says_what_it_skips(backends, capsys):
    backends(FakeBackend("sm90", is_native=False, refusals=("no",)), FakeBackend("triton"))
    assert cli.main(["warmup", "--head-dim", "64", "--direction", "forward"]) == 0
    assert "skipped: forward" in capsys.readouterr().out


def test_warmup_reports_a_kernel_that_does_not_compile(backends, capsys):
    backends(FakeBackend("sm90", exports=True, error=RuntimeError("too many registers")))
    assert cli.main(["warmup", "--head-dim", "64", "--direction", "forward"]) == 1
    assert "too many registers" in capsys.readouterr().out


def test_warmup_without_a_cache_has_nowhere_to_put_things(capsys):
    with settings.override(cache_dir=None):
        assert cli.main(["warmup"]) == 2
    assert "turns the disk cache off" in capsys.readouterr().err
    with settings.override(emulate="sm_90a"):
        assert cli.main(["warmup"]) == 2
    assert "CUTE_FLASH_EMULATE=sm_90a is set, and emulated kernels are not kept" in capsys.readouterr().err


def test_warmup_names_a_backward_of_few_rows_with_shared_keys_and_without():
    command = ["warmup", "--direction", "backward", "--head-dim", "128", "--causal", "yes", "--dtype", "bfloat16"]
    plans, _ = warmup.variants(cli.parser().parse_args(command))
    assert {(plan.variant, plan.deterministic) for plan in plans} == {("", True), ("shared", False)}
    q, k = (torch.empty(1, 1024, heads, 128, device="meta", dtype=torch.bfloat16) for heads in (8, 2))
    for keys in (q, k):
        found = explain(q.requires_grad_(), keys, keys, causal=True, arch="9.0").backward.plan
        assert found in plans and found.variant == ("shared" if keys is k else "")
