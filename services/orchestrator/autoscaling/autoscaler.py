"""The autoscaler: one controller for each environment, and one process budget for all.

It turns observations into target counts, and starts or stops no process. Budget limits are those of the last tick: a
controller sees the claims of the others one tick late, and together they never exceed the budget.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.wire.control import Pressure, ScaleDecision
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.orchestrator.autoscaling.budget import WorkerClaim, allot
from rolloutmq.services.orchestrator.autoscaling.control_law import LEAST_AVAILABLE, ROUND, PressureController
from rolloutmq.services.orchestrator.autoscaling.decision_log import (
    DecisionLog,
    DecisionLogHeader,
    LoggedDecision,
    Resumed,
)
from rolloutmq.services.orchestrator.autoscaling.pressure import (
    Decision,
    PressureSample,
    ServerLimit,
    WorkerCounts,
    WorkerRoom,
    sample_of,
)
from rolloutmq.services.orchestrator.autoscaling.servers.progress import Sampled
from rolloutmq.services.orchestrator.autoscaling.servers.saturation import SaturationDetector
from rolloutmq.services.orchestrator.autoscaling.servers.server_use import ServerUse

logger = logging.getLogger(__name__)

BUDGET: Final = "budget"
"""Bound reported when the budget limits workers."""
SHARE_S: Final = 300.0
"""Time for which another division of the budget must hold if it only takes one worker from an environment that uses it:
claims fluctuate."""
REPEAT_S: Final = 1.0
"""Interval at which an unchanged decision is published again: events may be lost."""


class ScaleTarget:
    """Controller of one environment, its state, and its last published decision."""

    def __init__(self, name: str, env: EnvironmentConfig, limits: OrchestratorConfig, alive_now: int) -> None:
        self.env = name
        self.split = Split[env.split.upper()]
        self.weight = env.weight
        self.slots = env.concurrency
        self.group_size = env.group_size
        self.law = PressureController(env.min_workers, env.max_workers, limits.scaling)
        self.state = self.law.initial(alive_now)
        self.decision = Decision(self.state.target, "nothing decided yet")
        """The last decision; it stands until the next news."""
        self.want: float | None = None
        """Workers needed by the last measurement; None before the first."""
        self.room: WorkerRoom | None = None
        """Limit from the budget."""
        self.outer: WorkerRoom | None = None
        """Limit from outside in the last tick, such as GPUs."""
        self.bound: WorkerRoom | None = None
        """Narrowest limit of the last tick."""
        self.is_pinned = False
        """An operator set its number."""
        self.server = ServerLimit()
        """What the inference servers allow."""
        self.joined = 0
        """Workers that joined by themselves, in the last tick. They count towards the target, and not for limits of
        this host."""
        self._sample = PressureSample()
        """Input of the last decision."""
        self._told: int | None = None
        self._told_at = -math.inf

    def decide(self, sample: PressureSample, now: float) -> Decision:
        """Ask the controller for a decision, and return its answer."""
        before, known, self.is_pinned = self.decision, self.state.news, sample.wanted is not None
        self.state, answer = self.law.decide(self.state, sample, now)
        is_silent = now - sample.heard_at > self.law.scaling.stale_s
        # A tick between two messages of the broker says nothing about what is wanted, or bounds it.
        stands = self.state.news == known and not self.is_pinned and not is_silent
        self.decision = replace(before, target=answer.target) if stands else answer
        if answer.want is not None and not self.is_pinned:
            self.want = answer.want
        if self.decision.target != before.target or self.decision.bound != before.bound:
            logger.info(
                "scale env=%s target=%d reason=%s", self.env, self.decision.target, self.decision.reason
            )
        self._sample = sample
        return answer

    def use(self) -> ServerUse:
        """Return its use of the inference servers, as of the last tick."""
        rates = self.state.rates
        return ServerUse(
            self.env,
            rates.delivering,
            rates.made_all,
            rates.busy_all_s,
            rates.present_all_s,
            rates.counted_s,
            rates.per_worker,
            rates.rollout_s,
            self.group_size,
            self.weight,
            self._wanted(),
            max(rates.available, LEAST_AVAILABLE),
            rates.demand,
            0.0 if rates.last is None else rates.last.starved_s,
            Sampled(
                rates.running,
                self.slots * self.group_size,
                self.group_size,
                rates.running_all_s,
                rates.completions_all,
                rates.tokens_all,
            ),
            rates.scatter.dispersion,
        )

    def missing(self, crew: WorkerCounts) -> int:
        """Return how many workers are missing and may be started; nobody is started for those to be replaced later."""
        places = self.law.max_workers - crew.current - crew.draining
        if self.bound is not None:
            places = min(places, self.bound.workers - crew.current)
        return min(self.decision.target - crew.current - crew.failed, places)

    def claim(self, *, by_want: bool) -> WorkerClaim:
        """Return its claim on the budget: what it wants to deliver its share of the trainer's appetite.

        Args:
            by_want: Its weight is that number, and no longer the configured weight.
        """
        law, usable = self.law, self._usable()
        if self.server.most:
            usable = min(usable, self.server.most)
        most = max(law.min_workers, usable, self.decision.target)
        weight = max(self.want or 0.0, ROUND) if by_want else self.weight
        least, most, wanted = (max(0, one - self.joined) for one in (law.min_workers, most, self._wanted()))
        return WorkerClaim(least, most, weight, wanted)

    @property
    def limit(self) -> str:
        """Return the narrowest limit in words."""
        return "" if self.bound is None else self.bound.details or self.bound.why

    def asked(self, bound: str) -> int:
        """Return the own workers that it would decide on without a limit of this kind."""
        decision, law = self.decision, self.law
        if decision.bound != bound or decision.want is None:
            return max(0, decision.target - self.joined)
        most = law.max_workers if self.room is None else min(law.max_workers, self.room.workers + self.joined)
        if self.server.most and not self.is_pinned:
            most = min(most, self.server.most)
        return max(
            0, decision.target - self.joined, min(math.ceil(decision.want - ROUND), most) - self.joined
        )

    def _wanted(self) -> int:
        """Return the workers it decided on, or those it needs if they are more and allowed.

        The decision fluctuates less than the need: what is divided among environments changes with it.
        """
        wanted = self.decision.want if self.is_pinned else self.want
        if wanted is None:
            return self.decision.target
        return max(self.decision.target, min(math.ceil(wanted - ROUND), self._usable()))

    def _usable(self) -> int:
        """Return the most workers that the environment and the GPUs allow, whatever the others want."""
        most = self.law.max_workers
        return most if self.outer is None else min(most, self.outer.workers + self.joined)

    def rebound(self, env: EnvironmentConfig) -> bool:
        """Take other bounds; return whether they are others."""
        law = self.law
        if (env.min_workers, env.max_workers) == (law.min_workers, law.max_workers):
            return False
        self.law = PressureController(env.min_workers, env.max_workers, law.scaling)
        target = min(max(self.state.target, env.min_workers), env.max_workers)
        self.state = replace(self.state, target=target)
        return True

    def resume(self, last: Resumed) -> bool:
        """Continue from what an earlier orchestrator measured; return False if its configuration was another."""
        header = self.beginning()
        if replace(last.header, state=header.state) != header:
            return False
        self.state = last.state
        self.decision = Decision(last.state.target, "continues from the earlier orchestrator")
        self.want = last.state.wants[-1][1] if last.state.wants else None
        logger.info("measurements kept env=%s target=%d", self.env, last.state.target)
        return True

    def beginning(self) -> DecisionLogHeader:
        """Return the log header that later decisions follow from."""
        scaling = self.law.scaling.model_dump()
        return DecisionLogHeader(self.env, self.law.min_workers, self.law.max_workers, scaling, self.state)

    def is_news(self, now: float) -> bool:
        """Return whether to publish the decision: a change at once, anything else periodically."""
        if self.decision.target == self._told and now - self._told_at < REPEAT_S:
            return False
        self._told, self._told_at = self.decision.target, now
        return True

    @property
    def said(self) -> ScaleDecision:
        """Return the last decision with its inputs, to publish."""
        rates, crew = self.state.rates, self._sample.crew
        return ScaleDecision(
            env=self.env,
            at=time.time(),
            rollout_pressure=self._sample.pressure,
            current=crew.current,
            target=self.decision.target,
            reason=self.decision.reason,
            want=self.decision.want,
            bound=self.decision.bound,
            eats_per_s=rates.demand,
            makes_per_s=rates.per_worker,
            starved=rates.starved,
            idle=rates.idle,
            ready=crew.ready,
            starting=crew.starting,
            draining=crew.draining,
            failed=crew.failed,
            joined=crew.joined,
        )


class Autoscaler:
    """The autoscaler of all environments of a run."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentConfig],
        limits: OrchestratorConfig,
        alive_now: Mapping[str, int],
        log: DecisionLog,
        resumed: Mapping[str, Resumed] | None = None,
    ) -> None:
        self.scales = [
            ScaleTarget(name, env, limits, alive_now.get(name, 0)) for name, env in environments.items()
        ]
        self._saturation = SaturationDetector()
        for scale in self.scales:
            last = (resumed or {}).get(scale.env)
            if last is not None and scale.resume(last):
                self._saturation = self._saturation.resumed(scale.env, last.server, last.engines)
        self._budget = limits.max_processes
        self._log = log
        self._shared_at = -math.inf
        self._by_want = False
        """The budget is divided by what the environments want, not by their configured weights."""
        self._is_rebound = False
        self._share(0.0)

    def rebound(self, environments: Mapping[str, EnvironmentConfig], budget: int) -> None:
        """Take other bounds of the environments, and another budget. The next decisions begin with headers."""
        moved = [scale.rebound(environments[scale.env]) for scale in self.scales]
        self._is_rebound |= any(moved)
        if budget == self._budget and not any(moved):
            return
        self._budget, self._shared_at = budget, -math.inf
        for scale in self.scales:
            scale.room = None
        self._share(0.0)

    def decide(
        self,
        crews: Mapping[str, WorkerCounts],
        pressure: Pressure | None,
        heard_at: float,
        now: float,
        rooms: Mapping[str, WorkerRoom] | None = None,
        engines: int = 0,
    ) -> None:
        """Decide for all environments; the decisions are in `scales`.

        Args:
            crews: Worker counts, by environment.
            pressure: The newest message, or None if there was none.
            heard_at: Time of its arrival.
            now: Seconds, monotonic.
            rooms: Other limits on the workers of an environment.
            engines: Inference servers that serve; 0 if unknown.
        """
        if self._log.begins or self._is_rebound:
            self._is_rebound = False
            self._log.begin([scale.beginning() for scale in self.scales])
        lanes = pressure.lanes if pressure is not None else ()
        weights = {(lane.env, lane.split): lane.weight for lane in lanes}
        for scale in self.scales:
            scale.outer = (rooms or {}).get(scale.env)
            scale.joined = crews[scale.env].joined
        uses = [scale.use() for scale in self.scales]
        self._saturation = self._saturation.looked(uses, engines, now)
        for scale, use in zip(self.scales, uses, strict=True):
            scale.server = self._saturation.limit(use, uses)
            scale.weight = weights.get((scale.env, scale.split), scale.weight)
            sample = sample_of(scale.env, scale.split, scale.slots, scale.group_size, pressure, heard_at)
            scale.bound = _beside(_narrowest(scale.room, scale.outer), scale.joined)
            sample = replace(
                sample, crew=crews[scale.env], room=scale.bound, engines=engines, server=scale.server
            )
            decision = scale.decide(sample, now)
            self._log.add(LoggedDecision(scale.env, time.time(), now, sample, decision))
        self._share(now)

    def starts(self, crews: Mapping[str, WorkerCounts]) -> dict[str, int]:
        """Return how many workers of each environment may be started now.

        A draining worker keeps its place, memory and GPU until its process has ended.
        """
        missing = {one.env: max(0, one.missing(crews[one.env])) for one in self.scales}
        if not self._budget:
            return missing
        free = self._budget - sum(crew.current - crew.joined + crew.draining for crew in crews.values())
        for env, number in missing.items():
            missing[env] = min(number, max(0, free))
            free -= missing[env]
        return missing

    def _share(self, now: float) -> None:
        if not self._budget:
            return
        by_want = all(scale.want is not None and not scale.is_pinned for scale in self.scales)
        rooms = allot([scale.claim(by_want=by_want) for scale in self.scales], self._budget)
        # Before the first measurements the weights are a guess: what is measured replaces it at once.
        if by_want == self._by_want and now - self._shared_at < SHARE_S and self._takes_one(rooms):
            return
        self._shared_at, self._by_want = now, by_want
        for scale, room in zip(self.scales, rooms, strict=True):
            scale.room = WorkerRoom(room, BUDGET)

    def _takes_one(self, rooms: Sequence[int]) -> bool:
        """Return whether a division only takes one worker from an environment that has a use for it."""
        if any(scale.room is None for scale in self.scales):
            return False
        before = [scale.room.workers for scale in self.scales if scale.room is not None]
        if max(abs(room - old) for room, old in zip(rooms, before, strict=True)) > 1:
            return False
        return any(
            room < min(old, scale.decision.target)
            for scale, room, old in zip(self.scales, rooms, before, strict=True)
        )


def _narrowest(*rooms: WorkerRoom | None) -> WorkerRoom | None:
    given = (room for room in rooms if room is not None)
    return min(given, key=lambda room: room.workers, default=None)


def _beside(room: WorkerRoom | None, joined: int) -> WorkerRoom | None:
    """Return a limit of this host on all workers, those that joined included."""
    return room if room is None or not joined else replace(room, workers=room.workers + joined)
