"""The documents: every block of Python runs, every command is one, every link leads somewhere, and the README's figures
are those of perf/results.
"""

import argparse
import functools
import importlib.util
import re
import shlex
import types
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cute_flash
from perf import page as report_page
from perf import records, report

from .. import oracle
from ..conftest import ROOT

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("*.md"))}
PAGES |= {path: (ROOT / path).read_text() for path in ("arch/README.md", "perf/README.md", "perf/NOTES.md")}
PAGES |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, code) for page, text in PAGES.items() for words, code in FENCED.findall(text) if words == "python"]


# --------------------------------------------------------------------------------------------------- blocks of Python


def qkv(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def whole(q, k, v, **options):
    return oracle.forward(q, k, v, **options).out


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return cute_flash.attention(q, k, v, causal=True)


@contextmanager
def a_graph(monkeypatch):
    """Of the eager backend: what Inductor makes of it is for its own tests."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model, inputs = Model(), tuple(qkv(*[(2, 9, 2, 8)] * 3))
    length = torch.export.Dim("length", min=2, max=64)
    names = {"model": model, "inputs": inputs, "shapes": [{1: length}] * 3}
    yield names
    longer = qkv(*[(2, 13, 2, 8)] * 3)
    for step in (names["step"], names["program"].module()):
        assert oracle.relative_error(step(*longer), whole(*longer, causal=True)) < 1e-12
    if cute_flash.spec.versions.release(torch.__version__) >= (2, 11):
        assert oracle.relative_error(names["attend"](*longer), whole(*longer)) < 1e-12


@contextmanager
def selective_checkpointing(monkeypatch):
    names = {"functools": functools, "create_selective_checkpoint_contexts": create_selective_checkpoint_contexts}
    yield names
    q, k, v = (x.requires_grad_() for x in qkv(*[(1, 9, 2, 8)] * 3))
    out = checkpoint(cute_flash.attention, q, k, v, use_reentrant=False, context_fn=names["policy"])
    out.sum().backward()
    for x, right in zip((q, k, v), oracle.backward(q, k, v, torch.ones_like(out), None), strict=True):
        assert oracle.relative_error(x.grad, right) < 1e-12


@contextmanager
def sharded_heads(monkeypatch):
    if not dist.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, plain = init_device_mesh("cpu", (1,)), qkv(*[(1, 9, 2, 8)] * 3)
        q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in plain)
        names = {"local_map": local_map, "Shard": Shard, "q": q, "k": k, "v": v}
        yield names
        assert names["out"].placements == (Shard(2),)
        assert oracle.relative_error(names["out"].full_tensor(), whole(*plain)) < 1e-12
    finally:
        dist.destroy_process_group()


@contextmanager
def transformers(monkeypatch):
    library = pytest.importorskip("transformers")
    config = library.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=50
    )
    auto = types.SimpleNamespace(
        from_pretrained=lambda name, **options: library.AutoModelForCausalLM.from_config(name, **options)
    )
    names = {"AutoModelForCausalLM": auto, "name": config}
    yield names
    assert names["model"].config._attn_implementation == "cute_flash"


@contextmanager
def patched(monkeypatch):
    """Our SDPA is on inside, and torch's again outside."""
    seen, theirs = [], torch.nn.functional.scaled_dot_product_attention
    yield {"model": lambda x: seen.append(torch.nn.functional.scaled_dot_product_attention), "x": None}
    assert seen[0] is not theirs and torch.nn.functional.scaled_dot_product_attention is theirs


@contextmanager
def flash_attn(monkeypatch):
    names = {}
    yield names
    q, k, v = qkv(*[(1, 9, 2, 8)] * 3)
    assert oracle.relative_error(names["flash_attn_func"](q, k, v, causal=True), whole(q, k, v, causal=True)) < 1e-12


@contextmanager
def packed(monkeypatch):
    names = dict(zip("qkv", qkv(*[(17, 2, 8)] * 3), strict=True))
    yield names
    for start, stop in ((0, 5), (5, 17)):
        one = (names[name][None, start:stop] for name in "qkv")
        assert oracle.relative_error(names["out"][None, start:stop], whole(*one, causal=True)) < 1e-12


@contextmanager
def decoding(monkeypatch):
    names = dict(zip(("q", "k", "v", "k_cache", "v_cache"), qkv(*[(2, 1, 2, 8)] * 3, *[(2, 9, 2, 8)] * 2), strict=True))
    names["lengths"] = torch.tensor([3, 8], dtype=torch.int32)
    before = names["k_cache"].clone()
    yield names
    for row, length in enumerate(names["lengths"].tolist()):
        keys, values = (names[name][row : row + 1, : length + 1] for name in ("k_cache", "v_cache"))
        assert torch.equal(keys[0, :length], before[row, :length]) and torch.equal(keys[0, -1:], names["k"][row])
        right = whole(names["q"][row : row + 1], keys, values, causal=True)
        assert oracle.relative_error(names["out"][row : row + 1], right) < 1e-12


@contextmanager
def merging(monkeypatch):
    q, k, v = qkv((1, 4, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    names = {}
    for part, keys in (("1", slice(0, 5)), ("2", slice(5, 9))):
        names["o" + part], names["lse" + part] = cute_flash.attention(q, k[:, keys], v[:, keys], return_lse=True)
    yield names
    assert oracle.relative_error(names["o"], whole(q, k, v)) < 1e-12


# What a block names is given, what it leaves is checked. By its page and a line of it.
AROUND = {
    ("docs/pytorch.md", "step = torch.compile(model"): a_graph,
    ("docs/pytorch.md", "policy = functools.partial("): selective_checkpointing,
    ("docs/pytorch.md", "out = local_map("): sharded_heads,
    ("docs/pytorch.md", "cute_flash_transformers.register()"): transformers,
    ("docs/pytorch.md", "with sdpa.patch():"): patched,
    ("docs/pytorch.md", "import flash_attn_func"): flash_attn,
    ("docs/serving.md", "starts = torch.tensor([0, 5, 5, 17]"): packed,
    ("docs/serving.md", "out = cute_flash.attention_kvcache(q, k_cache"): decoding,
    ("docs/serving.md", "o, lse = cute_flash.merge_attention_states("): merging,
}
# Files that run the blocks of a page which stand alone.
ALONE = {
    ("README.md", "q, k, v = (torch.randn("): "host/test_readme.py",
    ("docs/serving.md", "x, indices, starts"): "host/test_serving_docs.py",
    ("docs/serving.md", "def layer("): "host/test_serving_docs.py",
    ("docs/serving.md", "def ring_attention("): "host/test_serving_docs.py",
    ("docs/emulator.md", "cute_flash.emulate("): "emulator/test_docs.py",
    ("docs/emulator.md", "@cute.kernel"): "emulator/test_docs.py",
}


def _found(page, code, table):
    return [value for (where, line), value in table.items() if where == page and line in code]


def test_every_block_is_run_somewhere():
    for page, code in BLOCKS:
        assert len(_found(page, code, AROUND) + _found(page, code, ALONE)) == 1, f"{page}:\n{code}"
    assert len(BLOCKS) == len(AROUND) + len(ALONE)
    for (page, _), file in ALONE.items():
        assert page.split("/")[-1] in (ROOT / "tests" / file).read_text()


@pytest.mark.usefixtures("office")
@pytest.mark.parametrize("page, line", AROUND)
def test_a_block_runs_and_does_what_it_says(page, line, monkeypatch):
    (code,) = (code for where, code in BLOCKS if where == page and line in code)
    with AROUND[page, line](monkeypatch) as names:
        names |= {"torch": torch, "cute_flash": cute_flash}
        exec(code, names)


# -------------------------------------------------------------------------------------------------- commands and links


class _Read(BaseException):
    """A command line was understood."""


def _commands():
    """(page, module, words) of every `python -m module words` in a block or in the text."""
    for page, text in PAGES.items():
        if page == "perf/NOTES.md":  # of many days: what stands there ran then
            continue
        lines = [line for words, block in FENCED.findall(text) if not words for line in block.splitlines()]
        lines += re.findall(r"`(python -m [^`]+)`", FENCED.sub("", text))
        shorthand = {name: words for line in lines for name, words in re.findall(r'^(\w)="(.*)"$', line)}
        for line in lines:
            for name, words in shorthand.items():
                line = line.replace(f"${name} ", f"{words} ")
            found = re.match(r"python -m ((?:perf|scripts|cute_flash)[.\w]*) ?(.*)", line)
            if found and found[1] != "scripts.NAME":
                yield page, found[1], tuple(shlex.split(found[2], comments=True))


COMMANDS = sorted(set(_commands()))


@pytest.mark.parametrize("page, module, words", COMMANDS)
def test_a_command_is_understood(page, module, words, monkeypatch):
    if not words:  # a tool's name; some take no words
        assert importlib.util.find_spec(module)
        return
    parse = argparse.ArgumentParser.parse_args

    def read(self, argv=None):
        parse(self, argv)
        raise _Read

    main = importlib.import_module("cute_flash.cli" if module == "cute_flash" else module).main
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    with pytest.raises(_Read):
        main(list(words))


def test_commands_were_found():
    assert {page for page, _, _ in COMMANDS} >= {"README.md", "perf/README.md", "docs/loops.md", "docs/mutation.md"}
    assert len(COMMANDS) > 30


def _anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
            path, _, anchor = target.partition("#")
            if path.startswith(("http://", "https://")):
                continue
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), f"{page}: {target}"
            if anchor and page != "perf/NOTES.md":  # perf.contents makes those, and is tested
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                assert anchor in map(_anchor, headings), f"{page}: {target}"


def test_files_that_the_pages_name_are_there():
    """Folders of this tree, spelled from its top: `perf/results/varlen.csv`, `tests/host/test_kinds.py`, ..."""
    for page, text in PAGES.items():
        if page in ("perf/NOTES.md", "CHANGELOG.md"):  # what they name may be gone
            continue
        for name in re.findall(r"`((?:perf|tests|scripts|docs|arch|cute_flash)/[\w./]+\.\w+)`", text):
            assert "/X/" in name or (ROOT / name).exists(), f"{page}: {name}"


# ------------------------------------------------------------------------------------------------------------- figures

TABLES = {"hopper_forward": "hopper_forward", "hopper_backward": "hopper_backward", "foundation": "hopper_foundation"}


def _rows(name):
    return records.read([ROOT / "perf" / "results" / f"{name}.csv"])


@pytest.mark.parametrize("name", TABLES)
def test_the_readmes_tables_are_those_of_the_csvs(name):
    """Each line is one that perf.report makes of the commits which the table names, the means are of these lines."""
    block = PAGES["README.md"].split(f"<!-- results:{name} -->\n")[1].split("\n<!-- /results -->")[0]
    (commits,) = re.findall(r", commits? ([\w, ]+), torch ", block)
    rows = [row for row in _rows(TABLES[name]) if row["commit"] in commits.split(", ")]
    lines, made = block.splitlines(), report.markdown(rows).splitlines()
    shown = [line for line in lines if line.startswith("|")]
    assert len(shown) > 5 and set(shown) <= set(made) and lines[-1] == made[-1]
    table = {key: row for key, row in records.measured(rows).items() if row}
    order = [line for line in made if line.startswith("|")][2:]
    keys = sorted(table, key=report.sort_key)
    kept = {key: table[key] for key, line in zip(keys, order, strict=True) if line in shown}
    assert [line[2:] for line in lines if line.startswith("- ")] == report.verdict_lines(kept)


@pytest.mark.parametrize("name", ["hopper_forward", "hopper_backward"])
def test_sentences_about_all_points_are_true(name):
    points = {key: row for key, row in records.measured(_rows(name)).items() if row}
    ratios = [report.ratio_to_best_rival(row) for row in points.values()]
    count, mean = str(len(ratios)), f"{records.geometric_mean(ratios):.3f}"
    readme = " ".join(PAGES["README.md"].split(f"<!-- results:{name} -->")[0].split("## Results")[1].split())
    sentence = r"Over all (\d+) points measured.*? runs at ([\d.]+) times the best rival's speed"
    assert re.findall(sentence, readme)[-1] == (count, mean)
    sentence = rf"([\d.]+) times the best rival's speed over (\d+) points, least ([\d.]+) \(`perf/results/{name}.csv`"
    assert re.findall(sentence, PAGES["CHANGELOG.md"]) == [(mean, count, f"{min(ratios):.3f}")]


@pytest.mark.slow
def test_the_report_is_the_page_of_these_csvs():
    """But for its pictures, which another matplotlib draws in other bytes."""
    pytest.importorskip("matplotlib")
    pictures = re.compile(r"base64,[\w+/=]+")
    stored = (ROOT / "perf" / "report.html").read_text(encoding="utf-8")
    assert pictures.sub("", stored) == pictures.sub("", report_page.page()), "write it anew: see perf/README.md"
    assert len(pictures.findall(stored)) == 4
