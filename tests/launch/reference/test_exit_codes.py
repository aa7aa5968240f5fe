"""The page of exit codes has every code."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.core import TyperGroup

from rolloutmq.bus import lifecycle
from rolloutmq.launch import cli, endings, local
from rolloutmq.schemas import process
from rolloutmq.services.monitor.text import exit_codes
from rolloutmq.trainer import process as trainer_process

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "exit-codes.md").read_text()


def codes_of(module: ModuleType) -> dict[str, int]:
    """Return the constants of a module that are exit codes."""
    prefix = "EXIT_" if module in {endings, local} else ""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and name.isupper() and not name.startswith("_") and name.startswith(prefix)
    }


@pytest.mark.parametrize(
    "module",
    [lifecycle, endings, local, process, exit_codes, trainer_process],
    ids=lambda module: str(module.__name__),
)
def test_every_code_has_a_row(module: ModuleType) -> None:
    codes = codes_of(module)
    rows = set(map(int, re.findall(r"^\| `(\d+)` \|", PAGE, re.MULTILINE)))
    assert codes
    assert set(codes.values()) <= rows
    assert rows == {0, 1, 2, 3, 4, 5, 6, 130}


def test_every_permanent_error_has_a_row() -> None:
    tuples = [value for value in vars(lifecycle).values() if isinstance(value, tuple)]
    (permanent,) = [value for value in tuples if all(isinstance(one, type) for one in value)]
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("\n## Code 3")[2], re.MULTILINE))
    assert {error.__name__ for error in permanent} == named


def test_every_process_has_a_row() -> None:
    rows = set(
        re.findall(r"^\| (\w+) \|", PAGE.partition("\n## Processes")[2].partition("\n## ")[0], re.MULTILINE)
    )
    roles = {role.value for role in process.Role if role is not process.Role.LAUNCHER}
    assert rows - {"process"} == roles


def test_every_command_that_starts_a_run_has_a_row() -> None:
    section = PAGE.partition("\n## Commands")[2].partition("\n## ")[0]
    firsts = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert {"up", "evaluate", "replay", "gateway"} <= set(re.findall(r"`(\w+)`", " ".join(firsts)))


def test_every_visible_command_with_a_code_of_its_own_exists() -> None:
    section = PAGE.partition("\n## Commands")[2].partition("\n## ")[0]
    named = {word.split()[0] for word in re.findall(r"`([a-z]+(?: --?[a-z]+| [a-z]+)?)`", section)}
    command = typer.main.get_command(cli.app)
    assert isinstance(command, TyperGroup)
    known = command.commands
    assert named - {"python"} <= set(known)
