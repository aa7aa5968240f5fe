"""Sequences that an environment returns, and the group that is made of them.

A `Trajectory` is one line of tokens of which some were sampled by the policy (mask True, with a log-probability) and
some were given to it: the prompt, the answers of tools, the next question (mask False, log-probability 0). Turns are
appended, never rewritten: what a trainer sees is exactly what the policy saw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.envelope import Dtype, PolicyVersion
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.trajectory import COLUMN_DEPTH, OPAQUE_COLUMNS, Column, Group, numpy_dtype
from rolloutmq.services.worker.policy import ChatMessage, Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence with its score.

    Attributes:
        token_ids: All tokens, given and sampled.
        mask: Of each token, whether the policy sampled it and is to learn from it.
        logprobs: Of each token, as it was sampled; 0 where it was given.
        score: The reward.
        oldest, newest: Policy versions of the first and the last sampled token.
        finish_reason: How the last turn ended, `stop` or `length`; or how the whole did, in words of the environment.
        messages: The conversation, for people and for logs.
        temperatures: Of each token, that its log-probability is of; None says 1 for all of them.
        columns: Rows of further columns, such as `ref_logprobs`; all sequences of a rollout have the same names.
    """

    token_ids: Sequence[int] | NDArray[Any]
    mask: Sequence[bool] | NDArray[Any]
    logprobs: Sequence[float] | NDArray[Any]
    score: float = 0.0
    oldest: PolicyVersion = PolicyVersion()
    newest: PolicyVersion = PolicyVersion()
    finish_reason: str = ""
    messages: Sequence[ChatMessage] | None = None
    temperatures: Sequence[float] | NDArray[Any] | None = None
    columns: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        completion: Completion,
        score: float = 0.0,
        messages: Sequence[ChatMessage] | None = None,
    ) -> "Trajectory":
        """Make the sequence of one prompt and its answer."""
        given, sampled = completion.prompt_token_ids, completion.token_ids
        return cls(
            token_ids=given + sampled,
            mask=[False] * len(given) + [True] * len(sampled),
            logprobs=[0.0] * len(given) + completion.logprobs,
            score=score,
            oldest=completion.oldest,
            newest=completion.newest,
            finish_reason=completion.finish_reason,
            messages=messages,
            temperatures=None
            if completion.temperature == 1
            else [1.0] * len(given) + [completion.temperature] * len(sampled),
        )

    def then(self, completion: Completion) -> "Trajectory":
        """Append a turn: what was added to the prompt since, given, and the answer, sampled.

        Raises:
            InvalidGroupError: The prompt of the turn does not begin with this sequence, as when a chat template
                rewrites what was said before. Ask with token ids (`complete(trajectory.token_ids + more)`) then.
        """
        before = len(self.token_ids)
        if completion.prompt_token_ids[:before] != list(self.token_ids):
            raise InvalidGroupError("tokens", "the turn's prompt does not begin with the turns before it")
        turn = Trajectory.of(completion)
        return replace(
            self,
            token_ids=turn.token_ids,
            mask=[*self.mask, *turn.mask[before:]],
            logprobs=[*self.logprobs, *turn.logprobs[before:]],
            oldest=min(self.oldest, completion.oldest),
            newest=max(self.newest, completion.newest),
            finish_reason=completion.finish_reason,
            temperatures=None
            if self.temperatures is None and turn.temperatures is None
            else [*self._each_temperature(), *turn._each_temperature()[before:]],
        )

    def _each_temperature(self) -> Sequence[float] | NDArray[Any]:
        return [1.0] * len(self.token_ids) if self.temperatures is None else self.temperatures

    def scored(
        self, score: float, messages: Sequence[ChatMessage] | None = None, finish_reason: str = ""
    ) -> "Trajectory":
        """Return the same sequence with its reward, and with its conversation and how it ended if they are given."""
        return replace(
            self,
            score=score,
            messages=self.messages if messages is None else messages,
            finish_reason=finish_reason or self.finish_reason,
        )


