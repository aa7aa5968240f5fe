"""What is simulated: a trainer, environments with their workers, and inference servers. Pure data.

A scenario is a site and what happens to the controller: lost telemetry, darkness, a restart, a clock jump.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.simulation.series import Series, constant

GROUP: Final = 8
"""Sequences of one group where sequences are a fluid: for the controllers, and for means over groups."""
FOUND_STARTS, FOUND_S = 10.0, 10.0
"""Time to find the capacity of a shared server: so many times a start with the first rollout and so many seconds."""


@dataclass(frozen=True, slots=True)
class TrainerSite:
    """The trainer, and the queue before it.

    Attributes:
        demand: Sequences per second that it consumes while it does not wait. 0: it pauses, and waits for nothing.
        batch: Sequences of the largest batch; it trains for `batch / demand` seconds on one.
        queue: Capacity of the queue in sequences, divided by the weights; beyond it workers wait.
        away: Times from which to which no trainer is connected; its batch returns to the queue.
        queued: Sequences in the queue at the start.
        batch_part: Part of `batch` that a batch has, over time.
    """

    demand: Series
    batch: int = 64
    queue: int = 1000
    away: tuple[tuple[float, float], ...] = ()
    queued: float = 0.0
    batch_part: Series = field(default_factory=lambda: constant(1.0))

    def batch_at(self, at: float) -> int:
        """Return the sequences of a batch at a time."""
        return max(1, round(self.batch * self.batch_part.at(at)))


@dataclass(frozen=True, slots=True)
class EnvironmentSite:
    """An environment and its workers.

    Attributes:
        per_worker: Sequences per second of one worker alone; above 0.
        start_s: Longest mean time from the start of a worker to its first rollout.
        rollout_s: Time from the start of a rollout to its arrival; longer on a full server.
        turns: Completions of a rollout, one after another. With several, a worker begins its sequences at once.
        weight: Its share of a batch, relative to the others.
        noise: Standard deviation of a worker's output in one second, relative to the mean.
        failing_starts: Part of the starts that fail near their end and are repeated.
        life_s: Mean time until a ready worker crashes and restarts; infinite without crashes.
        lost: Times at which so many ready workers fail for good.
        outages: Times from which to which nothing is produced.
        server: Inference server that its workers share, or empty.
        min_workers, max_workers: Bounds of its workers.
        ready: Ready workers at the start.
        start_part: Part of `start_s` that a start takes, over time.
        group_sequences: Sequences of a group, begun whole and at random times; 0: sequences are a fluid.
    """

    per_worker: Series = field(default_factory=lambda: constant(2.0))
    start_s: float = 20.0
    rollout_s: float = 0.0
    turns: int = 1
    weight: float = 1.0
    noise: float = 0.25
    failing_starts: float = 0.0
    life_s: float = math.inf
    lost: tuple[tuple[float, int], ...] = ()
    outages: tuple[tuple[float, float], ...] = ()
    server: str = ""
    min_workers: int = 1
    max_workers: int = 200
    ready: int = 0
    start_part: Series = field(default_factory=lambda: constant(1.0))
    group_sequences: int = 0

    def start_at(self, at: float) -> float:
        """Return the mean time that a start takes at a time."""
        return self.start_s * self.start_part.at(at)

    @property
    def slots(self) -> int:
        """Return the groups that a worker rolls out at once."""
        return max(1, round(self.per_worker.at(0.0) * self.rollout_s / (self.group_sequences or GROUP)))

    @property
    def begins(self) -> int:
        """Return the workers at the start: ready ones, and those that start to reach the minimum."""
        return max(self.ready, self.min_workers)


@dataclass(frozen=True, slots=True)
class ServerSite:
    """An inference server that several workers share.

    Attributes:
        capacity: Sequences per second of one engine; above 0.
        max_engines: Engines that may run; one runs from the start.
        start_s: Time until another engine serves.
    """

    capacity: Series
    max_engines: int = 1
    start_s: float = 60.0


@dataclass(frozen=True)
class Site:
    """All of a run."""

    trainer: TrainerSite
    environments: Mapping[str, EnvironmentSite]
    servers: Mapping[str, ServerSite] = field(default_factory=dict)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Return the part of a batch from each environment."""
        whole = sum(one.weight for one in self.environments.values())
        return {name: one.weight / whole for name, one in self.environments.items()}

    @cached_property
    def served(self) -> dict[str, float]:
        """Return the part of a batch that each server helps to make."""
        return {
            server: sum(self.shares[name] for name, one in self.environments.items() if one.server == server)
            for server in self.servers
        }

    def need(self, env: str, at: float) -> float:
        """Return the workers of an environment that add throughput the trainer consumes, as a real number.

        A shared server has all engines that may run. Crashes and the process budget do not count.
        """
        one, demand = self.environments[env], self.trainer.demand.at(at)
        wanted = demand * self.shares[env]
        if one.server:
            whole, server = demand * self.served[one.server], self.servers[one.server]
            capacity = server.capacity.at(at) * server.max_engines
            wanted *= min(1.0, capacity / whole) if whole > 0.0 else 1.0
        return min(max(wanted / one.per_worker.at(at), float(one.min_workers)), float(one.max_workers))

    def engines(self, server: str, at: float) -> int:
        """Return the engines of a server that the trainer's demand needs; one at least, and no more than may run."""
        one, whole = self.servers[server], self.trainer.demand.at(at) * self.served[server]
        return min(max(1, math.ceil(whole / one.capacity.at(at) - 1e-9)), one.max_engines)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A site, and what happens to its controller.

    Attributes:
        name: Short name.
        site: What is simulated.
        changes: Times of lasting changes of the need; figures count from the first one.
        lasts_s: Duration in seconds.
        since_s: Time from which figures count if there are no changes.
        max_processes: Most workers of all environments; 0 without a limit.
        loss: Part of the ticks without telemetry.
        dark: Start and end of a time without any telemetry.
        unseen_s: Time for which a change cannot be seen: the darkness, or until the trainer has completed a step before
            and one after it. The bound on the settling time grows by it.
        restart_at: Time of a restart of the controller, which forgets everything.
        jump: Time and size of a jump of its clock.
        is_fresh: It is about the start itself: how long the trainer starves until the first workers are there has no
            bound, and does not count.
        scaling: Parameters of the orchestrator's own controllers.
    """

    name: str
    site: Site
    changes: tuple[float, ...] = ()
    lasts_s: float = 1800.0
    since_s: float = 0.0
    max_processes: int = 0
    loss: float = 0.0
    dark: tuple[float, float] = (math.inf, math.inf)
    unseen_s: float = 0.0
    restart_at: float = math.inf
    jump: tuple[float, float] = (math.inf, 0.0)
    is_fresh: bool = False
    scaling: ScalingConfig = field(default_factory=ScalingConfig.default)

    @property
    def without_crashes(self) -> "Scenario":
        """Return the scenario with workers that never crash."""
        kept = {name: replace(one, life_s=math.inf) for name, one in self.site.environments.items()}
        return replace(self, site=Site(self.site.trainer, kept, self.site.servers))

    @property
    def has_crashes(self) -> bool:
        """Return whether ready workers crash."""
        return any(one.life_s < math.inf for one in self.site.environments.values())

    @property
    def found_by_s(self) -> float:
        """Return the time within which the capacity of a shared server is found, by the starts of its beginning."""
        at = self.counts_from_s
        arrives_s = max(one.start_at(at) + one.rollout_s for one in self.site.environments.values())
        return FOUND_STARTS * (arrives_s + FOUND_S)

    @property
    def start_s(self) -> float:
        """Return the longest start of a worker."""
        return max(one.start_s for one in self.site.environments.values())

    @property
    def counts_from_s(self) -> float:
        """Return the time from which figures count."""
        return self.changes[0] if self.changes else self.since_s
