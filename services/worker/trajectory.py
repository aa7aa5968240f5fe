"""Trajectories of an environment, and the group built from them.

A `Trajectory` is one row of tokens. The policy sampled some of them (mask True, with a log-probability). The others
were given: the prompt, tool results, the next question (mask False, log-probability 0). Turns are appended and never
rewritten, so the trainer reads exactly the tokens that the policy read.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.errors import InvalidGroupError, UsageError
from rolloutmq.schemas.group import (
    COLUMN_DEPTH,
    OPAQUE_COLUMNS,
    RATERS,
    Column,
    Group,
    check_versions,
    numpy_dtype,
)
from rolloutmq.schemas.token_values import check_token_values
from rolloutmq.schemas.wire.envelope import Dtype, PolicyVersion
from rolloutmq.services.worker.completion import ChatMessage, Completion, TokenIds

UNSCORED: Final = float("nan")
"""Score of a trajectory that has none yet."""


class TurnMismatchError(InvalidGroupError):
    """The prompt of a turn does not begin with the turns before it.

    Attributes:
        place: First token that differs, counted from 0.
        found: That token of the prompt; None if the prompt ends before it.
        wanted: That token of the turns before.
    """

    def __init__(self, before: Sequence[int], prompt: Sequence[int]) -> None:
        pairs = enumerate(zip(before, prompt, strict=False))
        self.place = next((at for at, (old, new) in pairs if old != new), len(prompt))
        self.wanted = int(before[self.place])
        self.found = int(prompt[self.place]) if self.place < len(prompt) else None
        self._texts: dict[int, str] = {}
        super().__init__("tokens", self._described())

    def name_tokens(self, texts: Mapping[int, str]) -> None:
        """Tell the texts of the two tokens."""
        self._texts.update(texts)
        self.problem = self._described()

    def _described(self) -> str:
        found = "the end" if self.found is None else self._token(self.found)
        return (
            f"the turn's prompt does not begin with the turns before it: token {self.place} is {found}, was "
            f"{self._token(self.wanted)}; continue the sampled tokens: policy.complete(text, after=trajectory), or "
            "policy.chat(messages, after=trajectory) with the new messages alone"
        )

    def _token(self, token: int) -> str:
        return f"{token} {self._texts[token]!r}" if token in self._texts else str(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence with its score. Sequences of tokens have one entry per token.

    Attributes:
        token_ids: Given and sampled tokens.
        mask: True where the policy sampled the token and is to learn from it; or 1, and 0 elsewhere.
        logprobs: Log-probability at sampling, in nats; 0 for given tokens.
        score: Reward, a finite number. A rollout must give each of its trajectories one; until then it is NaN.
        oldest, newest: Policy versions of the first and the last sampled token, as completions have them. None: the
            newest version that the worker knew when the rollout began.
        finish_reason: End of the last turn, `stop` or `length`, or any text of the environment.
        messages: The conversation, for people and logs.
        temperatures: Temperature that the log-probability refers to; None means 1 for all tokens.
        columns: Rows of further columns, such as `ref_logprobs`. All sequences of a rollout have the same
            names.
    """

    token_ids: TokenIds
    mask: Sequence[bool] | NDArray[Any]
    logprobs: Sequence[float] | NDArray[Any]
    score: float = UNSCORED
    oldest: PolicyVersion | None = None
    newest: PolicyVersion | None = None
    finish_reason: str = ""
    messages: Sequence[ChatMessage] | None = None
    temperatures: Sequence[float] | NDArray[Any] | None = None
    columns: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        completion: Completion,
        score: float = UNSCORED,
        messages: Sequence[ChatMessage] | None = None,
    ) -> "Trajectory":
        """Return the trajectory of one prompt and its answer."""
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
        """Return this trajectory with one more turn: the new part of the prompt (given) and the answer
        (sampled). It has no score until `scored` gives one: an earlier score was that of the turns before.

        Raises:
            InvalidGroupError: The prompt of the turn does not begin with this trajectory, for example because a chat
                template rewrote earlier messages. A prompt that was asked with `after` begins with it.
        """
        before = len(self.token_ids)
        if completion.prompt_token_ids[:before] != list(self.token_ids):
            raise TurnMismatchError(list(self.token_ids), completion.prompt_token_ids)
        turn = Trajectory.of(completion)
        return replace(
            self,
            token_ids=turn.token_ids,
            mask=[*self.mask, *turn.mask[before:]],
            logprobs=[*self.logprobs, *turn.logprobs[before:]],
            oldest=min(self.oldest or completion.oldest, completion.oldest),
            newest=max(self.newest or completion.newest, completion.newest),
            score=UNSCORED,
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
        """Return this trajectory with its reward, and with messages and finish reason if given."""
        return replace(
            self,
            score=score,
            messages=self.messages if messages is None else messages,
            finish_reason=finish_reason or self.finish_reason,
        )


def check_messages(messages: Sequence[ChatMessage], after: Trajectory | None) -> None:
    """Check the messages of a call: a whole conversation, or with `after` those since its last answer.

    Raises:
        UsageError: They are no list of messages; or as for `check_new`.
    """
    if after is not None:
        check_new(messages)
    elif not _is_conversation(messages):
        raise UsageError(
            f"messages: must be a list of messages (got {reprlib.repr(messages)}); pass a text as "
            'policy.complete(text), or as [{"role": "user", "content": text}]'
        )


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, Sequence)
        and not isinstance(messages, str)
        and all(isinstance(message, Mapping) for message in messages)
    )


