"""The prose of the pages, and the program that measures it."""

from pathlib import Path

from tests.house import prose
from tests.house.prose import LIMIT, measure, pages, prose_of


def test_no_page_is_full_of_relative_clauses() -> None:
    above = [one.line() for one in map(measure, pages()) if one.ratio > LIMIT]
    assert not above, "`python tests/house/prose.py` lists the sentences"


def test_code_and_tables_are_no_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "It runs.\n\n```sh\nthat which who\n```\n\n| what | that |\n|---|---|\n\nSee `which` [here](what.md).\n"
    )
    assert "which" not in prose_of(page.read_text())
    measured = measure(page)
    assert (measured.words, measured.relative) == (4, 0)


def test_the_worst_sentences_come_first(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("What is told of what was said that day counts. A thing that works. It runs.\n")
    measured = measure(page)
    assert measured.relative == 4
    assert measured.worst == ["What is told of what was said that day counts.", "A thing that works."]
    assert measured.ratio > LIMIT


def test_every_page_is_measured() -> None:
    names = {path.name for path in pages()}
    assert {"README.md", "index.md", "glossary.md", "configuration.md"} <= names
    assert prose.ROOT.joinpath("mkdocs.yml").is_file()
