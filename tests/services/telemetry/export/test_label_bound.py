"""A label has so many values, whatever the names are."""

import pytest

from rolloutmq.services.telemetry.export.label_bound import OTHER, LabelBound, text_of


def test_names_beyond_the_limit_share_one_label() -> None:
    bound = LabelBound(2)
    assert [bound.label(name, 0.0) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
    assert bound.merged == 2
    assert [bound.holds(name) for name in ("a", "c", OTHER)] == [True, False, True]


def test_a_name_that_fell_silent_makes_room() -> None:
    bound = LabelBound(2, idle_s=10.0)
    assert [bound.label(name, 0.0) for name in ("a", "b")] == ["a", "b"]
    bound.label("b", 5.0)
    assert bound.label("c", 9.0) == OTHER
    assert bound.label("c", 10.0) == "c"
    assert (bound.holds("a"), bound.holds("b"), bound.merged) == (False, True, 0)


def test_ever_new_names_take_bounded_memory() -> None:
    bound = LabelBound(10)
    for number in range(10_000):
        bound.label(f"name-{number}", 0.0)
    assert bound.merged == 10


def test_nothing_fits_a_limit_of_none() -> None:
    assert LabelBound(0).label("a", 0.0) == OTHER


@pytest.mark.parametrize(
    ("given", "shown"), [("x" * 128, "x" * 128), ("x" * 129, "x" * 127 + "…"), ("a\ud800", "a?")]
)
def test_a_text_is_bounded_and_valid(given: str, shown: str) -> None:
    assert text_of(given) == shown
