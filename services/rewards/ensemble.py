"""An ensemble of raters: from answers to scores, with the agreement of the raters watched and acted on.

    class Sorted(SingleTurn[str]):
        rewards = Ensemble({"order": in_order, "digits": same_digits, "length": "exact"}, combine="median")

Each answer is rated by all raters at once. The ratings join the window of the latest ones, which all workers of the
environment on a host share in a run; the window gives the scale of each rater and the agreement of all. Then the
ratings are combined:

    rate -> enough ratings? -> window -> agreement, acts -> common scale -> weights in force -> combine

An ensemble needs no run: in any program it keeps its window in memory, `asyncio.run(ensemble.rate(task, answers))`. For
one event loop at a time.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rolloutmq.bus.log_throttle import LogThrottle, WaitLog
from rolloutmq.schemas.config.base import location_of, problem_of
from rolloutmq.schemas.config.rewards import RaterConfig, RewardsConfig
from rolloutmq.schemas.errors import ConfigError, RatersMissingError, UnusablePathError, UsageError
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.rewards.acting import LOW, Judgement, judge, low_problem, numbers_of, weights_in_force
from rolloutmq.services.rewards.agreement import Alpha
from rolloutmq.services.rewards.calls import RaterCalls, RaterCost
from rolloutmq.services.rewards.combine import combined, scaled
from rolloutmq.services.rewards.raters import EVALUATING, Rater
from rolloutmq.services.rewards.ratings import Ratings
from rolloutmq.services.rewards.registry import check_function, make_rater
from rolloutmq.services.rewards.window import MemoryWindow, SharedWindow, Window, WindowState

logger = logging.getLogger(__name__)

SILENT_RATINGS: Final = 64
"""Missing ratings after which a rater that never gave one is told."""
PER_GROUP: Final = frozenset({"held", "raters_missing"})
"""Findings that each group may bring anew, so that their log is throttled."""
REPEAT_S: Final = 60.0
"""Time after which a lasting mark is told again, in seconds."""
BUSY_S: Final = 0.002
"""Pause before the shared window is tried again, in seconds."""
HOLD_PAUSE_S: Final = 0.5
"""First pause before missing raters are asked again, in seconds; doubles up to `HOLD_PAUSE_MAX_S`."""
HOLD_PAUSE_MAX_S: Final = 10.0

Floats = NDArray[np.float64]
OnFinding = Callable[[HealthFinding], None]
NOTHING: Final = Alpha(float("nan"), 0, 0, "no answer was rated")


class EnsembleSettings(TypedDict, total=False):
    """Keys of `[environment.NAME.rewards]`, as keyword arguments; see `RewardsConfig`."""

    combine: Literal["mean", "median", "trimmed_mean", "minimum", "majority"]
    trim: float
    pass_at: float
    scale: Literal["none", "rank", "zscore"]
    window: int
    min_raters: int
    missing: Literal["hold", "resubmit", "filter"]
    hold_s: float
    agreement: Mapping[str, Any]


class Ensemble:
    """Raters with weights.

    Attributes:
        config: The validated settings.
        names: Names of the raters, in the order of the columns of their ratings.
        judgement: Agreement after the last rated answers.
    """

    def __init__(
        self,
        raters: Mapping[str, Rater | str | Mapping[str, Any]],
        *,
        name: str = "rewards",
        weights: Mapping[str, float] | None = None,
        on_finding: OnFinding | None = None,
        **settings: Unpack[EnsembleSettings],
    ) -> None:
        """Make an ensemble.

        Args:
            raters: By name: a function `(task, answer)`, the name of a registered rater, or a mapping with the keys of
                `RaterConfig`, whose `rater` may be a function too.
            name: Name in findings and errors.
            weights: Weights by name, 1 by default.
            on_finding: Called with each finding, such as a low agreement; by default they are logged.
            settings: Keys of `RewardsConfig`.

        Raises:
            ConfigError: A setting is invalid, a rater unknown, or the weights add up to 0.
        """
        if not raters:
            raise ConfigError(f"{name}.raters", "must name at least one rater (got none)")
        given_by_name = {key: _rater_of(given) for key, given in raters.items()}
        functions = {key: cast(Rater, one) for key, one in given_by_name.items() if callable(one)}
        sections = {key: _section(key, given, weights or {}) for key, given in raters.items()}
        if stranger := sorted({*(weights or {})} - {*raters}):
            raise ConfigError(
                f"{name}.weights.{stranger[0]}", f"no rater has this name; raters: {', '.join(raters)}"
            )
        self._build(name, _validated(name, {"raters": sections, **settings}), functions)
        self._on_finding = on_finding or FindingLog().tell

    @classmethod
    def of(cls, name: str, config: RewardsConfig, functions: Mapping[str, Rater]) -> "Ensemble":
        """Make the ensemble of a section; `functions` are the raters that the registry does not know, by name.

        Raises ConfigError if a rater cannot be made.
        """
        made = cls.__new__(cls)
        made._build(name, config, functions)
        made._on_finding = FindingLog().tell
        return made

    def _build(self, name: str, config: RewardsConfig, functions: Mapping[str, Rater]) -> None:
        self.name = name
        self.config = config
        self.names = tuple(config.raters)
        self._calls = {
            key: RaterCalls(_made(f"{name}.raters.{key}", section, functions.get(key)), section)
            for key, section in config.raters.items()
        }
        self._weights = np.array([section.weight for section in config.raters.values()])
        self._window: Window
        self.judgement: Judgement
        self._env = "ensemble"
        self._source = ""
        self.forget()

    def join_run(self, env: str, source: str, window: Path, on_finding: OnFinding) -> None:
        """Share the window with the other workers of an environment, in a file of a private directory that exists.

        Args:
            env: Environment in findings.
            source: This process in findings.
            window: The file.
            on_finding: Called with each finding in place of the earlier receiver.
        """
        self._env, self._source, self._on_finding = env, source, on_finding
        self._window = SharedWindow(window, self.names, self.config.window)

    def forget(self, env: str = "") -> None:
        """Begin with an empty window in memory; findings name `env` from now on, if it is given."""
        self._env = env or self._env
        self._window = MemoryWindow(len(self.names), self.config.window)
        self.judgement = Judgement(NOTHING)
        self._told_at: dict[int, float] = {}
        self._silent: set[str] = set()

    def costs(self) -> dict[str, RaterCost]:
        """Return the counters of each rater since the start, by name."""
        return {name: calls.cost for name, calls in self._calls.items()}

    def faults(self) -> dict[str, BaseException]:
        """Return why the last rating of each rater is missing, by name: what it raised, or a RaterFaultError.

        Raters that gave a rating or had no opinion are left out.
        """
        return {name: calls.fault for name, calls in self._calls.items() if calls.fault is not None}

    async def score(self, task: Any, answer: Any) -> float:
        """Return the score of one answer. Its ratings do not travel: where they should, use `rate`.

        Raises:
            RatersMissingError: Too few raters gave a rating.
            UsageError: The settings may withhold an answer, which a mere score cannot say.
        """
        if self._may_withhold:
            raise UsageError(f"{self.name}: `score` cannot withhold an answer; use `rate`, or other settings")
        return (await self.rate(task, [answer])).scores[0]

    async def rate(self, task: Any, answers: Sequence[Any]) -> Ratings:
        """Rate the answers to one task, all raters and answers at once. Waits for the slowest rating.

        In a rollout of an evaluation the ratings get scale and weights from the window, and do not enter it.

        Args:
            task: Passed to the raters.
            answers: `n` answers; a group of a `SingleTurn` passes its completions.

        Raises:
            RatersMissingError: An answer has too few ratings, and the settings do not say to filter it; or all answers
                of the group have too few.
            RecordVersionError, UnusablePathError: The shared window cannot be used.
        """
        table = np.full((len(answers), len(self.names)), np.nan)
        await self._fill(table, task, answers, np.isnan(table))
        if self.config.missing == "hold":
            await self._hold(table, task, answers)
        self._require(table, self._short(table))
        state = await (self._beside(table) if EVALUATING.get() else self._appended(table))
        weights = weights_in_force(self._weights, state.outliers, self.config.agreement.outlier_weight)
        scores = combined(
            scaled(table, state.ratings, self.config.scale),
            weights,
            self.config.combine,
            trim=self.config.trim,
            pass_at=self.config.pass_at,
        )
        return self._ratings(table, scores, weights)

    @property
    def _may_withhold(self) -> bool:
        return self.config.missing == "filter" or self.config.agreement.act == "hold"

    async def _fill(
        self, table: Floats, task: Any, answers: Sequence[Any], wanted: NDArray[np.bool_]
    ) -> None:
        """Ask for the wanted ratings of the table `[answers][raters]`, and put them in."""
        places = np.argwhere(wanted).tolist()
        calls = list(self._calls.values())
        asked = [calls[rater].rate(task, answers[row]) for row, rater in places]
        for (row, rater), value in zip(places, await asyncio.gather(*asked), strict=True):
            table[row, rater] = value
        self._tell_silent()

    def _tell_silent(self) -> None:
        """Tell once of each rater that has never given a rating: the others hide that it is missing."""
        for name, cost in self.costs().items():
            if cost.rated or cost.missing < SILENT_RATINGS or name in self._silent:
                continue
            self._silent.add(name)
            why = cost.error or "it has no opinion of any answer (None)"
            problem = f"rater {name} rated none of its first {cost.missing} answers: {why}"
            remedy = f"repair {name} or remove it; only other raters make the score"
            self._tell("rater_silent", problem, remedy, {"missing": float(cost.missing)})

    async def _hold(self, table: Floats, task: Any, answers: Sequence[Any]) -> None:
        """Ask missing raters again for as long as an answer lacks ratings, up to `hold_s`."""
        began = time.monotonic()
        pause_s, told = HOLD_PAUSE_S, False
        while (short := self._short(table)).any():
            left_s = began + self.config.hold_s - time.monotonic()
            if left_s <= 0:
                break
            if not told:
                told = True
                self._tell("raters_missing", str(self._error(table)), "the group waits; repair the raters")
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, HOLD_PAUSE_MAX_S)
            await self._fill(table, task, answers, np.isnan(table) & short[:, None])
        if told and not short.any():
            self._tell("raters_missing", "", numbers={"held_s": time.monotonic() - began}, ended=True)

    def _counts(self, table: Floats, weights: Floats | None = None) -> NDArray[np.int64]:
        """Return the ratings of raters with weight, for each answer."""
        counts = (self._weights if weights is None else weights) > 0
        found: NDArray[np.int64] = (~np.isnan(table[:, counts])).sum(axis=1)
        return found

    def _short(self, table: Floats) -> NDArray[np.bool_]:
        return self._counts(table) < self.config.min_raters

    def _require(self, table: Floats, short: NDArray[np.bool_]) -> None:
        """Require enough ratings of each answer; with `filter`, of one. Raises RatersMissingError."""
        if not short.any():
            return
        error = self._error(table)
        if self._filters(short):
            remedy = "these answers are not trained on; repair the raters"
            self._tell("raters_missing", str(error), remedy, {"answers": float(short.sum())})
            return
        remedy = "the rollout fails, and a submitted task goes back to the queue; repair the raters"
        self._tell("raters_missing", str(error), remedy, {"answers": float(short.sum())})
        raise error from self._cause()

    def _filters(self, unrated: NDArray[np.bool_]) -> bool:
        """Return whether unrated answers are sent with the reason.

        Not in an evaluation, where a score of them would count; nor if all of several answers are unrated. One answer
        alone is a member of a group.
        """
        if self.config.missing != "filter" or EVALUATING.get():
            return False
        return len(unrated) == 1 or not unrated.all()

    def _error(self, table: Floats, weights: Floats | None = None) -> RatersMissingError:
        failed = [f"{name}: {one.cost.error}" for name, one in self._calls.items() if one.cost.error]
        if weights is not None:
            failed.append("only outliers rated an answer")
        fewest = int(self._counts(table, weights).min(initial=self.config.min_raters))
        return RatersMissingError(self.name, fewest, self.config.min_raters, "; ".join(failed))

    def _cause(self) -> BaseException | None:
        """Return what the raters raised, with their frames; None if all had no opinion."""
        faults = [*self.faults().values()]
        return BaseExceptionGroup("raters failed", faults) if faults else None

    async def _appended(self, table: Floats) -> WindowState:
        """Append the ratings to the window, judge the agreement, and tell what changed."""
        judgements: list[Judgement] = []

        def decide(window: Floats, marks: int) -> int:
            judgements.append(judge(scaled(window, window, self.config.scale), marks, self.config.agreement))
            return judgements[-1].marks

        state = await self._state_after(table, decide)
        self.judgement = replace(judgements[-1], before=judgements[0].before)
        self._tell_changes(self.judgement)
        return state

    def _tell_restart(self, state: WindowState) -> None:
        if state.restarted:
            remedy = (
                "scales and agreement begin anew; the damaged file was kept"
                if "checksum" in state.restarted
                else ""
            )
            self._tell("window_restarted", f"the rating window began anew: {state.restarted}", remedy)

    async def _beside(self, table: Floats) -> WindowState:
        """Return the state as if the ratings were in the window, without them there."""
        state = await self._state_after(table[:0], lambda _window, marks: marks)
        return state._replace(ratings=np.concatenate([state.ratings, table]))

    async def _state_after(self, table: Floats, decide: Callable[[Floats, int], int]) -> WindowState:
        """Append to the window once its lock is free."""
        log = WaitLog()
        while (state := self._append(table, decide)) is None:
            if log.is_due("window", now := time.monotonic()):
                logger.warning("waiting for the lock of the rating window waited_s=%.0f", log.waited_s(now))
            await asyncio.sleep(BUSY_S)
        self._tell_restart(state)
        return state

    def _append(self, table: Floats, decide: Callable[[Floats, int], int]) -> WindowState | None:
        try:
            return self._window.append(table, decide)
        except OSError as error:
            raise UnusablePathError(
                f"rating window {error.filename or ''}", error.strerror or str(error)
            ) from error

    def _tell_changes(self, judgement: Judgement) -> None:
        """Tell each mark that changed, and every `REPEAT_S` those that last."""
        settings = self.config.agreement
        numbers = numbers_of(judgement, self.names, settings)
        if self._is_news(judgement, LOW):
            problem = f"the raters disagree: {low_problem(judgement, settings)}"
            remedy = "look at the ratings (`rolloutmq ratings`), and repair or remove the rater who is wrong"
            self._tell("low_agreement", problem, remedy, numbers, ended=not judgement.is_low)
        for rater, name in enumerate(self.names):
            if self._is_news(judgement, 1 << rater):
                weight = {"weight": float(self._weights[rater] * settings.outlier_weight)}
                problem = f"without {name} the others agree; its weight is multiplied by {settings.outlier_weight:g}"
                ended = not judgement.marks >> rater & 1
                self._tell("down_weight", problem, f"repair or remove {name}", numbers | weight, ended=ended)

    def _is_news(self, judgement: Judgement, bit: int) -> bool:
        """Return whether to tell a mark now: it changed, or it lasts and this process told it long ago or never.

        Another process that changed the mark may have been killed before it told so.
        """
        now = time.monotonic()
        told_at = self._told_at.setdefault(bit, now)
        if not judgement.changes(bit) and not (judgement.marks & bit and now - told_at >= REPEAT_S):
            return False
        self._told_at[bit] = now
        return True

    def _ratings(self, table: Floats, scores: Floats, weights: Floats) -> Ratings:
        unrated = self._short(table) | np.isnan(scores)
        if unrated.any() and not self._filters(unrated):
            raise self._error(table, weights) from self._cause()
        rated = scores[~unrated]
        scores = np.where(unrated, (rated / max(1, len(rated))).sum(), scores)
        held = self._held()
        few = f"fewer than {self.config.min_raters} raters gave a rating"
        return Ratings(
            names=self.names,
            ratings=table,
            scores=tuple(scores.tolist()),
            weights=tuple(weights.tolist()),
            reasons=tuple(few if one else held for one in unrated),
            alpha=self.judgement.alpha,
            may_withhold=self._may_withhold,
        )

    def _held(self) -> str:
        """Return why the group is withheld because of a low agreement, and tell it; empty if it is not."""
        settings = self.config.agreement
        if settings.act != "hold" or not self.judgement.is_low or EVALUATING.get():
            return ""
        problem = low_problem(self.judgement, settings)
        numbers = numbers_of(self.judgement, self.names, settings)
        self._tell("held", f"a group is not trained on: {problem}", "repair the raters", numbers)
        return problem

    def _tell(
        self,
        kind: str,
        problem: str,
        remedy: str = "",
        numbers: Mapping[str, float] | None = None,
        *,
        ended: bool = False,
    ) -> None:
        finding = HealthFinding(
            env=self._env,
            at=time.time(),
            finding=kind,
            problem="" if ended else problem,
            remedy="" if ended else remedy,
            numbers=dict(numbers or {}),
            source=self._source,
            ended=ended,
        )
        self._on_finding(finding)


class FindingLog:
    """Logs findings as warnings; `solved`, and the end of any, is no problem.

    What each group may bring is logged every 30 s.
    """

    def __init__(self) -> None:
        self._throttles: defaultdict[tuple[str, str], LogThrottle] = defaultdict(LogThrottle)
        self._unlogged: Counter[tuple[str, str]] = Counter()

    def tell(self, finding: HealthFinding) -> None:
        """Log a finding, unless it is one of many."""
        if finding.ended:
            logger.info("reward finding has ended env=%s finding=%s", finding.env, finding.finding)
            return
        kind = finding.env, finding.finding
        if finding.finding in PER_GROUP and not self._throttles[kind].is_due("any", time.monotonic()):
            self._unlogged[kind] += 1
            return
        level = logging.INFO if finding.finding == "solved" else logging.WARNING
        logger.log(
            level,
            "reward finding env=%s finding=%s unlogged=%d problem=%s; %s numbers=%s",
            *(*kind, self._unlogged.pop(kind, 0)),
            *(finding.problem, finding.remedy, finding.numbers),
        )


def _rater_of(given: Any) -> Any:
    return given.get("rater") if isinstance(given, Mapping) else given


def _section(key: str, given: Any, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the keys of a rater's section; a function is named there."""
    rater = _rater_of(given)
    if rater is None:
        rater = ""
    named = rater if isinstance(rater, str) else getattr(rater, "__qualname__", type(rater).__name__)
    keys = {**given, "rater": named} if isinstance(given, Mapping) else {"rater": named}
    return {**keys, "weight": weights[key]} if key in weights else keys


def _validated(name: str, tree: Mapping[str, Any]) -> RewardsConfig:
    try:
        return RewardsConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path, problem = ".".join([name, *location_of(first)]), problem_of(first)
        if first["type"] == "extra_forbidden":
            problem = "unknown key"
        elif first["type"] == "value_error":  # its text begins with the key
            key, _, problem = problem.partition(" ")
            path = f"{path}.{key}"
        raise ConfigError(path, problem) from None


def _made(key: str, section: RaterConfig, function: Rater | None) -> Rater:
    if function is None:
        return make_rater(key, section.rater, section.options)
    check_function(key, function, section.options)
    return partial(function, **section.options) if section.options else function
