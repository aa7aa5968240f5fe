"""One trial: a controller on a plant under a scenario, and its outcome. Deterministic for a seed.

Updates can be lost, telemetry can go dark, the controller can restart, and its clock can jump; the controller sees no
more than it would in a run.
"""

import bisect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample
from rolloutmq.services.orchestrator.simulation.plant import DT_S, Demand, Plant, PlantParameters

TICK_S: Final = 1.0
GROUP: Final = 8
LAST_NEWS_S: Final = 4.0
"""Time after the start of darkness during which a controller may act on earlier updates."""
BAND: Final = 0.1
"""Settling tolerance, relative to the ideal; at least one worker."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Test scenario of a controller.

    Attributes:
        name: Short name.
        site: Parameters of the plant.
        demand: The trainer's demand over time.
        changes: Times of lasting changes of the demand; the first is the start.
        lasts_s: Duration.
        min_workers, max_workers: Bounds.
        loss: Part of the ticks without an update.
        dark: Start and end of a time without any update.
        unseen_s: Time during which a change is invisible: while dark, or until the trainer has completed one step
            before and one after the change. The settling limit grows by it.
        restart_at: Time of a controller restart.
        jump: Time and size of a clock jump.
        ready: Workers running at the start, with `queued` batches in the queue.
    """

    name: str
    demand: Demand
    site: PlantParameters = field(default_factory=PlantParameters)
    changes: tuple[float, ...] = (0.0,)
    lasts_s: float = 1800.0
    min_workers: int = 1
    max_workers: int = 200
    ready: int = 0
    queued: float = 0.0
    loss: float = 0.0
    dark: tuple[float, float] = (math.inf, math.inf)
    unseen_s: float = 0.0
    restart_at: float = math.inf
    jump: tuple[float, float] = (math.inf, 0.0)

    @property
    def steps_twice(self) -> bool:
        """Return whether the demand steps up and down again, so that the limits for this case apply."""
        return len(self.changes) == 3

    def ideal(self, at: float) -> int:
        """Return the ideal number of workers at a time, up to the number that adds throughput."""
        useful = math.ceil(min(self.demand(at), self.site.shared) / self.site.per_worker - 1e-9)
        return min(max(useful, self.min_workers), self.max_workers)


@dataclass(slots=True)
class Outcome:
    """Outcome of a trial; times in seconds."""

    settle_s: list[float]
    """Settling time after each change of the demand."""
    peak: int = 0
    flips: int = 0
    """Changes of direction."""
    actions: int = 0
    moves: int = 0
    """Workers started and removed."""
    starved_s: float = 0.0
    blocked_s: float = 0.0
    """Waiting time of workers, summed over workers."""
    downs_in_the_dark: int = 0
    outside: int = 0
    """Decisions outside the bounds."""
    reasons: list[tuple[float, int, str]] = field(default_factory=list)
    """Actions: time, target and reason."""


@dataclass(frozen=True, slots=True)
class TrialSample:
    """State at one tick; `ideal` is the ideal number of workers."""

    at: float
    ideal: int
    ready: int
    pressure: float


Make = Callable[[Scenario], Any]


def try_out(
    scenario: Scenario, make: Make, seed: int, watch: Callable[[TrialSample], None] | None = None
) -> Outcome:
    """Run a scenario with the controller that `make` returns; `watch` is called at every tick."""
    site = scenario.site
    plant = Plant(site, scenario.demand, seed, scenario.ready, scenario.queued * site.batch)
    chance = random.Random(seed + 1_000_003)
    law, out = make(scenario), Outcome([0.0] * len(scenario.changes))
    plant.scale(max(scenario.ready, scenario.min_workers))
    plant.moved = 0
    state = law.initial(plant.workers)
    number, heard, heard_at = 0, PressureSample(), -math.inf
    direction, next_tick, offset, restarted = 0, 0.0, 0.0, False
    while plant.now < scenario.lasts_s:
        plant.advance()
        if plant.now < next_tick:
            continue
        next_tick += TICK_S
        now = plant.now
        offset = scenario.jump[1] if now >= scenario.jump[0] else 0.0
        clock = now + offset
        dark = scenario.dark[0] <= now < scenario.dark[1]
        number += 1
        if not dark and chance.random() >= scenario.loss:
            heard, heard_at = _sample(plant, number), clock
        sample = _with_crew(heard, plant, heard_at)
        if now >= scenario.restart_at and not restarted:
            state, restarted = law.initial(plant.workers), True
        state, decision = law.decide(state, sample, clock)
        out.outside += not scenario.min_workers <= decision.target <= scenario.max_workers
        change = decision.target - plant.workers
        if change:
            out.actions += 1
            out.downs_in_the_dark += dark and change < 0 and now - scenario.dark[0] > LAST_NEWS_S
            sign = 1 if change > 0 else -1
            out.flips += direction not in (0, sign)
            direction = sign
            plant.scale(decision.target)
            out.reasons.append((now, decision.target, decision.reason))
        out.peak = max(out.peak, plant.workers)
        _note_settling(scenario, out, plant)
        if watch is not None:
            watch(TrialSample(plant.now, scenario.ideal(plant.now), plant.ready, plant.level / site.batch))
    out.moves = plant.moved
    out.starved_s, out.blocked_s = plant.trainer_waited_s, plant.workers_waited_s
    return out


def _sample(plant: Plant, number: int) -> PressureSample:
    return PressureSample(
        number=number,
        pressure=plant.level / plant.site.batch,
        batch_sequences=plant.site.batch,
        eaten=int(plant.eaten),
        made=int(plant.made),
        starved_s=plant.trainer_waited_s,
        blocked_s=plant.workers_waited_s,
        group_sequences=GROUP,
        rollout_s=max(plant.site.rollout_s, DT_S),
    )


def _with_crew(sample: PressureSample, plant: Plant, heard_at: float) -> PressureSample:
    return replace(sample, crew=plant.crew, heard_at=heard_at)


def _note_settling(scenario: Scenario, out: Outcome, plant: Plant) -> None:
    """Record that the worker count is still outside the tolerance since the last change of the demand."""
    ideal = scenario.ideal(plant.now)
    if abs(plant.ready - ideal) > max(1.0, BAND * ideal):
        change = bisect.bisect_right(scenario.changes, plant.now) - 1
        out.settle_s[change] = plant.now - scenario.changes[change]
