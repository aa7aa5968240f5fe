"""The notebook of the pages runs as it stands, and its page shows what it shows."""

import subprocess
import sys
from pathlib import Path

from tests.house.site.notebook import NOTEBOOK, PAGE, Notebook, code_of, page_of, read, source_of, text_of

ROOT = Path(__file__).parents[3]


def execute(*arguments: Path | str) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-W", "error", "-m", "tests.house.site.notebook", *map(str, arguments))
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def kinds(cell: Notebook) -> list[str]:
    """Return of what kind the outputs of a cell are, with the first word of each table."""
    return [
        f"{kind} {''.join(text).partition('<caption>')[2].partition(' ')[0]}".strip()
        for output in cell["outputs"]
        for kind, text in output.get("data", {"stdout": []}).items()
    ]


def notebook_of(*sources: str) -> Notebook:
    cells = [{"cell_type": "code", "source": source, "outputs": []} for source in sources]
    return {"cells": cells, "nbformat": 4}


def test_every_cell_runs_and_shows_what_the_page_shows(tmp_path: Path) -> None:
    done = execute("--to", tmp_path / "done.ipynb")
    assert (done.returncode, done.stderr) == (0, "")
    now, stored = (code_of(read(path)) for path in (tmp_path / "done.ipynb", NOTEBOOK))
    assert list(map(kinds, now)) == list(map(kinds, stored))
    tables = [kind for cell in now for kind in kinds(cell) if kind.startswith("text/html")]
    assert tables == [f"text/html {what}" for what in ("Group", "Batch", "Group", "Status")]
    assert now[-1]["outputs"] == stored[-1]["outputs"]


def test_it_awaits_and_blocks_in_cells_and_needs_no_extension() -> None:
    sources = list(map(source_of, code_of(read())))
    assert any("async with" in source and "await" in source for source in sources)
    assert any("Producer.blocking" in source and "Consumer.blocking" in source for source in sources)
    assert not any("%" in source or "nest_asyncio" in source for source in sources)


def test_the_page_is_made_of_the_notebook() -> None:
    assert PAGE.read_text() == page_of(read())
    assert NOTEBOOK.read_text() == text_of(read())


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    given, to = tmp_path / "given.ipynb", tmp_path / "to.ipynb"
    given.write_text(text_of(notebook_of("one = 1", "await missing(one)")))
    done = execute(given, "--to", to)
    assert done.returncode == 1
    assert done.stderr.startswith("cell 2: NameError: name 'missing' is not defined")
    assert not to.exists()
