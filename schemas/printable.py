"""Printable text: control characters are shown instead of obeyed.

Names, ids, hosts and reasons come from peers, and the output of an environment from its own code. A newline in them
forges a line of a log, and an escape sequence moves the cursor, changes what a terminal shows, or types for its user.
In a notebook, markup would do the same: there everything is text, in a table of bounded size.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from shlex import quote
from typing import Final

_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0))
_ORDERS: Final = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
"""Line separators, and marks that reverse the order of what is shown."""
_SURROGATES: Final = range(0xD800, 0xE000)
"""Halves of characters, which no encoding has; `surrogateescape` makes them of bytes that are no UTF-8."""
_NAMED: Final = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}
_ESCAPES: Final = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_ORDERS, *_SURROGATES)} | _NAMED
"""The escapes are those of JSON: text that was valid JSON before still is."""
HTML_ROWS: Final = 10
"""Most rows of a table in a notebook."""
HTML_CHARS: Final = 200
"""Longest text of a cell in a notebook."""
_ESCAPES_IN_LINES: Final = {code: text for code, text in _ESCAPES.items() if code not in {0x09, 0x0A}}


def printable(text: str) -> str:
    """Return text as one line without control characters, in valid UTF-8."""
    return text if text.isascii() and text.isprintable() else text.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """Return text with its newlines and tabs, and without other control characters, in valid UTF-8."""
    return text.translate(_ESCAPES_IN_LINES)


def error_text(error: BaseException) -> str:
    """Return the text of an error in one line, empty if it has none. Its `__str__` may be anybody's code, and raise."""
    try:
        return " ".join(str(error).split())
    except BaseException as failure:  # noqa: BLE001 - the error is told in any case
        return f"<no text, its __str__ raised {type(failure).__name__}>"


def error_line(error: BaseException) -> str:
    """Return type and text of an error in one line."""
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shell_word(value: object) -> str:
    """Return a text or a path as one word of a shell, for commands that people copy."""
    return quote(str(value))


def moment(at: float, precision: str = "seconds") -> str:
    """Return wall-clock seconds as local date and time; the number itself where no date has it.

    Args:
        at: From a file, which may be damaged.
        precision: As for `datetime.isoformat`.
    """
    try:
        return datetime.fromtimestamp(at).isoformat(" ", precision)
    except (ValueError, OverflowError, OSError):
        return f"{at:g} s"


def html_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[object]], total: int, limit: int = HTML_ROWS
) -> str:
    """Return a table for a notebook. All text is escaped, and long cells are cut.

    Args:
        title: Its caption.
        head: Names of the columns; empty for none.
        rows: Cells of each row; only the first `limit` are made.
        total: Number of rows; those not shown are counted.
        limit: Most rows shown.
    """
    named = "".join(f"<th>{_cell(one)}</th>" for one in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(one)}</td>" for one in row) + "</tr>" for row in islice(rows, limit)
    )
    return (
        f"<table><caption>{_cell(title)}</caption>"
        + (f"<thead><tr>{named}</tr></thead>" if head else "")
        + f"<tbody>{body}</tbody></table>"
        + (f"<p>and {total - limit:,} more</p>" if total > limit else "")
    )


def _cell(value: object) -> str:
    import html  # its table of entities is for notebooks alone

    text = str(value)
    cut = text if len(text) <= HTML_CHARS else f"{text[:HTML_CHARS]}…"
    return html.escape(printable(cut))
