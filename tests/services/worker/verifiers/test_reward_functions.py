"""Reward functions: their weights, their values as columns, and what they raise."""

import asyncio
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolloutmq.schemas.group import RATERS, RATINGS
from rolloutmq.services.worker.verifiers.reward_functions import (
    NAME_CHARS,
    columns_of,
    failures,
    reason,
    watch,
)


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


async def judged(completion: str) -> float:
    if not completion:
        raise ConnectionError("the judge is away")
    return 0.5


def broken(completion: str) -> float:
    raise ZeroDivisionError(completion)


def leaving(completion: str) -> float:
    raise SystemExit(completion)


async def leaving_later(completion: str) -> float:
    raise SystemExit(completion)


def rubric(*functions: Callable[..., Any], weights: tuple[float, ...] = (), **inside: Any) -> Any:
    return SimpleNamespace(
        funcs=[*functions],
        weights=[*weights] or [1.0] * len(functions),
        _is_group_func=lambda function: "completions" in signature(function).parameters,
        **inside,
    )


async def scored(rubric: Any, *arguments: Any) -> list[Any]:
    """Score as theirs does: an exception is 0."""
    found = []
    for function in rubric.funcs:
        try:
            value = function(*arguments)
            found.append(await value if asyncio.iscoroutine(value) else value)
        except Exception:  # noqa: BLE001 - as theirs does
            found.append(0.0)
    return found


@pytest.mark.parametrize("function", [leaving, leaving_later])
def test_an_exit_is_collected(function: Callable[..., Any]) -> None:
    one = rubric(function)
    watch(one)
    with failures() as failed, pytest.raises(SystemExit):
        asyncio.run(scored(one, "x"))
    assert [reason(error) for error in failed] == ["a reward function raised SystemExit('x')"]


def test_weights_come_from_the_rubric_and_those_inside_it() -> None:
    inner = rubric(right, weights=(2.0,))
    routed = SimpleNamespace(rubric=rubric(judged, weights=(0.0,)))
    outer = rubric(rubrics=[inner, rubric(env_map={"a": routed, "b": routed})])
    assert watch(outer) == {"right": 2.0, "judged": 0.0}


def test_a_watched_function_keeps_its_name_signature_and_values() -> None:
    one = rubric(right, judged)
    watch(one)
    assert [function.__name__ for function in one.funcs] == ["right", "judged"]
    assert list(signature(one.funcs[0]).parameters) == ["completion", "answer"]
    with failures() as failed:
        assert asyncio.run(scored(rubric(*one.funcs[1:]), "x")) == [0.5]
        assert one.funcs[0]("x", answer="x") == 1.0
    assert failed == []


@pytest.mark.parametrize(("function", "kind"), [(judged, ConnectionError), (broken, ZeroDivisionError)])
def test_an_exception_that_theirs_makes_a_zero_is_collected(
    function: Callable[..., Any], kind: type[Exception]
) -> None:
    one = rubric(function)
    watch(one)
    with failures() as failed:
        assert asyncio.run(scored(one, "")) == [0.0]
    assert [type(error) for error in failed] == [kind]


@pytest.mark.parametrize("value", [None, {"a": 1}, [0.5, 0.5], "good", object()])
@pytest.mark.parametrize("waits", [False, True])
def test_something_else_than_a_number_is_collected(value: Any, waits: bool) -> None:
    def graded(completion: str) -> Any:
        return completion and value

    async def judged(completion: str) -> Any:
        return completion and value

    one = rubric(judged if waits else graded)
    watch(one)
    with failures() as failed:
        asyncio.run(scored(one, "x"))
    name = "judged" if waits else "graded"
    assert [reason(error) for error in failed] == [
        f"the reward function {name} must return a number (got {value!r:.80})"
    ]


@pytest.mark.parametrize("value", [1, True, "0.5", np.float32(2)])
def test_what_theirs_takes_for_a_number_is_one(value: Any) -> None:
    one = rubric(lambda _: value)
    watch(one)
    with failures() as failed:
        assert asyncio.run(scored(one, "x")) == [value]
    assert failed == []


