import json

import pytest

from rolloutmq.schemas.printable import moment, printable, printable_lines

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
    ],
)
def test_a_line_shows_what_would_have_been_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_keep_newlines_and_tabs_alone() -> None:
    assert printable_lines("a\n\tb\r\n\x1b") == "a\n\tb\\r\n\\u001b"


def test_json_stays_json() -> None:
    value = {"name": "\x7f\x9b\u202e\n\x1b"}
    shown = printable_lines(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(shown) == value
    assert shown.isascii()


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 1e300, -1e18])
def test_a_time_that_no_calendar_has_is_shown_as_a_number(at: float) -> None:
    assert moment(at).endswith(" s")


def test_a_time_is_shown_to_the_second_or_finer() -> None:
    assert len(moment(1.5)) == len("1970-01-01 00:00:01")
    assert moment(1.5, "milliseconds").endswith(".500")
