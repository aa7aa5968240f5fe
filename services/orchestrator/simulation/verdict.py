"""Verdict on the trials of one controller in one scenario: its figures beside the reference fleet's, and its bounds.

The bounds hold for the median of the seeds, and 1.5 times of them for the worst. Pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
KNEE, TWICE, THROUGHPUT = 1.25, 2.0, 0.97
"""Workers of a shared server after the search, and at any time, relative to those at the knee; and throughput then."""
SETTLES, SETTLES_S = 3.0, 30.0
"""Settling time allowed: so many starts with their confirmation, and so many seconds."""
CONFIRM_S: Final = 2.0
WINDOW_S: Final = 60.0
"""Window of a step down, or one start if that is longer."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Median and worst of a figure over the seeds."""

    median: float
    worst: float

    def within(self, bound: float) -> bool:
        """Return whether the median keeps a bound, and the worst 1.5 times of it."""
        return self.median <= bound + 1e-9 and self.worst <= WORST * bound + 1e-9


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures of one controller for one environment of a scenario; times in seconds.

    Attributes:
        peak_need: Largest need.
        settle_s: Settling time after each lasting change of the need.
        waste: Worker-seconds above the need, relative to the need.
        turns: Turns of the path with the fewest moves, within a tenth of the need.
        least_moves: Moves of that path.
        starved_ratio, waste_ratio, moves_ratio: Medians relative to the reference fleet's; 0 without one.
        broken: Bounds that are exceeded.
    """

    scenario: str
    env: str
    start_s: float
    law: str
    seeds: int
    peak_need: float
    settle_s: tuple[Figure, ...]
    peak: Figure
    flips: Figure
    turns: int
    moves: Figure
    least_moves: int
    starved_s: Figure
    blocked_s: Figure
    waste: Figure
    starved_ratio: float
    waste_ratio: float
    moves_ratio: float
    broken: tuple[str, ...]


Outcomes = Sequence[Mapping[str, Outcome]]
"""Outcomes by environment, one for each seed."""


def judged(
    scenario: Scenario, law: str, outcomes: Outcomes, reference: Outcomes, uncrashed: Outcomes | None = None
) -> list[Verdict]:
    """Summarize the trials of one controller; one verdict for each environment.

    Args:
        scenario: The scenario.
        law: Name of the controller.
        outcomes: Its outcomes, one for each seed.
        reference: Those of the reference fleet.
        uncrashed: Those of the controller with workers that never crash, if the scenario has crashes.
    """
    return [
        _judged(
            scenario,
            env,
            law,
            [one[env] for one in outcomes],
            [one[env] for one in reference],
            [one[env] for one in uncrashed or outcomes],
        )
        for env in scenario.site.environments
    ]


def _judged(
    scenario: Scenario,
    env: str,
    law: str,
    outcomes: Sequence[Outcome],
    reference: Sequence[Outcome],
    uncrashed: Sequence[Outcome],
) -> Verdict:
    def over(of: Callable[[Outcome], float]) -> Figure:
        found = [of(one) for one in outcomes]
        return Figure(float(median(found)), float(max(found)))

    def referred(of: Callable[[Outcome], float]) -> float:
        return float(median(of(one) for one in reference))

    starved, waste = over(lambda one: one.starved_s), over(_waste)
    flips, moves = over(lambda one: one.flips), over(lambda one: one.moves)
    settle = tuple(over(lambda one, c=change: one.settle_s[c]) for change in range(len(scenario.changes)))
    turns, least = fewest_moves([need for _, _, need in outcomes[0].live])
    referred_starved, referred_waste = referred(lambda one: one.starved_s), referred(_waste)
    worker = scenario.site.environments[env]
    checks = {
        "bounds": not any(one.outside for one in outcomes),
        "down in the dark": not any(one.downs_in_the_dark for one in outcomes),
        "flips": flips.within(_flips(scenario, turns)),
        "waste": waste.within(
            HALF * referred_waste + LARGE_WASTE if referred_waste > LARGE_WASTE else referred_waste + WASTE
        ),
    }
    if scenario.has_crashes:
        calm = float(median(one.starved_s for one in uncrashed))
        counted_s = scenario.lasts_s - scenario.counts_from_s
        checks["starved"] = starved.within(CRASHING * calm + CRASHING_PART * counted_s)
    else:
        checks["settle"] = all(
            figure.within(_settles_s(scenario, change, env)) for change, figure in enumerate(settle)
        )
        allowed = STARVED * referred_starved + max(STARTS * worker.start_s, LEAST_S)
        checks["starved"] = scenario.is_fresh or starved.within(allowed)
    if worker.server:
        checks.pop("settle", None)
        checks |= _at_the_knee(scenario, env, outcomes, reference)
    return Verdict(
        scenario.name,
        env,
        worker.start_s,
        law,
        len(outcomes),
        max(one.peak_need for one in outcomes),
        settle,
        over(lambda one: one.peak),
        flips,
        turns,
        moves,
        least,
        starved,
        over(lambda one: one.blocked_s),
        waste,
        _ratio(starved.median, referred_starved),
        _ratio(waste.median, referred_waste),
        _ratio(moves.median, referred(lambda one: one.moves)),
        tuple(name for name, held in checks.items() if not held),
    )


def _at_the_knee(
    scenario: Scenario, env: str, outcomes: Sequence[Outcome], reference: Sequence[Outcome]
) -> dict[str, bool]:
    """Check the search for the knee of a shared server, which begins at the first change or at the start."""
    since = scenario.counts_from_s + scenario.found_by_s
    until = scenario.changes[1] if len(scenario.changes) > 1 else scenario.lasts_s
    late = [max(live / need for at, live, need in one.live if since <= at < until) for one in outcomes]
    made = median(one.made_late for one in outcomes) / max(median(one.made_late for one in reference), 1.0)
    engines = scenario.site.servers[scenario.site.environments[env].server].max_engines
    return {
        "knee": median(late) <= KNEE and max(late) <= WORST * KNEE,
        "twice the knee": all(one.peak <= TWICE * one.peak_need + 1e-9 for one in outcomes),
        "throughput": made >= THROUGHPUT or engines > 1,
        "engines": all(one.engines == engines for one in outcomes),
    }


def fewest_moves(needs: Sequence[float]) -> tuple[int, int]:
    """Return turns and moves of the path that stays within a tenth of the need, or one worker, with the fewest moves.

    Args:
        needs: The need over time.
    """
    low, high = -math.inf, math.inf
    at: float | None = None
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


def _waste(one: Outcome) -> float:
    return one.waste_s / one.need_s if one.need_s else 0.0


def _ratio(value: float, of: float) -> float:
    return value / of if of else 0.0


def _flips(scenario: Scenario, turns: int) -> float:
    """Return the flips allowed: by the hour where the need is steady, by turns otherwise."""
    trainer, workers = scenario.site.trainer, scenario.site.environments.values()
    is_steady = len(trainer.demand.times) == 1 and all(len(one.per_worker.times) == 1 for one in workers)
    if is_steady:
        return FLIPS_PER_HOUR * (scenario.lasts_s - scenario.counts_from_s) / 3600.0
    return TURNS * turns + SPARE_TURNS


def _settles_s(scenario: Scenario, change: int, env: str) -> float:
    at, site = scenario.changes[change], scenario.site
    start_s = site.environments[env].start_s
    before, after = site.need(env, at - 1.0), site.need(env, at + 1.0)
    window_s = max(WINDOW_S, start_s) if after < before else 0.0
    return SETTLES * (start_s + CONFIRM_S) + SETTLES_S + window_s + scenario.unseen_s