def check_new(messages: Sequence[ChatMessage]) -> None:
    """Check messages that follow a trajectory: a conversation with its answers would be said twice.

    Raises:
        UsageError: They are no list of messages, there is none, or one of them is an answer.
    """
    if not _is_conversation(messages):
        raise UsageError(
            f"messages: must be a list of messages (got {reprlib.repr(messages)}); pass a text as "
            'policy.complete(text, after=...), or as [{"role": "user", "content": text}]'
        )
    if not messages:
        raise UsageError(
            "messages: with `after`, must have at least one message since its last answer (got none); add the next "
            "message, or sample on from the answer by policy.complete(sequence.token_ids)"
        )
    if any(message.get("role") == "assistant" for message in messages):
        raise UsageError(
            "messages: with `after`, must be only those since its last answer (got one of role assistant); leave out "
            "the turns that `after` has"
        )


def tokens_so_far(after: Trajectory) -> list[int]:
    """Return the tokens of the turns so far.

    Raises:
        UsageError: It is no trajectory. The tokens of a completion are its answer alone, without the prompt.
    """
    if not isinstance(after, Trajectory):
        raise UsageError(
            f"after: must be a Trajectory (got {type(after).__name__}); pass Trajectory.of(completion), or what "
            "trajectory.then(completion) returned"
        )
    return list(map(int, after.token_ids))


def continued(after: Trajectory, new: TokenIds, *, is_text: bool) -> list[int]:
    """Return the tokens of a trajectory and the new ones behind them: the prompt of its next turn.

    Args:
        after: The trajectory.
        new: The new tokens.
        is_text: They are those of a text. It is new whatever it begins with: after an answer cut by the limit it may
            repeat the turns.

    Raises:
        UsageError: `after` is no trajectory; or given ids begin with it: its turns would be in the prompt twice.
    """
    before = tokens_so_far(after)
    if before and not is_text and list(new[: len(before)]) == before:
        raise UsageError(
            f"prompt: with `after`, must be only the tokens behind its turns (got all {len(before)} tokens of `after` "
            "once more); leave out `after` for the ids of policy.render(messages, after=trajectory), which has them"
        )
    return [*before, *new]


def group_of(
    group_id: str,
    trajectories: Sequence[Trajectory],
    *,
    started_at: float = 0.0,
    finished_at: float = 0.0,
    task: str = "",
    members: Mapping[str, Any] | None = None,
    known: PolicyVersion | None = None,
) -> Group:
    """Build the group of one rollout and check it.

    Args:
        group_id: Unique in the run.
        trajectories: Return value of an environment, not checked yet.
        started_at: Wall-clock seconds at the start of the rollout.
        finished_at: Wall-clock seconds after scoring.
        task: Id of the submitted task that the group answers.
        members: Content of the opaque column `members`: how many sequences were requested and arrived.
        known: Newest version that the worker knew when the rollout began: that of a trajectory without one, beside
            others that have theirs. If none has one, the producer stamps the group.

    Raises:
        InvalidGroupError: It is not a list of trajectories, or their lengths, values or columns do not fit.
    """
    _check_returned(trajectories)
    tokens = _ragged("tokens", Dtype.I32, [one.token_ids for one in trajectories])
    mask = _ragged("mask", Dtype.BOOL, [one.mask for one in trajectories])
    logprobs = _ragged("inference_logprobs", Dtype.F32, [one.logprobs for one in trajectories])
    if not mask.values.any():
        raise InvalidGroupError("mask", "no token was sampled; set it to True for at least one")
    oldest, newest = _span(trajectories, known) or (PolicyVersion(), PolicyVersion())
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
        oldest,
        newest,
        started_at,
        finished_at,
        task=task,
        sequences=len(trajectories),
        tokens=int(tokens.values.size),
        stamped=any(one.oldest or one.newest for one in trajectories),
    )
    group.check()
    check_token_values(group)
    for row, one in enumerate(trajectories):
        check_versions(one.oldest, one.newest, f"sequence {row}: ")
    return group


def _check_returned(trajectories: Any) -> None:
    if not isinstance(trajectories, list | tuple):
        found = type(trajectories).__name__
        raise InvalidGroupError("*", f"rollout must return a list of Trajectory (got {found})")
    strangers = [type(one).__name__ for one in trajectories if not isinstance(one, Trajectory)]
    if strangers:
        raise InvalidGroupError(
            "*", f"rollout must return a list of Trajectory (the list has a {strangers[0]})"
        )
    if not trajectories:
        raise InvalidGroupError("*", "rollout must return at least one Trajectory (got none)")


