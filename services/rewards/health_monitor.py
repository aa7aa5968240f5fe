"""The monitor of reward health: reports of batches in, findings out. Pure; the caller passes the wall clock.

Each environment has its checks, and the trainer has some of its own, under the name `trainer`. A window is that of the
last `window_steps` batches with scores of the environment, those without a signal included; nothing is checked before
it is full. So an environment in every tenth batch is checked too, ten times as slowly. A finding is told when it
begins, again each `window_steps` such batches while it lasts (events may be lost), and when it has ended. A finding
about one window lasts until its figure is clearly within the limit (`RELEASE`), so that it does not begin and end again
and again near it. A resumed trainer takes steps again: they replace the lost ones, and what came after these.

Equal scores are told once where possible. An environment that is `solved`, since nearly all answers pass, has no other
finding about them. During a collapse no saturation begins; one that began before lasts beside it. `collapse` and
`filtering` look at the groups that are not solved alone, so a run whose other tasks teach nothing is found however many
are solved. Unless another rule filters more, `filtering` passes over those that a `collapse` names.

The broker reports every settled batch, so a trainer that reports none by itself is checked too. From the first report
of a trainer on only its own count.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial, reduce
from typing import Final, Generic, NamedTuple, Self, TypeVar

import msgspec

from rolloutmq.schemas.config.rewards import HealthConfig
from rolloutmq.schemas.wire.control import StepDone, StepSkipped
from rolloutmq.schemas.wire.health import HealthFinding, LaneScores
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.rewards import health
from rolloutmq.services.rewards.health import FilterRule, Symptom

T = TypeVar("T")

TRAINER: Final = "trainer"
"""Name that stands for the trainer in findings about its figures."""
TOO_OLD: Final = "max_staleness"
"""Part of the reason of a batch without a step whose groups are too old for the loss."""
RELEASE: Final = 0.9
"""Part of its limit below which the figure of a lasting finding must fall for the finding to end."""
FORGOTTEN_WINDOWS: Final = 50
"""Windows of the run without scores of an environment after which it is forgotten, and its findings end."""


class RecordedStep(msgspec.Struct, frozen=True, tag="step_done", tag_field="kind"):
    """The part of the report of a step that is checked, as recorded in `metrics.jsonl`."""

    step: int
    incarnation: int = 0
    groups: int = 0
    filtered: int = 0
    staleness_max: int = 0
    extra: dict[str, float] = {}
    scores: tuple[LaneScores, ...] = ()


class RecordedSkip(msgspec.Struct, frozen=True, tag="step_skipped", tag_field="kind"):
    """The same, of a batch without a signal; `step` is that of the step before it."""

    step: int
    incarnation: int = 0
    reason: str = ""
    groups: int = 0
    filtered: int = 0
    rejected: int = 0
    scores: tuple[LaneScores, ...] = ()


class RecordedBatch(msgspec.Struct, frozen=True, tag="batch_settled", tag_field="kind"):
    """The same, of a batch that the broker reported; `step` is that of the policy after it."""

    step: int
    incarnation: int = 0
    stepped: bool = False
    trained: int = 0
    filtered: int = 0
    rejected: int = 0
    staleness_max: int = 0
    scores: tuple[LaneScores, ...] = ()


class RecordedFigures(msgspec.Struct, frozen=True, tag="step_figures", tag_field="kind"):
    """The same, of the figures that a trainer logged."""

    step: int
    incarnation: int = 0
    figures: dict[str, float] = {}


Told = StepDone | StepSkipped | RecordedStep | RecordedSkip
"""A trainer's report of a batch, as published or as recorded."""
Batch = Told | BatchSettled | RecordedBatch
"""A report of a batch."""
LOGGED_KEPT: Final = 64
"""Steps whose logged figures wait for the broker's report of the batch."""


Recorded = RecordedStep | RecordedSkip | RecordedBatch | RecordedFigures
"""A line of `metrics.jsonl` that is checked."""


Passes = Callable[[str, float], bool]
"""Whether a score of an environment is that of an answer that passes."""


