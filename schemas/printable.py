"""Printable text: hidden characters are shown instead of obeyed.

Names, ids, hosts and reasons come from peers, and the output of an environment from its own code. A newline in them
forges a line of a log, and an escape sequence moves the cursor, changes what a terminal shows, or types for its user.
A character without width makes two names look alike.
In a notebook, markup would do the same: there everything is text, in a table of bounded size.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from shlex import quote
from typing import Final

HIDDEN: Final = (
    (0x0000, 0x001F),  # control characters
    (0x007F, 0x009F),
    (0x00AD, 0x00AD),  # soft hyphen
    (0x034F, 0x034F),  # joiner of graphemes
    (0x061C, 0x061C),  # Arabic letter mark
    (0x115F, 0x1160),  # fillers
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),  # Mongolian selectors
    (0x200B, 0x200F),  # without width, or of the direction
    (0x2028, 0x202E),  # separators of lines, and directions
    (0x2060, 0x206F),
    (0x3164, 0x3164),  # fillers
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFB),  # interlinear marks
    (0xD800, 0xDFFF),  # halves of characters; `surrogateescape` makes them of bytes that are no UTF-8
    (0xE0000, 0xE0FFF),  # tags, and selectors beyond the common ones
)
"""Ranges of characters that act on what shows them, or hide in it; the page's `visible.js` has the same."""
_NAMED: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}
HTML_ROWS: Final = 10
"""Most rows of a table in a notebook."""
HTML_CHARS: Final = 200
"""Longest text of a cell in a notebook."""


def _class(ranges: Iterable[tuple[int, int]]) -> re.Pattern[str]:
    return re.compile("[" + "".join(rf"\U{low:08x}-\U{high:08x}" for low, high in ranges) + "]")


_ANY: Final = _class(HIDDEN)
_BUT_LINES: Final = _class(((0x00, 0x08), (0x0B, 0x1F), *HIDDEN[1:]))
"""Without newline and tab."""


def printable(text: str) -> str:
    """Return text as one line without hidden characters, in valid UTF-8."""
    return text if text.isascii() and text.isprintable() else _ANY.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Return text with its newlines and tabs, and without other hidden characters, in valid UTF-8."""
    return _BUT_LINES.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    """Return the escape of JSON: text that was valid JSON before still is."""
    code = ord(found[0])
    if code > 0xFFFF:  # JSON names its two halves
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return _NAMED.get(found[0], f"\\u{code:04x}")


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
