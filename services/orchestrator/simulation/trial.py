"""One trial: controllers on a plant under a scenario, and the outcome. Deterministic for a seed.

Telemetry can be lost or go dark, the controllers can restart, and their clock can jump; they see no more than they
would in a run.
"""

import bisect
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from rolloutmq.schemas.wire.control import LaneStatus, LedgerCounts, Pressure
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.simulation.plant import COMPLETION_TOKENS, Plant
from rolloutmq.services.orchestrator.simulation.site import Scenario

TICK_S: Final = 1.0
LAST_NEWS_S: Final = 4.0
"""Time after the start of darkness during which a controller may act on earlier telemetry."""
BAND: Final = 0.1
"""Settling tolerance, relative to the need; at least one worker."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What controllers see.

    Attributes:
        pressure: Last message of the broker, or None.
        heard_at: Its arrival, on the clock of `now`; -inf if never.
        crews: Worker counts by environment.
        engines: Engine counts and their busy part by server.
        now: Seconds on the controllers' clock.
    """

    pressure: Pressure | None
    heard_at: float
    crews: Mapping[str, WorkerCounts]
    engines: Mapping[str, tuple[WorkerCounts, float]]
    now: float


class Controllers(Protocol):
    """The controllers of all environments and servers of a site."""

    def decide(self, seen: Telemetry) -> Mapping[str, int]:
        """Return the target of each environment, and of each server that it scales."""
        ...


Make = Callable[[Scenario, Mapping[str, int]], Controllers]
"""Makes controllers for a scenario, with so many workers running."""


class Moment(NamedTuple):
    """An environment at a time: workers that are ready or about to be, the need, and batches in the whole queue."""

    at: float
    workers: int
    need: float
    pressure: float


@dataclass(slots=True)
class Outcome:
    """Outcome for one environment; times in seconds, from `Scenario.counts_from_s` on.

    Attributes:
        settle_s: Settling time after each change of the need; the time to the next change if it did not settle before.
        peak: Most workers, and `peak_need`: the largest need.
        flips: Changes of direction.
        moves: Workers started and removed.
        starved_s: Time in which the trainer waited.
        blocked_s: Time in which workers waited, summed over them.
        waste_s: Worker-seconds of ready, starting and draining workers above the need.
        need_s: Worker-seconds needed.
        made: Sequences made.
        downs_in_the_dark: Removals without telemetry.
        outside: Decisions outside the bounds, or beyond the process budget.
        made_late: Sequences made once the capacity is to be found: `Scenario.found_by_s` after that.
        engines: Most engines.
        moments: One for each `TICK_S`.
    """

    settle_s: list[float]
    peak: int = 0
    peak_need: float = 0.0
    flips: int = 0
    moves: int = 0
    starved_s: float = 0.0
    blocked_s: float = 0.0
    waste_s: float = 0.0
    need_s: float = 0.0
    made: float = 0.0
    made_late: float = 0.0
    downs_in_the_dark: int = 0
    outside: int = 0
    engines: int = 0
    moments: list[Moment] = field(default_factory=list)
    direction: int = 0
    """Sign of the last change."""

    def act(self, change: int, *, dark: bool) -> None:
        """Count an action that changes the target by so many workers."""
        self.downs_in_the_dark += dark and change < 0
        sign = 1 if change > 0 else -1
        self.flips += self.direction not in (0, sign)
        self.direction = sign


def try_out(scenario: Scenario, make: Make, seed: int) -> dict[str, Outcome]:
    """Run a scenario with the controllers that `make` returns; return the outcome of each environment."""
    return _Trial(scenario, make, seed).run()


