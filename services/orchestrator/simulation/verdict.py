"""Verdict on the trials of one controller in one scenario: its figures beside the reference fleet's, and its bounds.

The bounds hold for the median of the seeds, and 1.5 times of them for the worst. Pure.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from rolloutmq.services.orchestrator.simulation.site import Scenario
from rolloutmq.services.orchestrator.simulation.trial import Outcome

WORST: Final = 1.5
"""Factor on a bound for the worst seed."""
STARVED, STARTS, LEAST_S = 1.5, 1.25, 10.0
"""Starvation allowed: this factor of the reference's, and so many starts, at least so many seconds."""
WASTE, LARGE_WASTE, HALF = 0.25, 0.5, 0.5
"""Waste allowed beyond the reference's, as a part of the need; where the reference wastes more than `LARGE_WASTE`, half
of its waste and `LARGE_WASTE`."""
FLIPS_PER_HOUR: Final = 6.0
TURNS, SPARE_TURNS = 2.0, 4.0
"""Flips allowed: this factor of the turns of the path with the fewest moves, and so many more."""
NEAR: Final = 0.1
"""Distance of that path from the need, relative to it; at least one worker."""
CRASHING, CRASHING_PART = 1.3, 0.01
"""Starvation allowed with crashes: this factor of that without them, and a part of the time."""
SATURATED, TWICE, THROUGHPUT = 1.25, 2.0, 0.97
"""Workers of a shared server after the search, and at any time, relative to those for its capacity; throughput then."""
SETTLES, SETTLES_S = 3.0, 30.0
"""Settling time allowed: so many starts with their confirmation, and so many seconds."""
NOTHING: Final = 1e-9
"""Difference by which rounding exceeds a bound."""
CONFIRM_S: Final = 2.0
WINDOW_S: Final = 60.0
"""Window of a step down, or one start if that is longer."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure over the seeds.

    Attributes:
        median, worst: Over the seeds.
        ratio: The median relative to that of the reference fleet; None where that is 0.
    """

    median: float
    worst: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound, and its figure over the seeds.

    Attributes:
        name: Its name, as in the guide.
        median, worst: The figure; where the bound is a least one, the worst is the smallest.
        limit, worst_limit: Bounds of both.
        unit: `s`, or `x` for a ratio; empty for a number.
        is_least: The figure must not be smaller; otherwise, not larger.
    """

    name: str
    median: float
    worst: float
    limit: float
    worst_limit: float
    unit: str = ""
    is_least: bool = False

    @property
    def is_kept(self) -> bool:
        """Return whether the figure keeps its bound."""
        if self.is_least:
            return self.median >= self.limit - NOTHING and self.worst >= self.worst_limit - NOTHING
        return self.median <= self.limit + NOTHING and self.worst <= self.worst_limit + NOTHING


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures of one controller for one environment of a scenario; times in seconds.

    Attributes:
        peak_need: Largest need.
        starved_s: Time in which the trainer waited.
        waste: Worker-seconds above the need, as a part of the worker-seconds needed (0.25 is 25 %).
        moves: Workers started and removed.
        least_moves, turns: Moves and changes of direction of the path with the fewest moves near the need.
        flips: Changes of direction.
        settle_s: Settling time after each lasting change of the need.
        peak: Most workers.
        blocked_s: Time in which workers waited, summed over them.
        throughput_per_s: Sequences made per second.
        engines: Most engines of its server; None without one.
        bounds: All bounds that hold for it, with their figures.
        broken: Names of those that are exceeded.
    """

    scenario: str
    env: str
    start_s: float
    law: str
    seeds: int
    peak_need: float
    starved_s: Figure
    waste: Figure
    moves: Figure
    least_moves: int
    turns: int
    flips: Figure
    settle_s: tuple[Figure, ...]
    peak: Figure
    blocked_s: Figure
    throughput_per_s: Figure
    engines: Figure | None
    bounds: tuple[Bound, ...]
    broken: tuple[str, ...]


Outcomes = Sequence[Mapping[str, Outcome]]
"""Outcomes by environment, one for each seed."""


