"""The CLI reference."""

from pathlib import Path

from rolloutmq.launch.reference.cli import page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"


def test_the_page_is_that_of_the_commands() -> None:
    assert PAGE.read_text() == page(), "`make reference` writes it"


def test_commands_of_groups_and_their_options_are_on_the_page() -> None:
    sections = {line for line in page().splitlines() if line.startswith("## ")}
    assert {"## `rolloutmq up`", "## `rolloutmq dead requeue`", "## `rolloutmq ledger verify`"} <= sections
    assert "| `--resume` |  | " in page()
    assert "| `CONFIG` | required | " in page()
