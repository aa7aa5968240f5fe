"""Rollouts of theirs as trajectories: what was sampled, and nothing else."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolloutmq import Completion, InvalidGroupError, PolicyVersion
from rolloutmq.services.worker.trajectory import group_of
from rolloutmq.services.worker.verifiers.trajectories import RolloutFailedError, trajectory_of

FIRST = Completion("ab", [1, 2], [3, 4], [-0.5, -0.25], PolicyVersion(0, 1), PolicyVersion(0, 2), "stop")
SECOND = Completion("c", [1, 2, 3, 4, 9, 9], [5], [-1.5], PolicyVersion(0, 3), PolicyVersion(0, 3), "stop")


def turn(name: str) -> dict[str, Any]:
    """A turn with the tokens that theirs has, which must not matter."""
    return {"response": SimpleNamespace(id=name), "tokens": {"prompt_ids": [0], "completion_ids": [0]}}


def rollout(*turns: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given = {
        "example_id": 7,
        "prompt": [{"role": "user", "content": "?"}],
        "completion": [{"role": "assistant", "content": "ab"}],
        "reward": 0.75,
        "metrics": {"right": 1.0, "num_turns": 2.0},
        "error": None,
        "stop_condition": "has_final_env_response",
        "trajectory": list(turns),
    }
    return given | changes


SAMPLED = {"0": FIRST, "1": SECOND}


def test_turns_are_as_sampled_and_the_environments_tokens_are_not_trained() -> None:
    made = trajectory_of(rollout(turn("0"), turn("1")), SAMPLED, {"right": 1.0})
    group = group_of("g", [made])
    assert list(group["tokens"][0]) == [1, 2, 3, 4, 9, 9, 5]
    assert list(group["mask"][0]) == [False, False, True, True, False, False, True]
    assert list(group["inference_logprobs"][0]) == [0, 0, -0.5, -0.25, 0, 0, -1.5]
    assert (group.oldest, group.newest) == (PolicyVersion(0, 1), PolicyVersion(0, 3))
    assert list(group.scores) == [0.75]
    np.testing.assert_array_equal(group["ratings"][0], [1.0])
    assert group["raters"] == [{"right": 1.0}]
    assert list(group["metric_num_turns"]) == [2.0]
    assert group["instance_ids"] == [7]
    assert group["stop_reasons"] == ["has_final_env_response"]
    assert [message["role"] for message in group["messages"][0]] == ["user", "assistant"]


def test_a_prompt_of_text_is_the_users() -> None:
    made = trajectory_of(rollout(turn("0"), prompt=[{"role": "text", "content": "?"}]), SAMPLED, {})
    assert made.messages is not None
    assert made.messages[0] == {"role": "user", "content": "?"}


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}])
def test_an_empty_answer_has_an_empty_text(empty: dict[str, Any]) -> None:
    made = trajectory_of(
        rollout(turn("0"), completion=[{"role": "assistant", **empty}]), SAMPLED, {"right": 1.0}
    )
    assert made.messages is not None
    assert made.messages[-1] == {"role": "assistant", "content": ""}


def test_a_rewritten_prompt_fails_the_rollout() -> None:
    rewritten = Completion("c", [1, 2, 3, 8, 9], [5], [-1.5])
    with pytest.raises(
        InvalidGroupError,
        match=r"turn 1: .* does not begin with the turns before it: token 3 is 8, was 4; use a chat template",
    ):
        trajectory_of(rollout(turn("0"), turn("1")), {"0": FIRST, "1": rewritten}, {})


@pytest.mark.parametrize("response", [None, SimpleNamespace(id="17"), {"id": "17"}, SimpleNamespace()])
def test_a_turn_of_another_model_is_refused(response: Any) -> None:
    with pytest.raises(InvalidGroupError, match="turn 1 was not sampled by the client of this rollout"):
        trajectory_of(rollout(turn("0"), {"response": response}), SAMPLED, {})


def test_a_response_may_be_a_mapping() -> None:
    assert trajectory_of(rollout({"response": {"id": "0"}}), SAMPLED, {}).token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            {"error": "ModelError", "error_chain_repr": "ModelError() -> OSError('x')"},
            r"ModelError\(\) -> OSError",
        ),
        ({"error": "ToolError"}, "ToolError"),
        ("it broke", "it broke"),
    ],
)
def test_an_error_of_theirs_fails_the_rollout(error: Any, reason: str) -> None:
    with pytest.raises(RolloutFailedError, match=reason):
        trajectory_of(rollout(turn("0"), error=error), SAMPLED, {})


def test_a_rollout_without_a_turn_fails() -> None:
    with pytest.raises(RolloutFailedError, match=r"no turn \(prompt_too_long: the context has 8 tokens\)"):
        trajectory_of(
            rollout(stop_condition="prompt_too_long"), SAMPLED, {}, overlong="the context has 8 tokens"
        )


@pytest.mark.parametrize(
    ("finish", "condition", "single_turn", "told"),
    [
        ("stop", "max_turns_reached", True, "stop"),
        ("length", "max_turns_reached", True, "length"),
        ("stop", "max_turns_reached", False, "max_turns_reached"),
        ("length", "no_tools_called", False, "length"),
        ("stop", None, False, "stop"),
    ],
)
def test_the_reason_of_the_end(finish: str, condition: str | None, single_turn: bool, told: str) -> None:
    sampled = {"0": Completion("ab", [1], [3], [-0.5], finish_reason=finish)}
    made = trajectory_of(rollout(turn("0"), stop_condition=condition), sampled, {}, single_turn=single_turn)
    assert made.finish_reason == told


def test_tool_calls_are_in_openais_format() -> None:
    told = [
        {"role": "assistant", "content": "", "tool_calls": ['{"id": "a", "name": "add", "arguments": "{}"}']},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
    made = trajectory_of(rollout(turn("0"), prompt="how much?", completion=told), SAMPLED, {})
    assert made.messages
    assert made.messages[0] == {"role": "user", "content": "how much?"}
    assert made.messages[1]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ]


def test_temperatures_travel() -> None:
    warm = Completion("ab", [1], [3], [-0.5], temperature=0.7)
    assert trajectory_of(rollout(turn("0")), {"0": warm}, {}).temperatures == [1.0, 0.7]