class Counts(NamedTuple):
    """Groups of a batch: all, those that the trainer cannot use, those that it filtered, the solved ones apart and the
    others by rule, and those of equal scores by environment, of which it filtered all or some, without solved ones.
    """

    groups: int
    rejected: float
    solved: float
    filtered: Mapping[FilterRule, float]
    flat: Mapping[str, float]

    @classmethod
    def of(cls, batch: "Batch", passes: Passes) -> "Counts":
        """Count the groups of a report, each filtered one once: a trainer tells its own rules, so they come first.

        The equal scores come from the sums of the report, which have every group of it: the rest of them.
        """
        old = hidden = 0.0
        if isinstance(batch, BatchSettled | RecordedBatch):
            groups, rejected = batch.trained + batch.filtered + batch.rejected, float(batch.rejected)
        elif isinstance(batch, StepDone | RecordedStep):
            groups, rejected = batch.groups, batch.extra.get("rejected", 0.0)
            old, hidden = (batch.extra.get(name, 0.0) for name in ("too_old", "negligible"))
        else:
            groups, rejected = batch.groups, float(batch.rejected)
            old = float(batch.filtered) if TOO_OLD in batch.reason else 0.0
        solved = {
            one.env: health.solved_groups(one, passes=passes(one.env, one.high)) for one in batch.scores
        }
        flat = {one.env: one.flat - solved[one.env] for one in batch.scores}
        counts, rest = [], float(batch.filtered)
        for told in (old, hidden, sum(solved.values()), sum(flat.values())):
            counts.append(min(max(told, 0.0), rest))
            rest -= counts[-1]
        old, hidden, learned, equal = counts
        rules = dict(zip(FilterRule, (equal, old, hidden, rest), strict=True))
        return cls(groups, rejected, learned, rules, flat)


class Place(NamedTuple):
    """Policy version after a batch, and whether the batch was a step."""

    incarnation: int
    step: int
    stepped: bool

    def lost_before(self, later: Self) -> bool:
        """Return whether a resumed trainer has lost this batch, if `later` comes next.

        As at the broker, a batch without a step is covered only by a step after it; else it may be delivered again.
        """
        base = later.step - later.stepped
        uncovered = not self.stepped and self.incarnation != later.incarnation
        return self.step > base or (self.step == base and uncovered)


