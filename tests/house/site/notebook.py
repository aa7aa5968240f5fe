"""The notebook of the pages: `python -m tests.house.site.notebook` executes it, and writes its outputs and its page.

Its cells run in IPython's shell inside a running event loop, as those of a kernel do: a cell may `await`, and one that
blocks, blocks that loop. No kernel, no server and no converter is needed. A Markdown page with the same cells and
outputs is what the site shows.

    --to FILE   write the executed notebook there alone, and no page

Exit code 1 if a cell fails; then nothing is written.
"""

import argparse
import asyncio
import copy
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

GUIDES: Final = Path(__file__).parents[3] / "docs" / "guides"
NOTEBOOK: Final = GUIDES / "notebook.ipynb"
PAGE: Final = NOTEBOOK.with_suffix(".md")

Notebook = dict[str, Any]
"""A notebook of nbformat 4."""


class CellFailedError(Exception):
    """A cell raised."""


def read(path: Path = NOTEBOOK) -> Notebook:
    """Return a notebook."""
    found: Notebook = json.loads(path.read_text())
    return found


def text_of(notebook: Notebook) -> str:
    """Return the text of a notebook file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def source_of(cell: Notebook) -> str:
    """Return the source of a cell."""
    return "".join(cell["source"])


def code_of(notebook: Notebook) -> list[Notebook]:
    """Return the cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(notebook: Notebook) -> Notebook:
    """Execute the cells in a new directory and return the notebook with their outputs.

    For a process of its own: the shell sets up this one.

    Raises:
        CellFailedError: A cell raised; the others were not executed.
    """
    with tempfile.TemporaryDirectory(prefix="notebook-") as directory:
        os.chdir(directory)
        os.environ["IPYTHONDIR"] = directory
        try:
            return asyncio.run(_executed(notebook))
        finally:
            os.chdir("/")


async def _executed(notebook: Notebook) -> Notebook:
    from IPython.core.displayhook import CapturingDisplayHook
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    settings = Config()
    settings.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=settings)
    shown: list[Any] = []
    own_hook = shell.displayhook
    shell.display_trap.hook = shell.displayhook = CapturingDisplayHook(shell, shown)
    result = copy.deepcopy(notebook)
    for number, cell in enumerate(code_of(result), 1):
        source = source_of(cell)
        with capture_output(display=False) as captured:
            done = await shell.run_cell_async(source, transformed_cell=shell.transform_cell(source))
        if not done.success:
            error = done.error_before_exec or done.error_in_exec
            raise CellFailedError(f"cell {number}: {type(error).__name__}: {error}\n\n{source}") from error
        cell["execution_count"] = number
        cell["outputs"] = list(_outputs(number, captured.stdout, shown))
        shown.clear()
    shell.displayhook = own_hook  # for its end
    return result


def _outputs(number: int, printed: str, shown: Sequence[Any]) -> Iterator[Notebook]:
    if printed:
        yield {"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}
    for one in shown:
        data = one["data"]
        kind = "text/html" if "text/html" in data else "text/plain"
        yield {
            "output_type": "execute_result",
            "execution_count": number,
            "metadata": {},
            "data": {kind: data[kind].splitlines(keepends=True)},
        }


def page_of(notebook: Notebook) -> str:
    """Return the Markdown page of an executed notebook."""
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source_of(cell))
            continue
        parts.append(f"```python\n{source_of(cell)}\n```")
        parts += map(_shown, cell["outputs"])
    return "\n\n".join(parts) + "\n"


def _shown(output: Notebook) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    ((kind, lines),) = output["data"].items()
    text = "".join(lines)
    return text if kind == "text/html" else f"```text\n{text}\n```"


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the notebook, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebook", nargs="?", type=Path, default=NOTEBOOK)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args(arguments)
    try:
        result = executed(read(options.notebook.resolve()))
    except CellFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.to is not None:
        options.to.write_text(text_of(result))
        return 0
    NOTEBOOK.write_text(text_of(result))
    PAGE.write_text(page_of(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
