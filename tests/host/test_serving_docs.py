"""The generation loop of docs/serving.md runs, and its tokens are those of plain attention: it asserts that itself."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
(LOOP,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def layer" in text)


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