def _span(
    trajectories: Sequence[Trajectory], known: PolicyVersion | None
) -> tuple[PolicyVersion, PolicyVersion] | None:
    """Return the first and the last version of a group; None if no trajectory has one."""
    given = [version for one in trajectories for version in (one.oldest, one.newest) if version]
    if given and known and not all(one.oldest for one in trajectories):
        given.append(known)
    return (min(given), max(given)) if given else None


def _ragged(name: str, dtype: Dtype, rows: list[Any]) -> Column:
    """Join the rows of a column, converted to the type it has on the wire; no value becomes another by that."""
    kind = numpy_dtype(dtype)
    wanted = f"each row must be a sequence of {kind.name}"
    try:
        built = Column.build(name, [_listed(row) for row in rows], 1)
    except InvalidGroupError as error:
        raise InvalidGroupError(name, f"{wanted}: {error.problem}") from None
    except TypeError as error:
        raise InvalidGroupError(name, f"{wanted}: {error}") from None
    if unfit := _unfit(kind, built.values):
        raise InvalidGroupError(name, f"{wanted} (got {unfit})")
    with np.errstate(over="ignore"):  # a placeholder may be beyond float32
        values = built.values.astype(kind, copy=False)
    return Column(dtype, values, built.lengths)


def _listed(row: Any) -> Any:
    """Return a row as a list, a tuple or an array; tensors and series have a method for it."""
    if isinstance(row, list | tuple | np.ndarray):
        return row
    return row.tolist() if hasattr(row, "tolist") else list(row)


def _unfit(kind: np.dtype[Any], values: NDArray[Any]) -> str:
    """Return what a conversion to this type would change, or an empty string: a value, or the type of all."""
    if not values.size or kind.kind == "f" or values.dtype == kind:
        return ""
    if kind.kind == "b":
        fits = (values == 0) | (values == 1)
    elif values.dtype.kind in "iu":
        fits = values == values.astype(kind)
    else:
        return str(values.dtype)
    return "" if fits.all() else str(values[np.argmin(fits)])


def _temperatures(trajectories: Sequence[Trajectory]) -> dict[str, Column]:
    if all(one.temperatures is None for one in trajectories):
        return {}
    rows = [one._each_temperature() for one in trajectories]
    return {"temperatures": _ragged("temperatures", Dtype.F32, rows)}


def _scores(trajectories: Sequence[Trajectory]) -> Column:
    return Column(Dtype.F64, np.array([_score(row, one) for row, one in enumerate(trajectories)]))


def _score(row: int, one: Trajectory) -> float:
    returned: Any = one.score
    try:
        if isinstance(returned, str | bytes | bytearray):
            raise TypeError  # text is no score, even if it reads as a number
        score = float(returned)
    except (TypeError, ValueError):
        raise InvalidGroupError(
            "scores", f"sequence {row}: must be a number (got {one.score!r:.80})"
        ) from None
    if not isfinite(score):
        raise InvalidGroupError(
            "scores", f"sequence {row}: must be finite (got {score}){_if_unscored(score)}"
        )
    return score


def _if_unscored(score: float) -> str:
    """Return what to do about NaN: it may have been computed, or never been given."""
    if not isnan(score):
        return ""
    return (
        "; the score is NaN, or there is none: end the trajectory with `.scored(reward)`, or give "
        "`Trajectory.of(completion, reward)`"
    )


def _further(trajectories: Sequence[Trajectory]) -> dict[str, Column]:
    """Return the optional columns."""
    found: dict[str, Column] = {}
    if any(one.finish_reason for one in trajectories):
        found["stop_reasons"] = Column.opaque([one.finish_reason for one in trajectories])
    if any(one.messages is not None for one in trajectories):
        found["messages"] = Column.opaque([list(one.messages or ()) for one in trajectories])
    names = list(trajectories[0].columns or ())
    for row, one in enumerate(trajectories):
        if different := sorted(set(one.columns or ()) ^ set(names)):
            why = f"sequences 0 and {row}: have different columns ({', '.join(different)}); give all the same"
            raise InvalidGroupError("*", why)
    for name in names:
        rows = [one.columns[name] for one in trajectories if one.columns]
        if name == RATERS:
            _check_raters(rows)
        if name in OPAQUE_COLUMNS:
            found[name] = Column.opaque(rows)
        else:
            found[name] = Column.build(name, rows, COLUMN_DEPTH.get(name))
    return found


def _check_raters(rows: Sequence[Any]) -> None:
    """Check that all answers of a group have the same raters, in one order: what lacks a rater is no lower score."""
    names = [[*row] if isinstance(row, Mapping) else [] for row in rows]
    for row, found in enumerate(names):
        if found != names[0]:
            raise InvalidGroupError(
                RATERS,
                f"sequences 0 and {row}: have different raters ({', '.join(map(str, names[0]))} and "
                f"{', '.join(map(str, found))}); give every answer of a group the same ones, in the same order",
            )
