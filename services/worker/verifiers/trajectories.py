"""Trajectories from the rollouts of `verifiers`: each turn as the policy sampled it, never tokenized again. Pure.

A rollout of theirs lists its turns, and each turn names its response. The client has kept what the policy sampled for
that response, so tokens, log-probabilities and policy versions are those of the server. What stands between two turns
is of the environment: it is not trained, and has the log-probability 0. A prompt that does not begin with the turns
before it, because a chat template or the environment rewrote them, fails the rollout.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.services.worker.completion import ChatMessage, Completion
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.services.worker.verifiers.reward_functions import columns_of

TRAJECTORY: Final = "trajectory"
STATE_COLUMNS: Final = (TRAJECTORY, "reward", "metrics", "stop_condition", "example_id")
"""What is read of their state: the turns, and fields of the output in whose place a reward function of that name would
otherwise be."""
ROW: Final = "instance_ids"
"""Column with the row of the data set that a sequence answers."""


class RolloutFailedError(Exception):
    """A rollout that their environment ended with an error, or that has nothing to learn from."""


def trajectory_of(
    rollout: Mapping[str, Any],
    sampled: Mapping[str, Completion],
    weights: Mapping[str, float],
    *,
    single_turn: bool = False,
    overlong: str = "",
) -> Trajectory:
    """Return the trajectory of one rollout.

    Args:
        rollout: Output of theirs, with `STATE_COLUMNS`.
        sampled: What the policy sampled, by the id of the response.
        weights: Weights of the reward functions by name.
        single_turn: The environment has one turn, so its limit of turns ends every rollout and says nothing.
        overlong: What the server said of a prompt without room for an answer.

    Raises:
        RolloutFailedError: It ended with an error, or has no turn.
        InvalidGroupError: A turn was not sampled by this policy, or its prompt does not begin with the turns before.
    """
    error = rollout.get("error_chain") or rollout.get("error")
    if error and not isinstance(error, int | float):  # a number is that of a reward function of this name
        raise RolloutFailedError(_reason(error))
    turns = [_completion(number, turn, sampled) for number, turn in enumerate(rollout[TRAJECTORY])]
    condition = str(rollout.get("stop_condition") or "")
    if not turns:
        why = condition or "no stop condition"
        raise RolloutFailedError(f"it has no turn ({why}{': ' if overlong else ''}{overlong})")
    sequence, last = sequence_of(turns), turns[-1].finish_reason
    return Trajectory(
        token_ids=sequence.token_ids,
        mask=sequence.mask,
        logprobs=sequence.logprobs,
        score=rollout["reward"],
        oldest=sequence.oldest,
        newest=sequence.newest,
        finish_reason=last if single_turn or last == "length" else condition or last,
        messages=[*messages_of(rollout.get("prompt")), *messages_of(rollout.get("completion"))],
        temperatures=sequence.temperatures,
        columns={**columns_of(rollout.get("metrics") or {}, weights), ROW: rollout["example_id"]},
    )


def sequence_of(turns: Sequence[Completion]) -> Trajectory:
    """Return turns as one sequence.

    Raises:
        InvalidGroupError: The prompt of a turn does not begin with the turns before it.
    """
    sequence = Trajectory.of(turns[0])
    for number, turn in enumerate(turns[1:], 1):
        sequence = _continued(number, sequence, turn)
    return sequence


def _continued(number: int, sequence: Trajectory, turn: Completion) -> Trajectory:
    try:
        return sequence.then(turn)
    except InvalidGroupError as error:
        problem, _, _ = error.problem.partition(";")  # the remedy is for an environment of one's own
        remedy = "use a chat template and an environment that keep earlier turns as they are"
        raise InvalidGroupError("tokens", f"turn {number}: {problem}; {remedy}") from None


def _completion(number: int, turn: Mapping[str, Any], sampled: Mapping[str, Completion]) -> Completion:
    response = turn.get("response")
    name = response.get("id") if isinstance(response, Mapping) else getattr(response, "id", None)
    completion = sampled.get(str(name))
    if completion is None:
        raise InvalidGroupError(
            "tokens",
            f"turn {number} was not sampled by the client of this rollout (got response {name!r}); use an environment "
            "that asks `state['client']`",
        )
    return completion


def messages_of(given: Any) -> Sequence[ChatMessage]:
    """Return messages of theirs, or a prompt of text, in OpenAI's format."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_message(one) for one in given or ()]


def _message(given: Any) -> ChatMessage:
    plain: dict[str, Any] = (
        dict(given) if isinstance(given, Mapping) else given.model_dump(mode="json", exclude_none=True)
    )
    if plain.get("role") == "text":  # a prompt that was given as text; the server gets it as the user's
        plain["role"] = "user"
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_call(json.loads(one) if isinstance(one, str) else one) for one in calls]
    elif plain.get("content") is None:  # the model sampled the end at once
        plain["content"] = ""
    return plain


def _call(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in given:
        return given
    function = {"name": given.get("name"), "arguments": given.get("arguments")}
    return {"id": given.get("id"), "type": "function", "function": function}


def _reason(error: Any) -> str:
    """Return the chain of causes of an error of theirs."""
    if isinstance(error, Mapping):
        return str(error.get("error_chain_repr") or error.get("error") or dict(error))
    return str(error)
