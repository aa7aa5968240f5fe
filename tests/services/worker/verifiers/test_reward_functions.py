"""Reward functions: their weights, their values as columns, and what they raise."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolloutmq.schemas.group import RATERS, RATINGS
from rolloutmq.services.worker.verifiers.reward_functions import NAME_CHARS, columns_of, failures, watch


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


async def judged(completion: str) -> float:
    if not completion:
        raise ConnectionError("the judge is away")
    return 0.5


def broken(completion: str) -> float:
    raise ZeroDivisionError(completion)


def rubric(*functions: Callable[..., Any], weights: tuple[float, ...] = (), **inside: Any) -> Any:
    return SimpleNamespace(funcs=[*functions], weights=[*weights] or [1.0] * len(functions), **inside)


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


def test_weights_come_from_the_rubric_and_those_inside_it() -> None:
    inner = rubric(right, weights=(2.0,))
    routed = SimpleNamespace(rubric=rubric(judged, weights=(0.0,)))
    outer = rubric(rubrics=[inner, rubric(env_map={"a": routed, "b": routed})])
    assert watch(outer) == {"right": 2.0, "judged": 0.0}


def test_a_watched_function_keeps_its_name_signature_and_values() -> None:
    import inspect

    one = rubric(right, judged)
    watch(one)
    assert [function.__name__ for function in one.funcs] == ["right", "judged"]
    assert list(inspect.signature(one.funcs[0]).parameters) == ["completion", "answer"]
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
