"""The built-in raters: what they rate, and which options they refuse."""

from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.services.rewards.builtin import Exact, Length, Number, Regex, part_of, text_of
from rolloutmq.services.worker.completion import Completion


def answer(text: str) -> Completion:
    return Completion(
        text=text, prompt_token_ids=[1], token_ids=list(map(ord, text)), logprobs=[-1.0] * len(text)
    )


def test_exact_compares_with_the_task_or_a_part_of_it() -> None:
    assert Exact()("12", answer(" 12\n")) == 1.0
    assert Exact()("12", answer("13")) == 0.0
    assert Exact("solution")({"solution": "yes"}, "yes") == 1.0
    assert Exact("solution")(SimpleNamespace(solution="yes"), "Yes") == 0.0
    assert Exact(1, case=False)(("q", "YES"), "yes") == 1.0
    assert Exact()(7, "7") == 1.0


def test_regex_searches_or_matches_the_whole() -> None:
    assert Regex(r"<answer>\d+</answer>")(None, answer("so <answer>12</answer>.")) == 1.0
    assert Regex(r"\d+", whole=True)(None, "12.") == 0.0
    assert Regex(r"\d+", whole=True)(None, "12") == 1.0


@pytest.mark.parametrize(
    ("length", "rating"), [(0, 0.0), (1, 0.5), (2, 1.0), (4, 1.0), (5, 0.75), (8, 0.0), (99, 0.0)]
)
def test_length_falls_outside_of_its_bounds(length: int, rating: float) -> None:
    assert Length(4, least=2)(None, answer("x" * length)) == rating
    assert Length(4, least=2, unit="characters")(None, "x" * length) == rating


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("so it is 200", 1.0),
        ("200.0", 1.0),
        ("2e2", 1.0),
        ("100, then 200", 1.0),
        ("202", 1.0),
        ("1,200 is wrong", 0.0),
        ("212", 0.5),
        ("no idea", 0.0),
        ("9" * 400, 0.0),
        ("-200", 0.0),
    ],
)
def test_number_rates_closeness_of_the_last_number(text: str, rating: float) -> None:
    assert Number(tolerance=0.01, far=0.11)(200, text) == pytest.approx(rating)


@pytest.mark.parametrize(
    ("expected", "text", "rating"),
    [
        (0.5, ".5", 1.0),
        (-0.5, "x = -.5", 1.0),
        (0.5, "so 0.5.", 1.0),
        (-5, "\u22125", 1.0),
        (5, "\u22125", 0.0),
        (7, "3-7", 1.0),
        (-7, "3-7", 0.0),
        (-7, "3 - -7", 1.0),
        (-7, "(-7)", 1.0),
        (7, "(3)-7", 1.0),
        (7, "x-7", 1.0),
        (7, "3+7", 1.0),
        (-7, "x=-7", 1.0),
        (123456, "12,3456", 1.0),
        (2000, "1999,2000", 1.0),
        (2, "1,2", 1.0),
        (1234567, "1,234,567", 1.0),
        (-1234.5, "it is -1,234.50", 1.0),
        ("1,234", "1234", 1.0),
        (" \u22121,234.5 ", "-1234.5", 1.0),
        ("5e-1", ".5", 1.0),
        (5, "3, 5", 1.0),
        (234, "1,234", 0.0),
        (2e-3, "2e-3", 1.0),
        (5, "v1.2.5", 1.0),
        (5, "so ...5", 1.0),
        (7, r"\frac{1}{2}-7", 1.0),
    ],
)
def test_number_reads_what_models_write(expected: Any, text: str, rating: float) -> None:
    assert Number()(expected, text) == rating


def test_number_of_zero_is_right_or_wrong() -> None:
    assert Number()(0, "0") == 1.0
    assert Number()(0, "0.1") == 0.0
    with pytest.raises(ValueError, match="could not convert"):
        Number()("not a number", "1")  # the rating is then missing


def test_parts_and_texts_of_other_things() -> None:
    assert part_of([5, 6], 1) == 6
    assert part_of("task", "") == "task"
    with pytest.raises(TypeError, match="the answer has no text"):
        text_of(3)


@pytest.mark.parametrize(
    ("factory", "options", "problem"),
    [
        (Regex, {"pattern": "("}, "no regular expression"),
        (Length, {"most": 0}, "least and most"),
        (Length, {"most": 3, "least": 4}, "least and most"),
        (Length, {"most": 3, "unit": "words"}, "unit must be"),
        (Number, {"tolerance": -1.0}, "far must be"),
        (Number, {"tolerance": 0.2, "far": 0.1}, "far must be"),
        (Number, {"tolerance": float("nan")}, "far must be"),
    ],
)
def test_options_that_mean_nothing_are_refused(factory: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        factory(**options)