class Windows(Generic[T]):
    """What was taken from the latest batches, for two windows."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._held: deque[tuple[Place, T]] = deque(maxlen=2 * window)

    def take(self, place: Place, one: T) -> None:
        """Add what was taken from a batch."""
        self._held.append((place, one))

    def at(self, incarnation: int, step: int) -> T | None:
        """Return what was taken last, if it is of this step."""
        if self._held and self._held[-1][0][:2] == (incarnation, step):
            return self._held[-1][1]
        return None

    def rewind(self, place: Place) -> None:
        """Drop the batches that the trainer has lost, as the place of its next one shows."""
        while self._held and self._held[-1][0].lost_before(place):
            self._held.pop()

    def now(self) -> list[T]:
        """Return the last window; empty before it is full."""
        return self._before(0)

    def before(self) -> list[T]:
        """Return the window before the last; empty before it is full."""
        return self._before(self._window)

    def _before(self, newer: int) -> list[T]:
        end = len(self._held) - newer
        return [one for _, one in list(self._held)[end - self._window : end]] if end >= self._window else []


class HealthMonitor:
    """State of the checks of one run.

    Args:
        config: Window and limits.
        passes: Whether a score is that of an answer that passes; by default none is known to pass.
    """

    def __init__(self, config: HealthConfig, passes: Passes = lambda *_: False) -> None:
        self._config = config
        self._passes = passes
        self._trainer_tells = False
        """A trainer has reported a batch by itself."""
        self._logged: OrderedDict[tuple[int, int], dict[str, float]] = OrderedDict()
        """Logged figures of batches that the broker has not reported yet, by policy version."""
        self._begin()
        self._seen: dict[str, int] = {}
        """Number of the latest batch of each environment."""
        self._batches = 0
        """Batches taken, those of lost steps included."""
        self._active: dict[tuple[str, str], int] = {}
        """Environment and name of each lasting finding, with the checks since it was told."""

    def _begin(self) -> None:
        """Begin with empty windows."""
        self._figures: Windows[dict[str, float]] = Windows(self._config.window_steps)
        self._counts: Windows[Counts] = Windows(self._config.window_steps)
        self._lanes: dict[str, Windows[LaneScores]] = {}

    def take_figures(self, event: StepFigures | RecordedFigures) -> None:
        """Take the figures that a trainer logged for a step, before or after the broker's report of it."""
        known = self._figures.at(event.incarnation, event.step)
        if known is not None and not self._trainer_tells:
            known |= event.figures
            return
        self._logged.setdefault((event.incarnation, event.step), {}).update(event.figures)
        while len(self._logged) > LOGGED_KEPT:
            self._logged.popitem(last=False)

    def feed(self, batch: Batch, now: float) -> list[HealthFinding]:
        """Take a batch, and return what began, lasts or ended with it."""
        if isinstance(batch, BatchSettled | RecordedBatch):
            if self._trainer_tells:
                return []
            stepped = batch.stepped
        else:
            stepped = isinstance(batch, StepDone | RecordedStep)
            if not self._trainer_tells:
                self._trainer_tells = True
                self._begin()  # the broker has reported the same batches
        place = Place(batch.incarnation, batch.step, stepped)
        self._figures.rewind(place)
        self._counts.rewind(place)
        for lane in self._lanes.values():
            lane.rewind(place)
        self._take(place, batch)
        self._forget()
        found = {(env, name): symptom for env, name, symptom in self._checked(batch.scores)}
        return [*self._told(found, now), *self._ended({one.env for one in batch.scores}, found, now)]

    def replay(self, lines: Iterable[bytes]) -> None:
        """Take the batches of a record, `metrics.jsonl`, without telling anything: they were told before.

        Lines that are no batches or do not decode are passed over.
        """
        for line in lines:
            if b'"kind":"step_' in line or b'"kind":"batch_settled"' in line:
                try:
                    self._replay(msgspec.json.decode(line, type=Recorded))
                except (msgspec.MsgspecError, ArithmeticError, UnicodeDecodeError, RecursionError):
                    continue

    def _replay(self, line: "Recorded") -> None:
        if isinstance(line, RecordedFigures):
            self.take_figures(line)
        else:
            self.feed(line, 0.0)

    def _take(self, place: Place, batch: Batch) -> None:
        if isinstance(batch, StepDone | RecordedStep):
            self._figures.take(place, {**batch.extra, "staleness_max": float(batch.staleness_max)})
        elif isinstance(batch, BatchSettled | RecordedBatch) and batch.stepped:
            logged = self._logged.pop((batch.incarnation, batch.step), {})
            self._figures.take(place, {**logged, "staleness_max": float(batch.staleness_max)})
        self._counts.take(place, Counts.of(batch, self._passes))
        self._batches += 1
        for one in batch.scores:
            self._lanes.setdefault(one.env, Windows(self._config.window_steps)).take(place, one)
            self._seen[one.env] = self._batches

    def _forget(self) -> None:
        oldest = self._batches - FORGOTTEN_WINDOWS * self._config.window_steps
        for env in [env for env, batch in self._seen.items() if batch < oldest]:
            del self._lanes[env], self._seen[env]

    def _told(self, found: dict[tuple[str, str], Symptom], now: float) -> Iterator[HealthFinding]:
        for (env, name), symptom in found.items():
            age = self._active.get((env, name), self._config.window_steps - 1) + 1
            if age >= self._config.window_steps:
                yield _finding(env, name, now, symptom)
                age = 0
            self._active[env, name] = age

    def _ended(
        self, envs: set[str], found: dict[tuple[str, str], Symptom], now: float
    ) -> Iterator[HealthFinding]:
        """End the findings that no longer hold, of the environments in the batch and of forgotten ones."""
        for key in [key for key in self._active if key not in found]:
            if key[0] in envs or key[0] not in self._lanes:
                del self._active[key]
                yield _finding(*key, now, None)

    def _checked(self, scores: Iterable[LaneScores]) -> Iterator[tuple[str, str, Symptom]]:
        envs = sorted({one.env for one in scores})
        lasting = {(env, name) for env, name in self._active if env not in envs}
        for env in envs:
            for name, symptom in self._of_lane(env, self._lanes[env]):
                if symptom is not None:
                    lasting.add((env, name))
                    yield env, name, symptom
        for name, symptom in self._of_trainer(lasting):
            if symptom is not None:
                yield TRAINER, name, symptom

    def _of_lane(self, env: str, lane: Windows[LaneScores]) -> Iterator[tuple[str, Symptom | None]]:
        config, now, before = self._config, _merged(lane.now()), _merged(lane.before())
        if now is None:
            return
        limit, passes = partial(self._limit, env), self._passes(env, now.high)
        done = health.solved(now, limit("solved", config.saturated), passes=passes)
        yield "solved", done
        if done is None:
            learned = health.solved_groups(now, passes=passes)
            equal, lasting = health.collapse(now, limit("collapse", config.flat), learned), self._lasts(env)
            yield "collapse", equal
            if equal is None or lasting:
                yield (
                    "saturation",
                    health.saturation(now, limit("saturation", config.saturated), lasting=lasting),
                )
        yield "length_bias", health.length_bias(now, limit("length_bias", config.length_correlation))
        if before is not None:
            yield "explosion", health.explosion(now, before, config.growth)
            yield "drift", health.drift(now, before, config.drop)

    def _lasts(self, env: str) -> bool:
        """Return whether scores that are all equal now were saturated before: that finding does not begin and end."""
        return (env, "saturation") in self._active

    def _of_trainer(self, lasting: Set[tuple[str, str]]) -> Iterator[tuple[str, Symptom | None]]:
        """Check the figures of the trainer, beside the findings of the environments."""
        config, steps, counts = self._config, self._figures.now(), self._counts.now()
        limit = partial(self._limit, TRAINER)
        yield "clipping", health.clipping(steps, limit("clipping", config.clipped))
        yield "precision", health.precision(steps, limit("precision", config.fresh_kl))
        groups, rejected = sum(one.groups for one in counts), sum(one.rejected for one in counts)
        yield "rejection", health.rejection(groups, rejected, limit("rejection", config.rejected))
        filtered, solved = _filtered(counts, lasting)
        yield "filtering", health.filtering(groups, filtered, limit("filtering", config.filtered), solved)

    def _limit(self, env: str, name: str, configured: float) -> float:
        """Return the limit in force: a lasting finding ends only clearly below the configured one."""
        return configured * RELEASE if (env, name) in self._active else configured


