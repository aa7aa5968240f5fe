"""What a method returned and an attribute is: errors name both, whatever asks the policy."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.environment import SingleTurn
from rolloutmq.services.worker.scripted import ScriptedPolicy, play
from rolloutmq.services.worker.trajectory import Trajectory, group_of
from rolloutmq.services.worker.user_code.methods import MethodError, ScoreError


class Asked(SingleTurn[int]):
    """Returns what it was made with."""

    def __init__(self, prompt: Any = "1=", score: Any = 1.0) -> None:
        self._prompt, self._score = prompt, score

    def task(self, rng: random.Random) -> int:
        return rng.randrange(9)

    def prompt(self, task: int) -> Any:  # noqa: ARG002 - the same for each
        return self._prompt

    def score(self, task: int, completion: Completion) -> Any:  # noqa: ARG002 - the same for each
        return self._score


MESSAGES = [{"role": "user", "content": "1="}]


@pytest.mark.parametrize(
    "prompt", ["1=", "", [49, 61], (49, 61), np.array([49, 61]), MESSAGES, tuple(MESSAGES)]
)
def test_text_token_ids_and_messages_are_prompts(prompt: Any) -> None:
    assert list(play(Asked(prompt), ScriptedPolicy("7")).scores) == [1.0] * 4


@pytest.mark.parametrize("prompt", [None, 42, b"1=", [], [1.5], ["1="], [49, "="], [*MESSAGES, "1="], {1: 2}])
def test_anything_else_is_refused_with_the_method(prompt: Any) -> None:
    with pytest.raises(MethodError) as caught:
        play(Asked(prompt), ScriptedPolicy("7"))
    assert str(caught.value) == f"`Asked.prompt` must return text, token ids or messages (got {prompt!r})"
    assert caught.value.users_function.__func__ is Asked.prompt


class Late(Asked):
    async def task(self, rng: random.Random) -> int:  # type: ignore[override]
        return rng.randrange(9)


class LateSubmitted(Asked):
    async def submitted(self, payload: Any) -> int:  # type: ignore[override]
        return int(payload)


@pytest.mark.parametrize(
    ("environment", "method", "rollout"),
    [
        (Late(), "task", lambda asked, *given: asked.rollout(*given)),
        (LateSubmitted(), "submitted", lambda asked, policy, *given: asked.rollout_task(policy, 7, *given)),
    ],
)
def test_a_task_is_no_coroutine(environment: Any, method: str, rollout: Any) -> None:
    with pytest.raises(MethodError) as caught:
        asyncio.run(rollout(environment, ScriptedPolicy("7"), 2, random.Random(0)))
    assert str(caught.value) == (
        f"`{type(environment).__name__}.{method}` must return a task (got a coroutine: it must not be `async def`)"
    )
    assert caught.value.users_function.__func__ is getattr(type(environment), method)


@pytest.mark.parametrize("score", [1, True, 0.5, np.float32(0.5), np.array(0.5)])
def test_numbers_are_scores(score: Any) -> None:
    assert list(play(Asked(score=score), ScriptedPolicy("7")).scores) == [float(score)] * 4


@pytest.mark.parametrize("score", ["0.5", b"1", None, float("nan"), 1j, [0.5], 10**400])
def test_what_is_no_number_is_no_score(score: Any) -> None:
    with pytest.raises(ScoreError, match=r"^column scores: `Asked\.score` must return a finite") as caught:
        play(Asked(score=score), ScriptedPolicy("7"))
    assert caught.value.users_function.__func__ is Asked.score


def test_text_is_no_score_of_a_trajectory() -> None:
    one: Any = Trajectory(token_ids=[1], mask=[True], logprobs=[-1.0], score="0.5")  # type: ignore[arg-type]
    with pytest.raises(InvalidGroupError, match=r"sequence 0: must be a number \(got '0\.5'\)"):
        group_of("g", [one])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, "4", 2.0, True, None)),
        *(("temperature", value) for value in (-1, "1", float("nan"), float("inf"), None)),
        *(("stop", value) for value in (5, [5], b"=", "", ["=", ""], "\ud800")),
    ],
)
def test_an_attribute_is_named(attribute: str, value: Any) -> None:
    environment = Asked()
    setattr(environment, attribute, value)
    with pytest.raises(MethodError) as caught:
        play(environment, ScriptedPolicy("7"))
    assert str(caught.value).startswith(f"`Asked.{attribute}` must be ")
    assert str(caught.value).endswith(f" (got {value!r})")


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        *[("max_tokens", np.int64(4)), ("temperature", 0), ("temperature", np.float32(0.5))],
        *[("stop", ("=", ";")), ("stop", "é"), ("stop", []), ("stop", None)],
    ],
)
def test_other_kinds_of_numbers_and_lists_pass(attribute: str, value: Any) -> None:
    environment = Asked()
    setattr(environment, attribute, value)
    assert play(environment, ScriptedPolicy("7")).sequences == 4
