"""The curriculum of one environment: its open tasks, its sampler, and what has come of the tasks. Pure.

Every change is an event: tasks were drawn, or a task has ended. `apply` is the only way to change the state, so the
events of a log, applied to the state before them, make the same state again. A task is drawn before it is submitted,
and its id stays: to submit it again is harmless, and an outcome that came meanwhile is found under it.

    drawn ──> open ──done──> outcome for the sampler
               │ └── unknown to the broker: submitted again
               └── failed, expired, cancelled: no outcome; another task is drawn
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rolloutmq.schemas.wire.envelope import Count, RewardSummary
from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus
from rolloutmq.services.curriculum.samplers.sampler import Outcome, Sampler, TaskSpace

RECENT: Final = 0.98
"""Factor on earlier outcomes in the recent figures: they show about the last fifty."""


class Drawn(msgspec.Struct, frozen=True, tag="drawn", tag_field="event"):
    """Tasks were drawn, and are about to be submitted.

    Attributes:
        number: Number of the event, from 1.
        tasks: Number of each task in the task space, by id.
    """

    number: Count
    tasks: dict[str, int]


class Ended(msgspec.Struct, frozen=True, tag="ended", tag_field="event", omit_defaults=True):
    """A task has ended.

    Attributes:
        number: Number of the event, from 1.
        id: Id of the task.
        state: DONE, FAILED, EXPIRED or CANCELLED.
        sequences: Sequences of the group that answered it.
        rewards: Their scores.
        reason: Reason why there is no such group.
    """

    number: Count
    id: str
    state: TaskState
    sequences: Count = 0
    rewards: RewardSummary = RewardSummary()
    reason: str = ""


Event = Drawn | Ended


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a state belongs to: another curriculum cannot continue it.

    The numbers of tasks mean others once `environment`, its entry and options, or `run_seed` differ: the generator of a
    task is seeded with the seed of the run.
    """

    env: str
    environment: str
    run_seed: int
    task_count: int
    levels: int
    sampler: str
    options: dict[str, Any]
    seed: str
    scores: tuple[float, float]

    def difference(self, other: "Identity") -> str:
        """Return the first field that differs, with both values; empty if none does."""
        ours, theirs = (msgspec.to_builtins(one) for one in (self, other))
        return next((f"{key} {ours[key]} -> {theirs[key]}" for key in ours if ours[key] != theirs[key]), "")


class Figures(msgspec.Struct, kw_only=True):
    """Counts, and recent means over about fifty outcomes.

    Attributes:
        drawn: Drawn tasks.
        outcomes: Groups that answered tasks.
        flat: Those of them with equal scores.
        failed: Tasks whose every delivery failed.
        dropped: Tasks that expired or were cancelled.
        recent: Weight of the recent means: sum of the factors.
        success, flat_share, level: Recent sums of the success rate, of groups with equal scores, and of the level.
    """

    drawn: int = 0
    outcomes: int = 0
    flat: int = 0
    failed: int = 0
    dropped: int = 0
    recent: float = 0.0
    success: float = 0.0
    flat_share: float = 0.0
    level: float = 0.0

    def add(self, outcome: Outcome, level: int) -> None:
        """Count an outcome."""
        self.outcomes += 1
        self.flat += outcome.flat
        self.recent = self.recent * RECENT + 1.0
        self.success = self.success * RECENT + outcome.success
        self.flat_share = self.flat_share * RECENT + outcome.flat
        self.level = self.level * RECENT + level