def group_of(
    group_id: str,
    trajectories: Sequence[Trajectory],
    *,
    started_at: float = 0.0,
    finished_at: float = 0.0,
    task: str = "",
    members: Mapping[str, Any] | None = None,
) -> Group:
    """Make the group of one rollout and check it.

    Args:
        group_id: Unique in the run.
        trajectories: What an environment returned; nothing is assumed of it.
        started_at: Wall-clock seconds at which the rollout began.
        finished_at: Wall-clock seconds at which it was scored.
        task: Id of the submitted task that it answers.
        members: What is to be told of how many sequences were wanted and came; the opaque column `members`.

    Raises:
        InvalidGroupError: It is no list of trajectories, or they contradict themselves or each other.
    """
    _check_returned(trajectories)
    tokens = _ragged("tokens", Dtype.I32, [one.token_ids for one in trajectories])
    mask = _ragged("mask", Dtype.BOOL, [one.mask for one in trajectories])
    logprobs = _ragged("inference_logprobs", Dtype.F32, [one.logprobs for one in trajectories])
    if not mask.values.any():
        raise InvalidGroupError("mask", "no token was sampled: there is nothing to learn from")
    group = Group(
        group_id,
        {
            "tokens": tokens,
            "mask": mask,
            "scores": _scores(trajectories),
            "inference_logprobs": logprobs,
            **_temperatures(trajectories),
            **_further(trajectories),
            **({} if members is None else {"members": Column.opaque(members)}),
        },
        min(one.oldest for one in trajectories),
        max(one.newest for one in trajectories),
        started_at,
        finished_at,
        task=task,
        sequences=len(trajectories),
        tokens=int(tokens.values.size),
    )
    group.check()
    return group


def _check_returned(trajectories: Any) -> None:
    if not isinstance(trajectories, list | tuple):
        found = type(trajectories).__name__
        raise InvalidGroupError("*", f"rollout must return a list of Trajectory, it returned {found}")
    strangers = [type(one).__name__ for one in trajectories if not isinstance(one, Trajectory)]
    if strangers:
        raise InvalidGroupError("*", f"rollout must return a list of Trajectory, it has a {strangers[0]}")
    if not trajectories:
        raise InvalidGroupError("*", "rollout returned no trajectory")


def _ragged(name: str, dtype: Dtype, rows: list[Any]) -> Column:
    """Join the rows of a column, in the type that it travels with."""
    kind = numpy_dtype(dtype)
    try:
        lengths = np.fromiter(map(len, rows), np.uint32, len(rows))
        values = np.fromiter(chain.from_iterable(rows), kind, int(lengths.sum()))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidGroupError(name, f"must be sequences of {kind.name}: {error}") from None
    return Column(dtype, values, (lengths,))


def _temperatures(trajectories: Sequence[Trajectory]) -> dict[str, Column]:
    if all(one.temperatures is None for one in trajectories):
        return {}
    rows = [one._each_temperature() for one in trajectories]
    return {"temperatures": _ragged("temperatures", Dtype.F32, rows)}


def _scores(trajectories: Sequence[Trajectory]) -> Column:
    try:
        values = np.array([float(one.score) for one in trajectories])
    except (TypeError, ValueError) as error:
        raise InvalidGroupError("scores", f"must be numbers: {error}") from None
    return Column(Dtype.F64, values)


def _further(trajectories: Sequence[Trajectory]) -> dict[str, Column]:
    """Return the columns that only some rollouts have."""
    found: dict[str, Column] = {}
    if any(one.finish_reason for one in trajectories):
        found["stop_reasons"] = Column.opaque([one.finish_reason for one in trajectories])
    if any(one.messages is not None for one in trajectories):
        found["messages"] = Column.opaque([list(one.messages or ()) for one in trajectories])
    names = list(trajectories[0].columns or ())
    for one in trajectories:
        if set(one.columns or ()) != set(names):
            raise InvalidGroupError("*", "the sequences of a rollout have different columns")
    for name in names:
        rows = [one.columns[name] for one in trajectories if one.columns]
        if name in OPAQUE_COLUMNS:
            found[name] = Column.opaque(rows)
        else:
            found[name] = Column.build(name, rows, COLUMN_DEPTH.get(name))
    return found