def _filtered(
    counts: Sequence[Counts], lasting: Set[tuple[str, str]]
) -> tuple[dict[FilterRule, float], float]:
    """Return the filtered groups of a window by rule, and the solved ones; equal scores that a finding names are in it.

    In an environment with the finding `solved`, all groups of equal scores are solved.
    """
    filtered = {rule: sum(one.filtered[rule] for one in counts) for rule in FilterRule}
    equal, solved = filtered[FilterRule.FLAT], sum(one.solved for one in counts)
    flat = {name: sum(_flat_in(one, name, lasting) for one in counts) for name in ("solved", "collapse")}
    if not (total := sum(sum(one.flat.values()) for one in counts)):
        return filtered, solved
    learned = equal * flat["solved"] / total
    filtered[FilterRule.FLAT] -= learned
    if max(filtered.values()) == filtered[FilterRule.FLAT]:
        filtered[FilterRule.FLAT] -= equal * flat["collapse"] / total
    return filtered, solved + learned


def _flat_in(counts: Counts, finding: str, lasting: Set[tuple[str, str]]) -> float:
    """Return the groups of equal scores in the environments with a finding."""
    return sum(equal for env, equal in counts.flat.items() if (env, finding) in lasting)


def _merged(lanes: list[LaneScores]) -> LaneScores | None:
    return reduce(LaneScores.merged, lanes) if lanes else None


def _finding(env: str, name: str, now: float, symptom: Symptom | None) -> HealthFinding:
    return HealthFinding(
        env=env,
        at=now,
        finding=name,
        problem=symptom.problem if symptom else "",
        remedy=symptom.remedy if symptom else "",
        numbers=symptom.numbers if symptom else {},
        source="telemetry",
        ended=symptom is None,
    )
