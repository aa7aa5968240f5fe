import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rolloutmq.schemas import printable as printable_module
from rolloutmq.schemas.printable import (
    HIDDEN,
    HTML_CHARS,
    HTML_ROWS,
    error_line,
    error_text,
    html_table,
    moment,
    printable,
    printable_lines,
    shell_word,
)

FORGED = "x\n2026-01-01 00:00:00.000 INFO broker all is well"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, äöü, 数学 and 😀", "plain text, äöü, 数学 and 😀"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x1b[2J\x1b]0;title\x07", r"\u001b[2J\u001b]0;title\u0007"),
        ("\x7f\x9b31m", r"\u007f\u009b31m"),
        ("\u2028\u202e\u2066", r"\u2028\u202e\u2066"),
        ("a\ud83d\udcff", r"a\ud83d\udcff"),
        ("a\u200b\u200d\u2060\ufeff\u00ad\u3164", r"a\u200b\u200d\u2060\ufeff\u00ad\u3164"),
        ("tag\U000e0041", r"tag\udb40\udc41"),
    ],
)
def test_a_line_shows_what_would_have_been_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_keep_newlines_and_tabs_alone() -> None:
    assert printable_lines("a\n\tb\r\n\x1b") == "a\n\tb\\r\n\\u001b"


def test_json_stays_json() -> None:
    value = {"name": "\x7f\x9b\u202e\n\x1b\u200b\U000e0041"}
    shown = printable_lines(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(shown) == value
    assert shown.isascii()


def test_the_page_hides_nothing_else() -> None:
    """`visible.js` has the same ranges, of which it shows the names."""
    script = Path(printable_module.__file__).parent.parent / "services/dashboard/page/script/text/visible.js"
    (found,) = re.findall(r"HIDDEN = new RegExp\((.*?), \"gu\"\)", script.read_text(), re.DOTALL)
    texts = "".join(re.findall(r'"([^"]*)"', found)).replace("\\\\", "\\")
    codes = r"\\u(?:\{([0-9a-f]+)\}|([0-9a-f]{4}))"
    ranges = re.findall(rf"{codes}(?:-{codes})?", texts)
    of_page = [(int(a or b, 16), int(c or d or a or b, 16)) for a, b, c, d in ranges]
    assert _points(of_page) == _points(HIDDEN)


def _points(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {code for low, high in ranges for code in range(low, high + 1)}


class LackingError(Exception):
    def __str__(self) -> str:
        return str(self.args[7])


class RecursiveError(Exception):
    def __str__(self) -> str:
        return str(self)


class NumericError(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class ExitingError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n\tb"), "ValueError: a b"),
        (KeyError(), "KeyError"),
        (SystemExit(2), "SystemExit: 2"),
        (LackingError(), "LackingError: <no text, its __str__ raised IndexError>"),
        (RecursiveError(), "RecursiveError: <no text, its __str__ raised RecursionError>"),
        (NumericError(), "NumericError: <no text, its __str__ raised TypeError>"),
        (ExitingError(), "ExitingError: <no text, its __str__ raised SystemExit>"),
    ],
)
def test_an_error_has_a_line_even_if_its_own_text_raises(error: BaseException, line: str) -> None:
    assert error_line(error) == line
    assert error_text(error) == line.partition(": ")[2]


def test_a_path_is_one_word_of_a_shell() -> None:
    assert shell_word(Path("runs/mine-1")) == "runs/mine-1"
    for root in ("live run", "it's", "$HOME/a;b", "*"):
        assert shlex.split(f"down {shell_word(Path(root))}") == ["down", root]


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 1e300, -1e18])
def test_a_time_that_no_calendar_has_is_shown_as_a_number(at: float) -> None:
    assert moment(at).endswith(" s")


def test_a_time_is_shown_to_the_second_or_finer() -> None:
    assert len(moment(1.5)) == len("1970-01-01 00:00:01")
    assert moment(1.5, "milliseconds").endswith(".500")


def test_a_table_is_text_whatever_it_holds() -> None:
    shown = html_table("<b>&", ["<i>"], [["<script>alert('x')</script>\x1b[2J", 1.5]], 1)
    assert shown == (
        "<table><caption>&lt;b&gt;&amp;</caption><thead><tr><th>&lt;i&gt;</th></tr></thead><tbody><tr>"
        "<td>&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;\\u001b[2J</td><td>1.5</td></tr></tbody></table>"
    )


def test_a_table_is_of_bounded_size() -> None:
    made = []

    def rows() -> Iterator[list[str]]:
        for row in range(1000):
            made.append(row)
            yield ["x" * 10_000]

    shown = html_table("t", [], rows(), 1000)
    assert len(made) == HTML_ROWS
    assert shown.count("<tr>") == HTML_ROWS
    assert shown.endswith("<p>and 990 more</p>")
    assert len(shown) < HTML_ROWS * (HTML_CHARS + 100)
    assert html_table("t", [], [["a"]] * 20, 20, limit=20).count("<tr>") == 20
