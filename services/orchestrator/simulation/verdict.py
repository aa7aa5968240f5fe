"""Verdict on the trials of one controller in one scenario, over all seeds, against fixed limits. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from rolloutmq.services.orchestrator.simulation.trial import Outcome, Scenario

FLIPS: Final = 12
"""Maximum changes of direction if the demand steps twice in half an hour."""
PEAK: Final = 1.2
"""Maximum workers, relative to the largest ideal count; one worker more is always allowed."""
MOVES: Final = 2.0
"""Maximum of workers started and removed, relative to the minimum possible."""
STARTS: Final = 3.0
REST_S: Final = 30.0
"""Settling limit, relative to the start-up time, from the moment a change is visible."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Median and worst of a figure over the seeds."""

    median: float
    worst: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures of one controller in one scenario; times in seconds.

    Attributes:
        ideal: Largest ideal number of workers.
        least_moves: Minimum number of workers to start and remove.
        settle_s: For each lasting change of the demand, the first being the start: time until the worker count stays
            within one worker or a tenth of the ideal.
        broken: Limits exceeded by the worst seed.
    """

    scenario: str
    start_s: float
    law: str
    seeds: int
    ideal: int
    least_moves: int
    settle_s: tuple[Figure, ...]
    peak: Figure
    flips: Figure
    actions: Figure
    moves: Figure
    starved_s: Figure
    blocked_s: Figure
    broken: tuple[str, ...]


def judged(scenario: Scenario, law: str, outcomes: Sequence[Outcome]) -> Verdict:
    """Summarize the trials of one controller, one for each seed."""

    def over(of: Callable[[Outcome], float]) -> Figure:
        found = [of(one) for one in outcomes]
        return Figure(float(median(found)), float(max(found)))

    def settled(change: int) -> Figure:
        return over(lambda one: one.settle_s[change])

    peak, flips, actions = over(lambda o: o.peak), over(lambda o: o.flips), over(lambda o: o.actions)
    settle_s = tuple(map(settled, range(len(scenario.changes))))
    ideal, least = _needs(scenario)
    moves = over(lambda o: o.moves)
    checks = {
        "bounds": not any(one.outside for one in outcomes),
        "down in the dark": not any(one.downs_in_the_dark for one in outcomes),
        "peak": peak.worst <= max(PEAK * ideal, ideal + 1),
    }
    if scenario.steps_twice:
        checks["flips"] = flips.worst <= FLIPS
        checks["moves"] = moves.worst <= MOVES * least
        limit = STARTS * scenario.site.start_s + REST_S + scenario.unseen_s
        checks["settle"] = all(figure.worst <= limit for figure in settle_s[1:])
    # An outage empties the queue, and refilling it is legitimate. The limit on the peak covers overshoot.
    if not least and math.isinf(scenario.site.outage[0]):
        checks["no action"] = actions.worst == 0
    return Verdict(
        scenario.name,
        scenario.site.start_s,
        law,
        len(outcomes),
        ideal,
        least,
        settle_s,
        peak,
        flips,
        actions,
        moves,
        over(lambda o: o.starved_s),
        over(lambda o: o.blocked_s),
        tuple(name for name, held in checks.items() if not held),
    )


def _needs(scenario: Scenario) -> tuple[int, int]:
    """Return the largest ideal count, and the minimum moves that follow the demand."""
    ideals = [scenario.ideal(float(at)) for at in range(int(scenario.lasts_s))]
    now = max(scenario.ready, scenario.min_workers)
    least = sum(abs(after - before) for before, after in zip([now, *ideals], ideals, strict=False))
    return max(ideals), least
