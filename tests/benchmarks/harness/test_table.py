from typing import Any

import pytest

from benchmarks.harness.table import BEGIN, END, measured, pages, put_in, short, table

ROW: dict[str, Any] = {
    "figure": "groups/s", "payload": "8 x 2", "ours": 7650.1, "rival": 10092.0, "rival_name": "zmq.proxy",
    "ratio": 0.758, "goal": 0.7, "met": True, "bound": "ratio, at least",
}  # fmt: skip


def test_a_row_with_a_goal_is_a_line_and_others_are_none() -> None:
    lines = table([ROW, ROW | {"goal": None, "met": None}, ROW | {"met": False}]).splitlines()
    assert lines[2:] == [
        "| groups/s | 8 x 2 | 7,650.1 | 10,092 (zmq.proxy) | 0.76 | ≥ 0.7 | met |",
        "| groups/s | 8 x 2 | 7,650.1 | 10,092 (zmq.proxy) | 0.76 | ≥ 0.7 | **unmet** |",
    ]


def test_a_known_spread_stands_beside_the_ratio() -> None:
    (line,) = table([ROW | {"ratio": 1.0042, "spread": 0.0031}]).splitlines()[2:]
    assert "| 1.0042 ± 0.0031 | ≥ 0.7 |" in line


def test_it_takes_the_place_of_the_last_one() -> None:
    text = put_in(f"a\n{BEGIN}{END}b\n", "one\n")
    assert put_in(text, "two\n") == f"a\n{BEGIN}\ntwo\n\n{END}b\n"
    with pytest.raises(ValueError, match="there is no"):
        put_in("a", "one")


def test_the_readme_tells_what_was_measured() -> None:
    for page, text in pages().items():
        assert page.read_text() == text, f"{page.name}: run `python -m benchmarks.harness.table`"


def test_the_readme_has_six_rows_of_all() -> None:
    assert len(short(measured())) == 6
    with pytest.raises(KeyError):
        short([ROW])
