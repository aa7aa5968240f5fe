"""The plant: workers that take time to start, a queue that integrates, a trainer that eats whole batches.

Nothing here knows of a controller. Time goes in steps of `DT_S`; all that is random comes from one seed.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rolloutmq.services.orchestrator.pressure import Crew

DT_S: Final = 0.25
DRAIN_S: Final = 3.0
"""Mean time in which a worker that is told to go finishes what it has in hand."""
SPREAD: Final = 0.2
"""Starts take that part longer or shorter."""
IDLE_S: Final = 1.0
"""A trainer that wants nothing looks again after so long."""

Demand = Callable[[float], float]
"""Sequences a second that the trainer would eat, by time."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a plant is like.

    Attributes:
        start_s: Time from the start of a worker to its first rollout.
        per_worker: Sequences a second that one makes by itself.
        noise: Standard deviation of what one makes in a second, as a part of the mean.
        shared: Sequences a second that all of them can make together, whatever they are many.
        batch: Sequences of one batch.
        cap: Sequences that the queue holds; workers wait above it.
        failures: Part of the starts that fail, when they are nearly over, and are tried again.
        rollout_s: Time from the beginning of a rollout to its arrival.
        outage: From when to when nothing is made, since what all workers need is away.
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
    """A plant at work."""

    def __init__(self, site: Site, demand: Demand, seed: int, ready: int = 0, level: float = 0.0) -> None:
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
        """Workers started and sent away, in all."""
        self._demand = demand
        self._random = random.Random(seed)
        self._starting: list[float] = []
        """When each of those that start will be ready."""
        self._draining: list[float] = []
        self._busy_until = 0.0
        self._in_hand = 0
        """Sequences of the batch that is trained."""
        self._under_way: deque[tuple[float, float]] = deque()
        """When how many sequences arrive that were begun."""
        self._begun = 0.0
        """Their sum."""

    @property
    def crew(self) -> Crew:
        return Crew(self.ready, len(self._starting), len(self._draining))

    @property
    def workers(self) -> int:
        """Those that are there or on their way."""
        return self.ready + len(self._starting)

    def scale(self, target: int) -> None:
        """Start or send away workers until there are so many; those that are not ready yet go first."""
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
        """Let one step of time pass."""
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
