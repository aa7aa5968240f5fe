"""Scenarios for controllers: changes of demand, lost updates and failures, with slow and fast worker starts."""

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rolloutmq.services.orchestrator.simulation.plant import Demand, PlantParameters
from rolloutmq.services.orchestrator.simulation.trial import Scenario

STARTS_S: Final = (2.0, 20.0, 60.0)
LOW, HIGH, AFTER = 40.0, 80.0, 20.0
"""Demand in sequences per second: before the first step, after it, and after the second."""
STEADY: Final = 39.0
"""Slightly less than the throughput of twenty workers: without spare capacity every queue runs empty eventually."""


def steps(*parts: tuple[float, float]) -> Demand:
    """Return a piecewise constant demand from pairs of time and sequences per second."""
    times = [at for at, _ in parts]

    def demand(at: float) -> float:
        return parts[max(0, bisect.bisect_right(times, at) - 1)][1]

    return demand


def ramp(begin: float, end: float, low: float, high: float) -> Demand:
    """Return a demand that grows linearly from one time to another."""

    def demand(at: float) -> float:
        part = min(max((at - begin) / (end - begin), 0.0), 1.0)
        return low + (high - low) * part

    return demand


def square(half_s: float, low: float, high: float) -> Demand:
    """Return a demand that alternates between high and low."""
    return lambda at: high if int(at / half_s) % 2 else low


def trace(rows: Sequence[tuple[float, float]]) -> Demand:
    """Return a recorded demand, constant from each row to the next."""
    return steps(*rows)


def all_scenarios(start_s: float) -> list[Scenario]:
    """Return the scenarios for workers with this start-up time."""
    site = PlantParameters(start_s=start_s)
    two = steps((0.0, LOW), (600.0, HIGH), (1200.0, AFTER))
    step = Scenario("step", two, site, (0.0, 600.0, 1200.0))
    return [
        step,
        Scenario("ramp", ramp(300.0, 1200.0, LOW, HIGH), site),
        Scenario("square", square(max(60.0, 4.0 * start_s), LOW, HIGH), site),
        Scenario("noise", lambda _: STEADY, site, ready=20, queued=1.5),
        replace(step, name="loss 10 %", loss=0.1),
        replace(step, name="loss 50 %", loss=0.5),
        replace(step, name="dark 60 s", dark=(610.0, 670.0), unseen_s=60.0),
        replace(step, name="failing starts", site=replace(site, failures=0.3)),
        replace(step, name="restart", restart_at=700.0),
        replace(step, name="clock jump", jump=(700.0, 3600.0)),
        Scenario(
            "shared",
            steps((0.0, 20.0), (400.0, HIGH), (1400.0, 20.0)),
            replace(site, shared=40.0),
            (0.0, 400.0, 1400.0),
        ),
        Scenario("outage", lambda _: STEADY, replace(site, outage=(300.0, 360.0)), ready=20, queued=1.5),
        replace(step, name="long rollouts", site=replace(site, rollout_s=60.0, cap=6000)),
        replace(step, name="long steps", site=replace(site, batch=1200, cap=6000), unseen_s=75.0),
        Scenario(
            "few",
            steps((0.0, 2.0), (600.0, 8.0), (1200.0, 2.0)),
            replace(site, batch=16, cap=200),
            (0.0, 600.0, 1200.0),
        ),
    ]