class CurriculumState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a restarted curriculum needs.

    Attributes:
        identity: What it belongs to.
        events: Number of events in it.
        open: Open tasks, by id.
        scores: Range of the scores so far.
        figures: Counts.
        sampler: State of the sampler.
    """

    identity: Identity
    events: Count
    open: dict[str, int]
    scores: tuple[float, float]
    figures: Figures
    sampler: bytes


@dataclass(slots=True)
class ScoreRange:
    """The range of scores that the success rate is measured in; it widens with the scores."""

    low: float
    high: float

    def success(self, score: float) -> float:
        """Return where a score lies in the range, from 0 to 1."""
        # Halves, because the difference of two large scores may overflow.
        return min(1.0, max(0.0, (score / 2 - self.low / 2) / (self.high / 2 - self.low / 2)))

    def outcome(self, index: int, sequences: int, rewards: RewardSummary) -> Outcome:
        """Widen the range by the scores of a group, and return the outcome of its task."""
        self.low, self.high = min(self.low, rewards.low), max(self.high, rewards.high)
        deviation = math.sqrt(rewards.m2 / sequences) / 2 / (self.high / 2 - self.low / 2)
        return Outcome(
            index=index,
            sequences=sequences,
            success=self.success(rewards.mean),
            deviation=deviation if deviation < 0.5 else 0.5,
            flat=rewards.low == rewards.high,
        )


class Curriculum:
    """See the module.

    Args:
        space: The tasks to choose from.
        sampler: Chooses them.
        identity: What the state belongs to.
        ahead: Most open tasks.
    """

    def __init__(self, space: TaskSpace, sampler: Sampler, identity: Identity, ahead: int) -> None:
        self.identity = identity
        self.ahead = ahead
        self.open: dict[str, int] = {}
        self.figures = Figures()
        self.events = 0
        self._space = space
        self._sampler = sampler
        self._scores = ScoreRange(*identity.scores)

    def refill(self, life: str) -> Drawn | None:
        """Return the draw that fills the open tasks up, or None if they are full. Changes nothing.

        Args:
            life: Prefix of the ids, unique in the run.
        """
        first, missing = self.figures.drawn, self.ahead - len(self.open)
        if missing <= 0:
            return None
        tasks = {f"{life}-{number}": self._sampler.draw(number) for number in range(first, first + missing)}
        return Drawn(self.events + 1, tasks)

    def ended(self, status: TaskStatus) -> Ended:
        """Return the event of an open task that has ended. Changes nothing."""
        if status.state is not TaskState.DONE:
            return Ended(self.events + 1, status.id, status.state, reason=status.reason)
        found = status.rewards
        if not (math.isfinite(found.low) and math.isfinite(found.high)) or not (
            found.low <= found.mean <= found.high and found.m2 >= 0.0
        ):
            return Ended(self.events + 1, status.id, status.state, reason=f"no summary of scores: {found}")
        # JSON has no infinity, and m2 is infinite if it overflows.
        rewards = msgspec.structs.replace(found, m2=min(found.m2, sys.float_info.max))
        return Ended(self.events + 1, status.id, status.state, status.sequences, rewards)

    def apply(self, event: Event) -> None:
        """Change the state by an event.

        Raises:
            ValueError: It does not follow the last event, draws a task outside the task space, or ends a task that is
                not open. Nothing was changed.
            ConfigError: The sampler of another package raised. The state is unusable.
        """
        if event.number != self.events + 1:
            raise ValueError(f"event {event.number} does not follow event {self.events}")
        match event:
            case Drawn():
                self._require_known(event.tasks)
                self.open |= event.tasks
                self.figures.drawn += len(event.tasks)
            case Ended():
                if event.id not in self.open:
                    raise ValueError(f"task {event.id} is not open")
                self._end(self.open.pop(event.id), event)
        self.events = event.number

    def _require_known(self, tasks: dict[str, int]) -> None:
        for name, index in tasks.items():
            if not 0 <= index < self._space.count:
                raise ValueError(f"task {name} is not in the task space (got {index} of {self._space.count})")

    def _end(self, index: int, event: Ended) -> None:
        figures = self.figures
        match event.state:
            case TaskState.DONE if event.sequences:
                outcome = self._scores.outcome(index, event.sequences, event.rewards)
                figures.add(outcome, self._space.level_of(index))
                self._sampler.update(outcome)
            case TaskState.FAILED:
                figures.failed += 1
            case _:
                figures.dropped += 1

    def state(self) -> CurriculumState:
        """Return the whole state."""
        return CurriculumState(
            identity=self.identity,
            events=self.events,
            open=dict(self.open),
            scores=(self._scores.low, self._scores.high),
            figures=msgspec.structs.replace(self.figures),
            sampler=self._sampler.state(),
        )

    def restore(self, state: CurriculumState, events: Iterable[Event] = ()) -> None:
        """Continue from a state and the events after it; earlier events are skipped.

        Raises:
            ValueError: State or events are damaged or contradict each other.
            ConfigError: The sampler of another package raised.
        """
        self._require_known(state.open)
        self._sampler.restore(state.sampler)
        self.open = dict(state.open)
        self.figures = msgspec.structs.replace(state.figures)
        self._scores = ScoreRange(*state.scores)
        self.events = state.events
        for event in events:
            if event.number > self.events:
                self.apply(event)