@dataclass(frozen=True, slots=True)
class _Trials:
    """The outcomes of one environment: of a controller, of the reference fleet, and without crashes."""

    scenario: Scenario
    env: str
    own: Sequence[Outcome]
    reference: Sequence[Outcome]
    uncrashed: Sequence[Outcome]

    def over(self, of: Callable[[Outcome], float], worst: Callable[[Sequence[float]], float] = max) -> Figure:
        found = [of(one) for one in self.own]
        middle, referred = float(median(found)), self.referred(of)
        return Figure(middle, float(worst(found)), middle / referred if referred else None)

    def most(self, name: str, of: Callable[[Outcome], float], limit: float, unit: str = "") -> Bound:
        """Return an upper bound of a figure, and 1.5 times of it for the worst seed."""
        figure = self.over(of)
        return Bound(name, figure.median, figure.worst, limit, WORST * limit, unit)

    def referred(self, of: Callable[[Outcome], float]) -> float:
        return float(median(of(one) for one in self.reference))


def judged(
    scenario: Scenario, law: str, outcomes: Outcomes, reference: Outcomes, uncrashed: Outcomes | None = None
) -> list[Verdict]:
    """Summarize the trials of one controller; one verdict for each environment.

    Args:
        scenario: The scenario.
        law: Name of the controller.
        outcomes: Its outcomes, one for each seed.
        reference: Those of the reference fleet.
        uncrashed: Those of the controller with workers that never crash; required if the scenario has crashes.

    Raises:
        ValueError: The scenario has crashes, and `uncrashed` is missing.
    """
    if scenario.has_crashes and uncrashed is None:
        raise ValueError(f"{scenario.name}: uncrashed is required, since the scenario has crashes")
    return [
        _judged(
            law,
            _Trials(
                scenario,
                env,
                [one[env] for one in outcomes],
                [one[env] for one in reference],
                [one[env] for one in uncrashed or outcomes],
            ),
        )
        for env in scenario.site.environments
    ]


def _judged(law: str, trials: _Trials) -> Verdict:
    scenario, own = trials.scenario, trials.own
    site = scenario.site.environments[trials.env]
    turns, least = _fewest_moves(scenario, trials.env, [moment.need for moment in own[0].moments])
    verdict = Verdict(
        scenario=scenario.name,
        env=trials.env,
        start_s=site.start_s,
        law=law,
        seeds=len(own),
        peak_need=max(one.peak_need for one in own),
        starved_s=trials.over(lambda one: one.starved_s),
        waste=trials.over(_waste),
        moves=trials.over(lambda one: one.moves),
        least_moves=least,
        turns=turns,
        flips=trials.over(lambda one: one.flips),
        settle_s=tuple(trials.over(_settled(change)) for change in range(len(scenario.changes))),
        peak=trials.over(lambda one: one.peak),
        blocked_s=trials.over(lambda one: one.blocked_s),
        throughput_per_s=trials.over(lambda one: one.made / (scenario.lasts_s - scenario.counts_from_s), min),
        engines=trials.over(lambda one: one.engines) if site.server else None,
        bounds=(),
        broken=(),
    )
    bounds = (*_always(trials, turns), *(_at_capacity(trials) if site.server else _settles(trials)))
    return replace(verdict, bounds=bounds, broken=tuple(one.name for one in bounds if not one.is_kept))


def _always(trials: _Trials, turns: int) -> Iterator[Bound]:
    """Yield the bounds of every environment."""
    yield trials.most("bounds", lambda one: one.outside, 0.0)
    yield trials.most("down in the dark", lambda one: one.downs_in_the_dark, 0.0)
    yield trials.most("flips", lambda one: one.flips, _flips(trials.scenario, turns))
    yield trials.most("waste", _waste, _wasted(trials.referred(_waste)), "x")
    if not trials.scenario.is_fresh:
        yield trials.most("starved", lambda one: one.starved_s, _starves_s(trials), "s")


def _settles(trials: _Trials) -> Sequence[Bound]:
    """Return the bound of the settling time of the change that comes nearest to it, or exceeds it most."""
    scenario = trials.scenario
    if scenario.has_crashes or not scenario.changes:
        return ()
    bounds = [
        trials.most("settle", _settled(change), _settles_s(scenario, change, trials.env), "s")
        for change in range(len(scenario.changes))
    ]
    return (max(bounds, key=lambda one: max(one.median / one.limit, one.worst / one.worst_limit)),)