class _Trial:
    def __init__(self, scenario: Scenario, make: Make, seed: int) -> None:
        self._scenario = scenario
        self._make = make
        self._plant = Plant(scenario.site, seed)
        self._chance = random.Random(seed + 1_000_003)
        self._number = 0
        self._heard: Pressure | None = None
        self._heard_at = -math.inf
        self._out = {name: Outcome([0.0] * len(scenario.changes)) for name in self._plant.lanes}
        self._base: dict[str, tuple[int, float, float]] = {}
        self._starved_before = 0.0
        self._made_by: dict[str, float] = {}

    def run(self) -> dict[str, Outcome]:
        scenario, plant = self._scenario, self._plant
        for name, lane in plant.lanes.items():
            one = scenario.site.environments[name]
            lane.crew.scale(one.begins, 0.0)
            lane.crew.moved = 0
        controllers, restarted, next_tick = self._fresh(), False, TICK_S
        if not scenario.counts_from_s:
            self._begin()
        while plant.now < scenario.lasts_s:
            plant.advance()
            if plant.now < next_tick:
                continue
            next_tick += TICK_S
            if plant.now >= scenario.restart_at and not restarted:
                controllers, restarted = self._fresh(), True
            if not self._base and plant.now >= scenario.counts_from_s:
                self._begin()
            self._apply(controllers.decide(self._see()))
            if self._base:
                self._note()
        self._end()
        return self._out

    def _fresh(self) -> Controllers:
        return self._make(
            self._scenario, {name: lane.crew.current for name, lane in self._plant.lanes.items()}
        )

    def _begin(self) -> None:
        self._starved_before = self._plant.trainer_waited_s
        for name, lane in self._plant.lanes.items():
            self._base[name] = lane.crew.moved, lane.waited_s, lane.made

    def _see(self) -> Telemetry:
        scenario, plant = self._scenario, self._plant
        self._number += 1
        clock = plant.now + (scenario.jump[1] if plant.now >= scenario.jump[0] else 0.0)
        if not self._is_dark() and self._chance.random() >= scenario.loss:
            self._heard, self._heard_at = self._pressure(), clock
        return Telemetry(
            self._heard,
            self._heard_at,
            {name: lane.crew.counts for name, lane in plant.lanes.items()},
            {name: (server.counts, server.busy) for name, server in plant.servers.items()},
            clock,
        )

    def _is_dark(self) -> bool:
        return self._scenario.dark[0] <= self._plant.now < self._scenario.dark[1]

    def _apply(self, targets: Mapping[str, int]) -> None:
        scenario, plant = self._scenario, self._plant
        dark = self._is_dark() and plant.now - scenario.dark[0] > LAST_NEWS_S
        limit = scenario.max_processes
        beyond = 0 < limit < sum(targets[name] for name in plant.lanes)
        for name, target in targets.items():
            if name in plant.servers:
                plant.servers[name].scale(target, plant.now)
                continue
            lane, out = plant.lanes[name], self._out[name]
            out.outside += beyond or not lane.site.min_workers <= target <= lane.site.max_workers
            change = target - lane.crew.current
            if change:
                if self._base:
                    out.act(change, dark=dark)
                lane.crew.scale(target, plant.now)

    def _note(self) -> None:
        plant, site = self._plant, self._scenario.site
        pressure = plant.level / site.trainer.batch_at(plant.now)
        if not self._made_by and plant.now >= self._scenario.counts_from_s + self._scenario.found_by_s:
            self._made_by = {name: lane.made for name, lane in plant.lanes.items()}
        for name, lane in plant.lanes.items():
            out, crew = self._out[name], lane.crew
            need = site.need(name, plant.now)
            wanted = math.ceil(need - 1e-9)
            out.waste_s += max(0, crew.holding - wanted) * TICK_S
            out.need_s += need * TICK_S
            out.peak, out.peak_need = max(out.peak, crew.alive), max(out.peak_need, need)
            out.moments.append(Moment(plant.now, crew.alive, need, pressure))
            if out.settle_s and abs(crew.ready - wanted) > max(1.0, BAND * wanted):
                change = bisect.bisect_right(self._scenario.changes, plant.now) - 1
                out.settle_s[change] = plant.now - self._scenario.changes[change]
            if lane.site.server:
                out.engines = max(out.engines, plant.servers[lane.site.server].engines)

    def _end(self) -> None:
        for name, (moved, waited_s, made) in self._base.items():
            out, lane = self._out[name], self._plant.lanes[name]
            out.moves = lane.crew.moved - moved
            out.blocked_s = lane.waited_s - waited_s
            out.made = lane.made - made
            out.made_late = lane.made - self._made_by.get(name, lane.made)
            out.starved_s = self._plant.trainer_waited_s - self._starved_before

    def _pressure(self) -> Pressure:
        plant, trainer = self._plant, self._scenario.site.trainer
        level, batch = int(plant.level), trainer.batch_at(plant.now)
        return Pressure(
            epoch=1,
            number=self._number,
            at=plant.now,
            rollout_pressure=plant.level / batch,
            queued_sequences=level,
            batch_sequences=batch,
            queued_groups=0,
            queued_bytes=0,
            leased_bytes=0,
            high_bytes=0,
            step=0,
            consumed_per_s=0.0,
            produced_per_s=0.0,
            staleness_max=0,
            trainer_wait="",
            ledger=_NONE,
            lanes=tuple(
                LaneStatus(
                    env=name,
                    split=Split.TRAIN,
                    weight=lane.site.weight,
                    min_share=0.0,
                    queued_sequences=int(lane.level),
                    accepted_sequences=int(lane.made),
                    settled_sequences=int(lane.eaten),
                    rollout_s=lane.rollout_s,
                )
                for name, lane in plant.lanes.items()
            ),
            workers=(),
            trainers=int(plant.has_trainer),
            starved_s=plant.trainer_waited_s,
            settled_busy_s=plant.settled_busy_s,
            blocked_s={name: lane.waited_s * lane.site.slots for name, lane in plant.lanes.items()},
            completions={name: int(lane.completions) for name, lane in plant.lanes.items()},
            completion_tokens={
                name: int(COMPLETION_TOKENS * lane.completions) for name, lane in plant.lanes.items()
            },
        )


_NONE: Final = LedgerCounts()
