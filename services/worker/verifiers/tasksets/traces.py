"""Trajectories from the episodes of `verifiers` 0.4: each turn as the policy sampled it, never tokenized again. Pure.

An episode has a trace for each agent run; a trace is a graph of messages, each with the tokens that it adds. The proxy
has kept what the policy sampled for the trace, so tokens, log-probabilities and policy versions are the server's. The
graph says which answers the conversation has.

A sequence of a group is one conversation of the policy. An episode with several trained traces, or a trace whose
conversation was rewritten and has several branches, fails the rollout with the reason: the sequences of a group would
no longer be its rollouts.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.services.worker.verifiers.reward_functions import columns_of
from rolloutmq.services.worker.verifiers.trajectories import ROW, RolloutFailedError, messages_of, sequence_of

ENDED: Final = ("", "agent_completed", "user_closed")
"""Stop conditions of a conversation that ended by itself."""


def trajectory_of(
    episode: Any,
    sampled: Mapping[str, Sequence[Completion]],
    policies: Collection[str],
    refusal: str = "",
) -> Trajectory:
    """Return the trajectory of one episode.

    Args:
        episode: Of theirs, finished.
        sampled: What the policy sampled, by trace.
        policies: Names of the agents that the policy plays.
        refusal: What a server said of a request that it refused.

    Raises:
        RolloutFailedError: It ended with an error, has no turn, more than one conversation, no reward, or one that was
            not computed.
        InvalidGroupError: A turn was not sampled by this policy, or its prompt does not begin with the turns before.
    """
    trace = _trained(episode, policies, refusal)
    nodes = _conversation(trace)
    turns = _turns(nodes, sampled.get(trace.id, ()))
    if not turns:
        why = trace.stop_condition or "no stop condition"
        raise RolloutFailedError(f"it has no turn ({why}{': ' if refusal else ''}{refusal})")
    sequence, last = sequence_of(turns), turns[-1].finish_reason
    condition = trace.stop_condition or ""
    if not trace.rewards:
        raise RolloutFailedError("it has no reward; give the task a reward function or a judge")
    # The order of the keys of a map is that of the function that returned it, and may differ within a group.
    rewards = {name: _computed(f"reward {name}", reward) for name, reward in sorted(trace.rewards.items())}
    metrics = {name: _computed(f"metric {name}", value) for name, value in trace.metrics.items()}
    weights = {name: reward.weight for name, reward in rewards.items()}
    scores = {name: reward.score for name, reward in rewards.items()}
    row = trace.task.data.idx
    return Trajectory(
        token_ids=sequence.token_ids,
        mask=sequence.mask,
        logprobs=sequence.logprobs,
        score=trace.reward,
        oldest=sequence.oldest,
        newest=sequence.newest,
        finish_reason=last if condition in ENDED or last == "length" else condition,
        messages=messages_of([node.message for node in nodes]),
        temperatures=sequence.temperatures,
        columns={**columns_of({**metrics, **scores}, weights), ROW: 0 if row is None else row},
    )


def _trained(episode: Any, policies: Collection[str], refusal: str) -> Any:
    """Return the one trace of an episode that trains the policy."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        told = "; ".join(f"{error.type}: {error.message}" for error in errors[-1:]) or "it is not complete"
        raise RolloutFailedError(told + (f" ({refusal})" if refusal and refusal not in told else ""))
    found = [trace for trace in episode.traces if trace.agent.trainable and trace.agent.name in policies]
    names = ", ".join(trace.agent.name for trace in found) or "none"
    if len(found) != 1:
        raise RolloutFailedError(
            f"an episode must have one trained agent run (got {len(found)}: {names}); mark the others as not trainable "
            "in `Env.setup`, or give them a client of their own"
        )
    return found[0]


def _conversation(trace: Any) -> Sequence[Any]:
    """Return the nodes of the only branch of a trace."""
    branches = [branch for branch in trace.branches if branch.trainable]
    if len(branches) > 1:
        raise RolloutFailedError(
            f"its conversation was rewritten: the trace has {len(branches)} branches; use a renderer and a harness "
            "that keep earlier turns as they are, without compaction or subagents"
        )
    return branches[0].nodes if branches else ()


def _turns(nodes: Sequence[Any], sampled: Sequence[Completion]) -> list[Completion]:
    """Return what was sampled for the answers of a conversation."""
    turns: list[Completion] = []
    ids: list[int] = []
    for node in nodes:
        ids += node.token_ids
        if not node.sampled:
            continue
        size = sum(node.mask)
        found = [
            one
            for one in sampled
            if one.prompt_token_ids == ids[: len(ids) - size]
            and one.token_ids == ids[len(ids) - size :]
            and one.logprobs == list(node.logprobs)
        ]
        if not found or not size:
            raise InvalidGroupError(
                "tokens",
                f"turn {len(turns)} was not sampled by the policy, or was changed afterwards; use an environment that "
                "asks the policy for it and leaves its answer alone",
            )
        turns.append(found[-1])
    return turns


def _computed(what: str, value: Any) -> Any:
    if value is None:
        raise RolloutFailedError(f"{what} was not computed")
    return value