def _at_capacity(trials: _Trials) -> Iterator[Bound]:
    """Check the search for the capacity of a shared server, which begins at the first change or at the start.

    In a pause of the trainer the capacity is not to be seen: workers stay for their window.
    """
    scenario, own = trials.scenario, trials.own
    since = scenario.counts_from_s + scenario.found_by_s
    until = scenario.changes[1] if len(scenario.changes) > 1 else scenario.lasts_s
    site, server = scenario.site, scenario.site.environments[trials.env].server
    needed = max(site.engines(server, moment.at) for moment in own[0].moments)
    peaks = [one.peak / one.peak_need for one in own if one.peak_need]
    if peaks:
        yield Bound("twice the capacity", median(peaks), max(peaks), TWICE, TWICE, "x")
    engines = [one.engines for one in own]
    yield Bound("engines", median(engines), min(engines), needed, needed, is_least=True)
    late = [
        max(
            (
                one.workers / one.need
                for one in each.moments
                if since <= one.at < until and one.need and site.trainer.demand.at(one.at)
            ),
            default=0.0,
        )
        for each in own
    ]
    yield Bound("capacity", median(late), max(late), SATURATED, WORST * SATURATED, "x")
    referred = trials.referred(lambda one: one.made_late)
    if needed == 1 and referred:
        made = [one.made_late / referred for one in own]
        yield Bound("throughput", median(made), min(made), THROUGHPUT, 0.0, "x", is_least=True)


def fewest_moves(needs: Sequence[float], begins: int | None = None) -> tuple[int, int]:
    """Return turns and moves of the path that stays within a tenth of the need, or one worker, with the fewest moves.

    Args:
        needs: The need over time.
        begins: Workers before that; None for any number within the band of the first need.
    """
    low, high = -math.inf, math.inf
    at: float | None = begins
    turns = moves = direction = 0
    for need in needs:
        spare = max(1.0, NEAR * need)
        floor, ceiling = math.ceil(need - spare - 1e-9), math.floor(need + spare + 1e-9)
        if at is None:  # wherever it began, until the first move decides that
            if floor <= high and ceiling >= low:
                low, high = max(low, floor), min(high, ceiling)
                continue
            at = high if floor > high else low
        target = min(max(at, floor), ceiling)
        if target != at:
            sign = 1 if target > at else -1
            turns += direction not in (0, sign)
            direction = sign
            moves += int(abs(target - at))
            at = target
    return turns, moves


def _fewest_moves(scenario: Scenario, env: str, needs: Sequence[float]) -> tuple[int, int]:
    """Return turns and moves of the best path, from the need before the first change, or from the start."""
    if since := scenario.counts_from_s:
        return fewest_moves([scenario.site.need(env, since - 1e-6), *needs])
    return fewest_moves(needs, scenario.site.environments[env].begins)


def _waste(one: Outcome) -> float:
    return one.waste_s / one.need_s if one.need_s else 0.0


def _settled(change: int) -> Callable[[Outcome], float]:
    return lambda one: one.settle_s[change]


def _wasted(referred: float) -> float:
    """Return the waste allowed, relative to the need."""
    return HALF * referred + LARGE_WASTE if referred > LARGE_WASTE else referred + WASTE


def _starves_s(trials: _Trials) -> float:
    """Return the starvation allowed: by that without crashes where there are some, else by that of the reference."""
    scenario = trials.scenario
    if scenario.has_crashes:
        calm_s = float(median(one.starved_s for one in trials.uncrashed))
        return CRASHING * calm_s + CRASHING_PART * (scenario.lasts_s - scenario.counts_from_s)
    start_s = scenario.site.environments[trials.env].start_s
    return STARVED * trials.referred(lambda one: one.starved_s) + max(STARTS * start_s, LEAST_S)


def _flips(scenario: Scenario, turns: int) -> float:
    """Return the flips allowed: by the hour where the need is steady, by turns otherwise."""
    site = scenario.site
    rates = [
        site.trainer.demand,
        *(one.per_worker for one in site.environments.values()),
        *(one.capacity for one in site.servers.values()),
    ]
    if all(len(one.times) == 1 for one in rates):
        return FLIPS_PER_HOUR * (scenario.lasts_s - scenario.counts_from_s) / 3600.0
    return TURNS * turns + SPARE_TURNS


def _settles_s(scenario: Scenario, change: int, env: str) -> float:
    """Return the settling time allowed, by the starts of that time."""
    at, site = scenario.changes[change], scenario.site
    start_s = site.environments[env].start_at(at)
    before, after = site.need(env, at - 1.0), site.need(env, at + 1.0)
    window_s = max(WINDOW_S, start_s) if after < before else 0.0
    return SETTLES * (start_s + CONFIRM_S) + SETTLES_S + window_s + scenario.unseen_s
