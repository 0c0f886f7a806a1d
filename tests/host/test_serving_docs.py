"""docs/serving.md runs. Its generation loop's tokens are those of plain attention: it asserts that itself."""

import re
from pathlib import Path

import pytest
import torch

import cute_flash

from .. import oracle

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


def block(words):
    (found,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if words in text)
    return found


LOOP = block("def layer")


@pytest.mark.usefixtures("office")
def test_generation_loop():
    names = {}
    exec(LOOP, names)
    assert names["generated"].shape == (2, 20)
    assert all(len(set(row.tolist())) > 5 for row in names["generated"])  # one word for ever proves no cache right


@pytest.mark.usefixtures("office")
@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("lengths = torch.zeros(2, dtype=torch.int32, device=device)\n", "table[1, 0] = table[0, 0]\n"),
        ("    lengths += 1\n", "    lengths -= 1\n"),
    ],
    ids=["a page for two texts", "lengths that stand still"],
)
def test_its_assertion_notices(place, fault):
    assert LOOP.count(place) == 1
    with pytest.raises(AssertionError):
        exec(LOOP.replace(place, place + fault), {})


@pytest.mark.usefixtures("office")
def test_from_a_padded_batch():
    torch.manual_seed(0)
    head_dim, mask = 8, torch.arange(9) < torch.tensor([[9], [2], [5]])
    hidden = torch.randn(3, 9, 32, dtype=torch.float64)
    to_q, to_k, to_v = (torch.nn.Linear(32, heads * head_dim, dtype=torch.float64) for heads in (4, 2, 2))
    names = {"cute_flash": cute_flash, "hidden": hidden, "mask": mask, "head_dim": head_dim}
    exec(block("unpad_input"), names := {**names, "to_q": to_q, "to_k": to_k, "to_v": to_v})
    q, k, v = (to(hidden).unflatten(-1, (-1, head_dim)) for to in (to_q, to_k, to_v))
    right = oracle.forward(q, k, v, causal=True).out  # padding stands on the right: real rows do not see it
    assert oracle.relative_error(names["out"][mask], right[mask]) < 1e-14 and not names["out"][~mask].any()


@pytest.mark.usefixtures("office")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_ring(dtype):
    """Every rank's output and the gradients of all shards are those of the whole; merged in float32, so is float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 32, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    code = block("def ring_attention")
    assert code.count(".float()") == 2
    exec(code.replace(".float()", ".double()") if dtype == torch.float64 else code, names := {"cute_flash": cute_flash})
    shards = [x.split(8, dim=1) for x in (q, k, v)]
    out = torch.cat([names["ring_attention"](shards[0][rank], *shards[1:], rank) for rank in range(4)], dim=1)
    d_out = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, (q, k, v), d_out)
    right = oracle.forward(q, k, v, causal=True).out, *oracle.backward(q, k, v, d_out, causal=True)
    rounded = 2.0**-8 if dtype == torch.bfloat16 else 1e-14  # parts are rounded to bfloat16, and so are their gradients
    assert out.dtype == dtype
    for mine, exact in zip(found, right, strict=True):
        assert oracle.relative_error(mine, exact) < rounded


@pytest.mark.usefixtures("office")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"window": (5, 0)}, {"softcap": 2.0}, {"window": (5, 0), "softcap": 2.0}], ids=str
)
def test_padded_prompts_fill_a_cache_in_one_call(paged, options):
    """As the page says it: prompts of 7, 21 and 2 tokens, padded on the right with large numbers, then five tokens."""
    torch.manual_seed(0)
    lens, longest = torch.tensor([7, 21, 2], dtype=torch.int32), 21
    texts = [torch.randn(3, longest + 5, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    caches = torch.full((2, 3, 32, 2, 16), torch.nan, dtype=torch.float64)
    table = {}
    if paged:
        caches = caches.view(2, 12, 8, 2, 16)
        table = {"page_table": torch.randperm(12).view(3, 4).int()}
    lengths, real = torch.zeros(3, dtype=torch.int32), [[x[i, :n] for x in texts] for i, n in enumerate(lens)]

    def step(q, k, v):
        return cute_flash.attention_kvcache(
            q, *caches, cache_seqlens=lengths, k_new=k, v_new=v, causal=True, **table, **options
        )

    padding = (torch.arange(longest) >= lens[:, None])[..., None, None]
    out = step(*(x[:, :longest] + 1e3 * padding for x in texts))
    assert not lengths.any()  # a call leaves them alone
    out = torch.stack([out[i, n - 1 : n] for i, n in enumerate(lens)])
    lengths += lens
    for token in range(longest, longest + 6):
        for i, parts in enumerate(real):
            right = oracle.forward(*(x[None] for x in parts), causal=True, **options).out[:, -1:]
            assert oracle.relative_error(out[i : i + 1], right) < 1e-13
        if token < longest + 5:
            new = [x[:, token : token + 1] for x in texts]
            out = step(*new)
            lengths += 1
            real = [
                [torch.cat(pair) for pair in zip(parts, (x[i] for x in new), strict=True)]
                for i, parts in enumerate(real)
            ]
