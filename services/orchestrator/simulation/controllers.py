"""Controllers of a whole site: the orchestrator's own, the usual rules, and a reference fleet that knows the demand.

The reference fleet sees the need of the moment, not the future. Its workers take the same time to start, and it keeps
the peak of the last `REFERENCE_KEEP_S`, or of one start if that is longer. What it starves and wastes is the price of
starting workers; every other controller is compared with it.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.orchestrator.autoscaling.autoscaler import Autoscaler
from rolloutmq.services.orchestrator.autoscaling.budget import WorkerClaim, allot
from rolloutmq.services.orchestrator.autoscaling.control_law import INFERENCE_BOUND
from rolloutmq.services.orchestrator.autoscaling.decision_log import DecisionLog, LoggedDecision
from rolloutmq.services.orchestrator.autoscaling.pressure import ScalingRule, sample_of
from rolloutmq.services.orchestrator.engines.scaling import EngineBound, EngineScalingRule, PoolSample
from rolloutmq.services.orchestrator.simulation.baselines import PidRule, RatioRule
from rolloutmq.services.orchestrator.simulation.plant import CRASH_PAUSE_S
from rolloutmq.services.orchestrator.simulation.site import GROUP, EnvironmentSite, Scenario
from rolloutmq.services.orchestrator.simulation.trial import Make, Telemetry

REFERENCE_KEEP_S: Final = 60.0
RIVALS_SETPOINT: Final = 5.0
"""Batches that `ratio` and `pid` keep queued: with fewer they starve the trainer earlier."""


class ReferenceFleet:
    """Knows the need of each environment at the moment; see the module."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._peaks: dict[str, deque[tuple[float, int]]] = {
            name: deque() for name in scenario.site.environments
        }

    def decide(self, seen: Telemetry) -> dict[str, int]:
        """See `Controllers`."""
        site, limit = self._scenario.site, self._scenario.max_processes
        wanted = {}
        for name, one in site.environments.items():
            down_s = CRASH_PAUSE_S + one.start_at(seen.now)
            available = one.life_s / (one.life_s + down_s) if one.life_s < math.inf else 1.0
            wanted[name] = math.ceil(site.need(name, seen.now) / available - 1e-9)
        targets = {
            name: min(self._peak(name, wanted[name], seen.now, one.start_at(seen.now)), one.max_workers)
            for name, one in site.environments.items()
        }
        if limit:
            claims = [
                WorkerClaim(one.min_workers, targets[name], one.weight, targets[name])
                for name, one in site.environments.items()
            ]
            targets = dict(zip(targets, allot(claims, limit), strict=True))
        return targets | {name: one.max_engines for name, one in site.servers.items()}

    def _peak(self, env: str, wanted: int, now: float, start_s: float) -> int:
        peaks = self._peaks[env]
        while peaks and peaks[-1][1] <= wanted:
            peaks.pop()
        peaks.append((now, wanted))
        while peaks[0][0] < now - max(REFERENCE_KEEP_S, start_s):
            peaks.popleft()
        return peaks[0][1]


class RuleControllers:
    """One rule for each environment, as the orchestrator would run it."""

    def __init__(
        self,
        scenario: Scenario,
        running: Mapping[str, int],
        rule: Callable[[EnvironmentSite], ScalingRule[Any]],
    ) -> None:
        environments = scenario.site.environments
        self._rules = {name: rule(one) for name, one in environments.items()}
        self._groups = {name: one.group_sequences or GROUP for name, one in environments.items()}
        self._slots = {name: one.slots for name, one in environments.items()}
        self._states = {name: one.initial(running[name]) for name, one in self._rules.items()}

    def decide(self, seen: Telemetry) -> dict[str, int]:
        """See `Controllers`."""
        targets = {}
        for name, rule in self._rules.items():
            sample = sample_of(
                name, Split.TRAIN, self._slots[name], self._groups[name], seen.pressure, seen.heard_at
            )
            sample = replace(sample, crew=seen.crews[name])
            self._states[name], decision = rule.decide(self._states[name], sample, seen.now)
            targets[name] = decision.target
        return targets


class OwnControllers:
    """The orchestrator's autoscaler and its rule for engines."""

    def __init__(self, scenario: Scenario, running: Mapping[str, int]) -> None:
        site = scenario.site
        self._site = site
        limits = OrchestratorConfig(scaling=scenario.scaling, max_processes=scenario.max_processes)
        self.autoscaler = Autoscaler(
            {name: _environment(one) for name, one in site.environments.items()}, limits, running, _NoLog()
        )
        defaults = InferenceConfig()
        self._engines = {
            name: EngineScalingRule(1, one.max_engines, defaults.engine_confirm_s, defaults.engine_idle_s)
            for name, one in site.servers.items()
        }
        self._pools = {name: rule.initial() for name, rule in self._engines.items()}

    def decide(self, seen: Telemetry) -> dict[str, int]:
        """See `Controllers`."""
        serving = min((counts.ready for counts, _ in seen.engines.values()), default=0)
        self.autoscaler.decide(seen.crews, seen.pressure, seen.heard_at, seen.now, None, serving)
        said = {scale.env: scale.decision for scale in self.autoscaler.scales}
        starts = self.autoscaler.starts(seen.crews)
        # A worker that failed for good keeps its place until it is replaced: nobody leaves in its stead.
        held = {env: crew.current + crew.failed for env, crew in seen.crews.items()}
        targets = {env: min(decision.target, held[env] + starts[env]) for env, decision in said.items()}
        for name, rule in self._engines.items():
            bounds = {
                env: EngineBound(said[env].bound == INFERENCE_BOUND, said[env].short)
                for env, one in self._site.environments.items()
                if one.server == name
            }
            crew, busy = seen.engines[name]
            self._pools[name], decision = rule.decide(
                self._pools[name], PoolSample(crew, bounds, busy), seen.now
            )
            targets[name] = decision.target
        return targets


class _NoLog(DecisionLog):
    """Writes nothing."""

    def __init__(self) -> None:
        super().__init__(Path())

    @property
    def begins(self) -> bool:
        return False

    def add(self, made: LoggedDecision) -> None:
        """Forget the decision."""


def _environment(one: EnvironmentSite) -> EnvironmentConfig:
    return EnvironmentConfig(
        entry="simulated.py:Simulated",
        group_size=one.group_sequences or GROUP,
        concurrency=one.slots,
        weight=one.weight,
        min_workers=one.min_workers,
        max_workers=one.max_workers,
    )


REFERENCE: Final = "reference"
CONTROLLERS: Final[dict[str, Make]] = {
    REFERENCE: lambda scenario, _: ReferenceFleet(scenario),
    "rolloutmq": OwnControllers,
    "ratio": lambda scenario, running: RuleControllers(
        scenario, running, lambda one: RatioRule(one.min_workers, one.max_workers, RIVALS_SETPOINT)
    ),
    "pid": lambda scenario, running: RuleControllers(
        scenario, running, lambda one: PidRule(one.min_workers, one.max_workers, RIVALS_SETPOINT)
    ),
}
"""Controllers by name; the reference fleet first."""
