"""Episodes of theirs as trajectories: what was sampled, and nothing else."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolloutmq import Completion, InvalidGroupError, PolicyVersion
from rolloutmq.services.worker.trajectory import group_of
from rolloutmq.services.worker.verifiers.tasksets.traces import trajectory_of
from rolloutmq.services.worker.verifiers.trajectories import RolloutFailedError

FIRST = Completion("", [1, 2], [3, 4], [-0.5, -0.25], PolicyVersion(0, 1), PolicyVersion(0, 2), "stop")
SECOND = Completion("", [1, 2, 3, 4, 9, 9], [5], [-1.5], PolicyVersion(0, 3), PolicyVersion(0, 3), "stop")
POLICIES = ("agent",)


def given(*ids: int, content: str = "?") -> Any:
    message = {"role": "user", "content": content}
    return SimpleNamespace(
        sampled=False, token_ids=list(ids), mask=[False] * len(ids), logprobs=[], message=message
    )


def answer(ids: list[int], logprobs: list[float], scaffold: int = 0) -> Any:
    message = {"role": "assistant", "content": "ab"}
    mask = [False] * scaffold + [True] * (len(ids) - scaffold)
    return SimpleNamespace(sampled=True, token_ids=ids, mask=mask, logprobs=logprobs, message=message)


TURNS = [given(1, 2), answer([3, 4], [-0.5, -0.25]), given(9), answer([9, 5], [-1.5], scaffold=1)]


def trace(*nodes: Any, **changes: Any) -> Any:
    made = {
        "id": "t",
        "agent": SimpleNamespace(name="agent", trainable=True),
        "branches": [SimpleNamespace(nodes=list(nodes), trainable=True)],
        "rewards": {"right": SimpleNamespace(score=1.5, weight=0.5)},
        "reward": 0.75,
        "metrics": {"num_turns": 2.0},
        "stop_condition": "max_turns",
        "errors": [],
        "task": SimpleNamespace(data=SimpleNamespace(idx=7)),
    }
    return SimpleNamespace(**made | changes)


def episode(*traces: Any, ok: bool = True, errors: Any = ()) -> Any:
    return SimpleNamespace(traces=list(traces), ok=ok, errors=list(errors))


SAMPLED = {"t": [FIRST, SECOND]}


def test_turns_are_as_sampled_and_what_others_said_is_not_trained() -> None:
    group = group_of("g", [trajectory_of(episode(trace(*TURNS)), SAMPLED, POLICIES)])
    assert list(group["tokens"][0]) == [1, 2, 3, 4, 9, 9, 5]
    assert list(group["mask"][0]) == [False, False, True, True, False, False, True]
    assert list(group["inference_logprobs"][0]) == [0, 0, -0.5, -0.25, 0, 0, -1.5]
    assert (group.oldest, group.newest) == (PolicyVersion(0, 1), PolicyVersion(0, 3))
    assert list(group.scores) == [0.75]
    np.testing.assert_array_equal(group["ratings"][0], [1.5])
    assert group["raters"] == [{"right": 0.5}]
    assert list(group["metric_num_turns"]) == [2.0]
    assert group["instance_ids"] == [7]
    assert group["stop_reasons"] == ["max_turns"]
    assert [message["role"] for message in group["messages"][0]] == ["user", "assistant"] * 2


def test_an_answer_that_the_conversation_left_out_is_left_out() -> None:
    stray = Completion("", [1, 2], [8], [-2.0])
    made = trajectory_of(episode(trace(*TURNS)), {"t": [stray, FIRST, stray, SECOND]}, POLICIES)
    assert made.token_ids == [1, 2, 3, 4, 9, 9, 5]


@pytest.mark.parametrize(
    "node",
    [answer([3, 5], [-0.5, -0.25]), answer([3, 4], [-0.5, -0.3]), answer([], [])],
    ids=["other tokens", "other log-probabilities", "rewritten"],
)
def test_an_answer_of_another_model_or_a_changed_one_is_refused(node: Any) -> None:
    with pytest.raises(InvalidGroupError, match="turn 0 was not sampled by the policy, or was changed"):
        trajectory_of(episode(trace(given(1, 2), node)), SAMPLED, POLICIES)


def test_a_rewritten_conversation_fails_the_rollout() -> None:
    branches = [SimpleNamespace(nodes=TURNS[:2], trainable=True)] * 2
    with pytest.raises(RolloutFailedError, match="rewritten: the trace has 2 branches"):
        trajectory_of(episode(trace(branches=branches)), SAMPLED, POLICIES)


def test_a_branch_that_does_not_train_is_none() -> None:
    branches = [
        SimpleNamespace(nodes=TURNS, trainable=True),
        SimpleNamespace(nodes=TURNS[:1], trainable=False),
    ]
    assert trajectory_of(episode(trace(branches=branches)), SAMPLED, POLICIES).score == 0.75


def test_a_trace_without_a_reward_fails_the_rollout() -> None:
    with pytest.raises(RolloutFailedError, match="it has no reward"):
        trajectory_of(episode(trace(*TURNS, rewards={}, reward=0.0)), SAMPLED, POLICIES)


def test_other_agents_add_no_sequence() -> None:
    judge = trace(agent=SimpleNamespace(name="judge", trainable=True))  # with a client of its own
    fixed = trace(agent=SimpleNamespace(name="agent", trainable=False))
    made = trajectory_of(episode(judge, trace(*TURNS), fixed), SAMPLED, POLICIES)
    assert made.token_ids == [1, 2, 3, 4, 9, 9, 5]


@pytest.mark.parametrize(("traces", "got"), [((), "0: none"), ((trace(), trace()), "2: agent, agent")])
def test_another_number_of_trained_agents_is_refused(traces: Any, got: str) -> None:
    with pytest.raises(RolloutFailedError, match=rf"one trained agent run \(got {got}\)"):
        trajectory_of(episode(*traces), SAMPLED, POLICIES)


def test_an_error_of_theirs_fails_the_rollout_with_what_the_server_said() -> None:
    broken = SimpleNamespace(type="ProviderError", message="status 503")
    failed = episode(trace(*TURNS, errors=[broken]), ok=False)
    with pytest.raises(RolloutFailedError, match=r"ProviderError: status 503 \(the queue is full\)"):
        trajectory_of(failed, SAMPLED, POLICIES, "the queue is full")
    with pytest.raises(RolloutFailedError, match="it is not complete"):
        trajectory_of(episode(ok=False), SAMPLED, POLICIES)


@pytest.mark.parametrize("nodes", [(), (given(1, 2),)])
def test_an_empty_trace_fails_the_rollout(nodes: Any) -> None:
    with pytest.raises(RolloutFailedError, match=r"no turn \(max_turns: the context has 8 tokens\)"):
        trajectory_of(episode(trace(*nodes)), SAMPLED, POLICIES, "the context has 8 tokens")
    with pytest.raises(RolloutFailedError, match="no turn"):
        trajectory_of(episode(trace(branches=[])), {}, POLICIES)


@pytest.mark.parametrize("field", ["rewards", "metrics"])
def test_what_was_not_computed_fails_the_rollout(field: str) -> None:
    with pytest.raises(RolloutFailedError, match="near was not computed"):
        trajectory_of(episode(trace(*TURNS, **{field: {"near": None}})), SAMPLED, POLICIES)


@pytest.mark.parametrize(
    ("finish", "condition", "told"),
    [
        ("stop", "agent_completed", "stop"),
        ("length", "agent_completed", "length"),
        ("stop", "user_closed", "stop"),
        ("stop", None, "stop"),
        ("stop", "agent_timeout", "agent_timeout"),
        ("length", "max_turns", "length"),
    ],
)
def test_the_reason_of_the_end(finish: str, condition: str | None, told: str) -> None:
    sampled = {"t": [Completion("", [1, 2], [3, 4], [-0.5, -0.25], finish_reason=finish)]}
    made = trajectory_of(episode(trace(*TURNS[:2], stop_condition=condition)), sampled, POLICIES)
    assert made.finish_reason == told


def rated(**scores: float) -> Any:
    rewards = {name: SimpleNamespace(score=score, weight=1.0) for name, score in scores.items()}
    return trajectory_of(episode(trace(*TURNS, rewards=rewards)), SAMPLED, POLICIES)


def test_every_answer_of_a_group_has_the_same_raters() -> None:
    group = group_of("g", [rated(form=1.0, right=0.5), rated(right=0.25, form=0.0)])
    assert [list(row) for row in group["ratings"]] == [[1.0, 0.5], [0.0, 0.25]]
    assert [[*row] for row in group["raters"]] == [["form", "right"]] * 2
    with pytest.raises(
        InvalidGroupError, match=r"raters: sequences 0 and 1: have different raters \(form, right and form\)"
    ):
        group_of("g", [rated(form=1.0, right=0.5), rated(form=0.0)])