def test_a_function_of_a_group_returns_a_list() -> None:
    def ranks(completions: list[str]) -> list[float]:
        return [float(place) for place in range(len(completions))]

    one = rubric(ranks)
    watch(one)
    with failures() as failed:
        assert asyncio.run(scored(one, ["x", "y"])) == [[0.0, 1.0]]
    assert failed == []


def test_a_function_added_by_a_rollout_is_watched_too() -> None:
    one = rubric(judged)

    async def score_group(states: list[str]) -> list[Any]:
        return await scored(one, *states)

    one.score_group = score_group
    assert watch(one) == {"judged": 1.0}
    one.funcs.append(broken)
    one.weights.append(0.5)
    with failures() as failed:
        asyncio.run(one.score_group(["x"]))
    assert [type(error) for error in failed] == [ZeroDivisionError]
    assert watch(one) == {"judged": 1.0, "broken": 0.5}


def test_functions_of_one_name_are_told_apart() -> None:
    outer = rubric(rubrics=[rubric(right, weights=(1.0,)), rubric(right, judged, weights=(0.25, 2.0))])
    assert watch(outer) == {"right": 1.0, "right_2": 0.25, "judged": 2.0}
    assert [function.__name__ for one in outer.rubrics for function in one.funcs] == [
        "right",
        "right_2",
        "judged",
    ]
    outer.rubrics[0].funcs.append(judged)
    outer.rubrics[0].weights.append(4.0)
    assert watch(outer) == {"right": 1.0, "right_2": 0.25, "judged": 2.0, "judged_2": 4.0}


def test_environments_of_a_group_share_a_name_if_the_weight_is_the_same() -> None:
    environments = [SimpleNamespace(rubric=rubric(right, judged, weights=(weight, 0.5))) for weight in (1, 2)]
    one = rubric(env_map=dict(zip("ab", environments, strict=True)))
    assert watch(one) == {"right": 1.0, "right_2": 2.0, "judged": 0.5}


class Judge:
    def __call__(self, completion: str) -> float:
        return float(len(completion))


def test_callables_without_a_name_have_one() -> None:
    one = rubric(Judge(), partial(right, answer="x"), lambda _: 0.0)
    assert watch(one) == {"Judge": 1.0, "right": 1.0, "<lambda>": 1.0}
    assert asyncio.run(scored(one, "x")) == [1.0, 1.0, 0.0]


async def test_rollouts_at_once_collect_their_own_failures() -> None:
    one = rubric(judged)
    watch(one)

    async def rollout(answer: str) -> int:
        with failures() as failed:
            await asyncio.gather(scored(one, answer), scored(one, answer))
        return len(failed)

    assert [*await asyncio.gather(rollout(""), rollout("x"), rollout(""))] == [2, 0, 2]


def test_functions_with_weight_are_raters_and_the_others_metrics() -> None:
    columns = columns_of({"right": 1, "turns": 3, "judged": 0.5}, {"right": 2.0, "judged": 0.5, "turns": 0.0})
    assert columns.pop(RATERS) == {"right": 2.0, "judged": 0.5}
    np.testing.assert_array_equal(columns.pop(RATINGS), [1.0, 0.5])
    assert columns == {"metric_turns": 3.0}


def test_without_a_weight_there_are_no_ratings() -> None:
    assert columns_of({"turns": 2}, {}) == {"metric_turns": 2.0}


def test_any_name_becomes_that_of_a_column_of_its_own() -> None:
    long = "x" * 60
    columns = columns_of({"<lambda>": 1, "-lambda-": 2, "Höhe!": 3, long: 4, f"{long}y": 5}, {})
    assert list(columns.values()) == [1, 2, 3, 4, 5]
    assert list(columns)[:3] == ["metric__lambda_", "metric__lambda__2", "metric_h_he_"]
    assert max(map(len, columns)) == NAME_CHARS
