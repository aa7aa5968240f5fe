"""The plant: workers with a start-up time, a queue that integrates, a trainer that consumes whole batches.

The plant knows no controller. Time advances in steps of `DT_S`; all randomness comes from one seed.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts

DT_S: Final = 0.25
DRAIN_S: Final = 3.0
"""Mean time a draining worker takes to finish its rollouts."""
SPREAD: Final = 0.2
"""Relative spread of start-up times."""
IDLE_S: Final = 1.0
"""Polling interval of a trainer without demand."""

Demand = Callable[[float], float]
"""The trainer's demand in sequences per second, over time."""


@dataclass(frozen=True, slots=True)
class PlantParameters:
    """Parameters of a plant.

    Attributes:
        start_s: Time from the start of a worker to its first rollout.
        per_worker: Throughput of one worker alone, in sequences per second.
        noise: Standard deviation of a worker's output per second, relative to the mean.
        shared: Maximum throughput of all workers together, in sequences per second.
        batch: Sequences of one batch.
        cap: Capacity of the queue in sequences; beyond it workers wait.
        failures: Part of the starts that fail near their end and are repeated.
        rollout_s: Time from the start of a rollout to its arrival.
        outage: Start and end of an outage of a shared dependency, without any output.
    """

    start_s: float = 20.0
    per_worker: float = 2.0
    noise: float = 0.25
    shared: float = float("inf")
    batch: int = 64
    cap: int = 1000
    failures: float = 0.0
    rollout_s: float = 0.0
    outage: tuple[float, float] = (float("inf"), float("inf"))


class Plant:
    """A running plant."""

    def __init__(
        self, site: PlantParameters, demand: Demand, seed: int, ready: int = 0, level: float = 0.0
    ) -> None:
        self.site = site
        self.now = 0.0
        self.level = level
        """Sequences in the queue."""
        self.ready = ready
        self.made = 0.0
        self.eaten = 0.0
        self.trainer_waited_s = 0.0
        self.workers_waited_s = 0.0
        self.moved = 0
        """Workers started and removed, in total."""
        self._demand = demand
        self._random = random.Random(seed)
        self._starting: list[float] = []
        """Ready times of the starting workers."""
        self._draining: list[float] = []
        self._busy_until = 0.0
        self._in_hand = 0
        """Sequences of the batch in training."""
        self._under_way: deque[tuple[float, float]] = deque()
        """Arrival times and sizes of running rollouts."""
        self._begun = 0.0
        """Their total."""

    @property
    def crew(self) -> WorkerCounts:
        return WorkerCounts(self.ready, len(self._starting), len(self._draining))

    @property
    def workers(self) -> int:
        """Return the workers that are running or starting."""
        return self.ready + len(self._starting)

    def scale(self, target: int) -> None:
        """Start or remove workers to reach the target; starting ones go first."""
        change = target - self.workers
        self.moved += abs(change)
        for _ in range(change):
            self._starting.append(self.now + self._start_s())
        for _ in range(-change):
            if self._starting:
                self._starting.remove(max(self._starting))
            else:
                self.ready -= 1
                ends_s = self.site.rollout_s + self._random.expovariate(1.0 / DRAIN_S)
                self._draining.append(self.now + ends_s)

    def advance(self) -> None:
        """Advance by one time step."""
        self.now += DT_S
        self._begin_and_end()
        self._make()
        self._arrive()
        self._eat()

    def _start_s(self) -> float:
        return self.site.start_s * self._random.uniform(1.0 - SPREAD, 1.0 + SPREAD)

    def _begin_and_end(self) -> None:
        due = [at for at in self._starting if at <= self.now]
        self._starting = [at for at in self._starting if at > self.now]
        for _ in due:
            if self._random.random() < self.site.failures:
                self._starting.append(self.now + self._start_s())
            else:
                self.ready += 1
        self._draining = [at for at in self._draining if at > self.now]

    def _make(self) -> None:
        site = self.site
        workers = self.ready + (0 if site.rollout_s else len(self._draining))
        if not workers:
            return
        away = site.outage[0] <= self.now < site.outage[1]
        rate = 0.0 if away else min(workers * site.per_worker, site.shared)
        spread = site.noise / (workers * DT_S) ** 0.5
        could = max(0.0, rate * DT_S * self._random.gauss(1.0, spread))
        begun = min(could, max(0.0, site.cap - self.level - self._begun))
        self.workers_waited_s += self.ready * DT_S * (1.0 - begun / could if could else 0.0)
        self._under_way.append((self.now + site.rollout_s, begun))
        self._begun += begun

    def _arrive(self) -> None:
        while self._under_way and self._under_way[0][0] <= self.now:
            made = self._under_way.popleft()[1]
            self._begun -= made
            self.level += made
            self.made += made

    def _eat(self) -> None:
        if self.now < self._busy_until:
            return
        self.eaten += self._in_hand
        self._in_hand = 0
        rate = self._demand(self.now)
        if rate <= 0.0:
            self._busy_until = self.now + IDLE_S
        elif self.level < self.site.batch:
            self.trainer_waited_s += min(DT_S, self.now - self._busy_until)
        else:
            self.level -= self.site.batch
            self._in_hand = self.site.batch
            began = self._busy_until if self.now - self._busy_until < DT_S else self.now
            self.trainer_waited_s += min(DT_S, began - self._busy_until)
            self._busy_until = began + self.site.batch / rate
