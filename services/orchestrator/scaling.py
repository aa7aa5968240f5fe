"""Scaling: how many workers each environment should have, one law each, one budget for all.

Takes what is seen and says what should be; starts and ends nobody. The rooms that a budget leaves are those of the last
tick: a law sees what the others wanted one tick ago, and together they never exceed the budget.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rolloutmq.schemas.config import EnvironmentConfig
from rolloutmq.schemas.control import Pressure, ScaleDecision
from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.orchestration import OrchestratorConfig
from rolloutmq.services.orchestrator.budget import Claim, allot
from rolloutmq.services.orchestrator.controller import ROUND, PressureController
from rolloutmq.services.orchestrator.decisions import Beginning, DecisionLog, Made
from rolloutmq.services.orchestrator.pressure import Crew, Decision, PressureSample, Room, sample_of

logger = logging.getLogger(__name__)

BUDGET: Final = "budget"
"""What is said where the budget bounds workers."""
REPEAT_S: Final = 1.0
"""How often the last decision is published again: events are lost."""


class Scale:
    """The law of one environment, its state, and what was last said of it."""

    def __init__(self, name: str, env: EnvironmentConfig, limits: OrchestratorConfig, alive_now: int) -> None:
        self.env = name
        self.split = Split[env.split.upper()]
        self.weight = env.weight
        self.slots = env.concurrency
        self.group_size = env.group_size
        self.law = PressureController(env.min_workers, env.max_workers, limits.scaling)
        self.state = self.law.initial(alive_now)
        self.decision = Decision(self.state.target, "nothing decided yet")
        self.room: Room | None = None
        """What the budget leaves."""
        self.outer: Room | None = None
        """What else bounded it in the last tick."""
        self.bound: Room | None = None
        """The narrowest room of the last tick."""
        self.said = self._say(PressureSample())
        """The decision with what it was made of, for whoever listens."""
        self._told: int | None = None
        self._told_at = -math.inf

    def decide(self, sample: PressureSample, now: float) -> Decision:
        """Ask the law."""
        before = self.decision
        self.state, self.decision = self.law.decide(self.state, sample, now)
        if self.decision.target != before.target or self.decision.bound != before.bound:
            logger.info(
                "scale env=%s target=%d reason=%s", self.env, self.decision.target, self.decision.reason
            )
        self.said = self._say(sample)
        return self.decision

    def missing(self, crew: Crew) -> int:
        """Return how many workers are missing that there are places for."""
        places = self.law.max_workers - crew.current - crew.draining
        if self.bound is not None:
            places = min(places, self.bound.workers - crew.current)
        return min(self.decision.target - crew.current, places)

    def claim(self) -> Claim:
        """Return what it would have of the budget: more than it has only if nothing else keeps it from that."""
        decision, law = self.decision, self.law
        want = decision.target
        if decision.bound == BUDGET and decision.want is not None:
            want = max(want, math.ceil(decision.want - ROUND))
        usable = law.max_workers
        if self.state.knee.most:
            usable = min(usable, self.state.knee.most)
        if self.outer is not None:
            usable = min(usable, self.outer.workers)
        return Claim(law.min_workers, max(law.min_workers, usable, decision.target), self.weight, want)

    def beginning(self) -> Beginning:
        """Return what decisions from now on follow from."""
        scaling = self.law.scaling.model_dump()
        return Beginning(self.env, self.law.min_workers, self.law.max_workers, scaling, self.state)

    def is_news(self, now: float) -> bool:
        """Say whether to publish what is said: a change at once, everything else now and then."""
        if self.said.target == self._told and now - self._told_at < REPEAT_S:
            return False
        self._told, self._told_at = self.said.target, now
        return True

    def _say(self, sample: PressureSample) -> ScaleDecision:
        rates, crew = self.state.rates, sample.crew
        return ScaleDecision(
            env=self.env,
            at=time.time(),
            rollout_pressure=sample.pressure,
            current=crew.current,
            target=self.decision.target,
            reason=self.decision.reason,
            want=self.decision.want,
            bound=self.decision.bound,
            eats_per_s=rates.appetite,
            makes_per_s=rates.per_worker,
            starved=rates.starved,
            idle=rates.idle,
            ready=crew.ready,
            starting=crew.starting,
            draining=crew.draining,
            failed=crew.failed,
        )


class Scaling:
    """All environments of a run."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentConfig],
        limits: OrchestratorConfig,
        alive_now: Mapping[str, int],
        log: DecisionLog,
    ) -> None:
        self.scales = [Scale(name, env, limits, alive_now.get(name, 0)) for name, env in environments.items()]
        self._budget = limits.max_processes
        self._log = log
        self._share()

    def decide(
        self,
        crews: Mapping[str, Crew],
        pressure: Pressure | None,
        heard_at: float,
        now: float,
        rooms: Mapping[str, Room] | None = None,
        engines: int = 0,
    ) -> None:
        """Decide for all of them; decisions are in `scales`.

        Args:
            crews: Workers, by environment.
            pressure: The newest, or None if there never was one.
            heard_at: When it came.
            now: Seconds, monotonic.
            rooms: What else bounds the workers of an environment.
            engines: Inference servers that serve; 0 if that is not known.
        """
        if self._log.begins:
            self._log.begin([scale.beginning() for scale in self.scales])
        weights = {lane.env: lane.weight for lane in pressure.lanes} if pressure is not None else {}
        for scale in self.scales:
            scale.weight = weights.get(scale.env, scale.weight)
            sample = sample_of(scale.env, scale.split, scale.slots, scale.group_size, pressure, heard_at)
            scale.outer = (rooms or {}).get(scale.env)
            scale.bound = _narrowest(scale.room, scale.outer)
            sample = replace(sample, crew=crews[scale.env], room=scale.bound, engines=engines)
            decision = scale.decide(sample, now)
            self._log.add(Made(scale.env, time.time(), now, sample, decision))
        self._share()

    def starts(self, crews: Mapping[str, Crew]) -> dict[str, int]:
        """Return how many workers of each environment may be started now.

        One that drains has its place, its memory and its GPU until its process is gone.
        """
        missing = {one.env: max(0, one.missing(crews[one.env])) for one in self.scales}
        if not self._budget:
            return missing
        free = self._budget - sum(crew.current + crew.draining for crew in crews.values())
        for env, number in missing.items():
            missing[env] = min(number, max(0, free))
            free -= missing[env]
        return missing

    def _share(self) -> None:
        if not self._budget:
            return
        rooms = allot([scale.claim() for scale in self.scales], self._budget)
        for scale, room in zip(self.scales, rooms, strict=True):
            scale.room = Room(room, BUDGET)


def _narrowest(*rooms: Room | None) -> Room | None:
    given = (room for room in rooms if room is not None)
    return min(given, key=lambda room: room.workers, default=None)
