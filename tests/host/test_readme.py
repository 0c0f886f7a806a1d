"""What the README tells a newcomer to type."""

import re
import shlex

import pytest

from cute_flash import cli
from cute_flash.spec import settings

from ..conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"`python -m cute_flash ([^`]+)`", README + (ROOT / "docs" / "pytorch.md").read_text())


@pytest.mark.usefixtures("office")
def test_the_first_call(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(code, names)
    assert names["out"].shape == (2, 1024, 8, 64) and names["lse"].shape == (2, 8, 1024)
    assert "runs: " in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_are_commands(command):
    words = shlex.split(command)
    assert cli.parser().parse_args(words).run.__name__ == words[0]


@pytest.mark.usefixtures("office")
def test_the_walk_that_is_explained(capsys):
    page = (ROOT / "docs" / "pytorch.md").read_text()
    command, walk = re.search(r"```\n\$ python -m cute_flash (.*)\n([^`]*)```", page).groups()
    assert cli.main(shlex.split(command)) == 0
    assert capsys.readouterr().out == walk
    choices = (ROOT / "cute_flash" / "spec" / "plan.py").read_text()
    for name in ("tile_m", "stages", "draws", "votes"):
        assert re.search(rf"^    {name}: .*  # ", choices, re.MULTILINE), name


def test_every_command_and_variable_is_named():
    assert {command.split()[0] for command in COMMANDS} == {"bench", "cache", "doctor", "explain", "warmup"}
    source = (ROOT / "cute_flash" / "spec" / "settings.py").read_text()
    variables = set(re.findall(r'"(CUTE_FLASH_\w+)"', source))
    table = set(re.findall(r"^\| `(CUTE_FLASH_\w+)` \|", README, re.MULTILINE))
    assert table == variables and len(table) == len(settings.Settings.__dataclass_fields__)
