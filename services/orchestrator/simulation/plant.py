"""The plant: workers that start, crash and drain, queues that integrate, a trainer that consumes whole batches.

The plant knows no controller. Time advances in steps of `DT_S`; all randomness comes from one seed.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.simulation.site import GROUP, EnvironmentSite, ServerSite, Site

DT_S: Final = 0.25
DRAIN_S: Final = 3.0
"""Mean time a draining worker takes to finish its rollouts."""
SPREAD: Final = 0.2
"""Relative spread of start-up times."""
IDLE_S: Final = 1.0
"""Polling interval of a trainer without demand."""
CRASH_PAUSE_S: Final = 1.0
"""Pause of the supervisor before it restarts a crashed worker."""
DEBT: Final = 2.0
"""Batches that an environment without groups may be owed."""
REPLACED_S: Final = 10.0
"""Time for which a worker that failed for good keeps its place."""


class Crew:
    """The workers of one environment."""

    def __init__(self, site: EnvironmentSite, chance: random.Random) -> None:
        self.site = site
        self.ready = 0
        self.moved = 0
        """Workers started and removed, in total."""
        self._chance = chance
        self._starting: list[float] = []
        """Times at which starting workers are ready; those of restarted workers apart."""
        self._restarting: list[float] = []
        self._draining: list[float] = []
        self._failed: list[float] = []
        """Times at which the place of a failed worker is free."""
        self._deaths: list[float] = []
        """Heap of the times at which ready workers crash."""
        self._lost = deque(sorted(site.lost))
        self._add_ready(site.ready, 0.0)

    @property
    def counts(self) -> WorkerCounts:
        """Return the counts, as the supervisor has them."""
        return WorkerCounts(
            ready=self.ready,
            starting=len(self._starting) + len(self._restarting),
            draining=len(self._draining),
            failed=len(self._failed),
            restarting=len(self._restarting),
            start_s=self.site.start_s,
        )

    @property
    def drainers(self) -> int:
        """Return the draining workers."""
        return len(self._draining)

    @property
    def holding(self) -> int:
        """Return the workers that count as waste if there is no need: not those that crashed and start again."""
        return self.ready + len(self._starting) + len(self._draining)

    @property
    def alive(self) -> int:
        """Return the workers that are ready or about to be."""
        return self.ready + len(self._starting) + len(self._restarting)

    def scale(self, target: int, now: float) -> None:
        """Start or remove workers to reach the target; starting ones go first."""
        change = target - self.counts.current
        self.moved += abs(change)
        for _ in range(change):
            self._starting.append(now + self._start_s())
        for _ in range(-change):
            for waiting in (self._failed, self._restarting, self._starting):
                if waiting:
                    waiting.remove(max(waiting))
                    break
            else:
                self._remove_ready()
                ends_s = self.site.rollout_s + self._chance.expovariate(1.0 / DRAIN_S)
                self._draining.append(now + ends_s)

    def advance(self, now: float) -> int:
        """Start, crash and end what is due; return the number of crashed workers."""
        if self._starting:
            self._starting = self._begun(self._starting, now)
        if self._restarting:
            self._restarting = self._begun(self._restarting, now)
        if self._draining:
            self._draining = [at for at in self._draining if at > now]
        if self._failed:
            self._failed = [at for at in self._failed if at > now]
        crashed = 0
        while self._deaths and self._deaths[0] <= now:
            heapq.heappop(self._deaths)
            self.ready -= 1
            crashed += 1
            self._restarting.append(now + CRASH_PAUSE_S + self._start_s())
        while self._lost and self._lost[0][0] <= now:
            lost = min(self._lost.popleft()[1], self.ready)
            for _ in range(lost):
                self._remove_ready()
                self._failed.append(now + REPLACED_S)
            crashed += lost
        return crashed

    def _begun(self, waiting: list[float], now: float) -> list[float]:
        left = [at for at in waiting if at > now]
        for _ in range(len(waiting) - len(left)):
            if self._chance.random() < self.site.failing_starts:
                left.append(now + self._start_s())
            else:
                self._add_ready(1, now)
        return left

    def _add_ready(self, number: int, now: float) -> None:
        self.ready += number
        if self.site.life_s < math.inf:
            for _ in range(number):
                heapq.heappush(self._deaths, now + self._chance.expovariate(1.0 / self.site.life_s))

    def _remove_ready(self) -> None:
        self.ready -= 1
        if self._deaths:
            self._deaths.remove(self._chance.choice(self._deaths))
            heapq.heapify(self._deaths)

    def _start_s(self) -> float:
        return self.site.start_s * self._chance.uniform(1.0 - SPREAD, 1.0 + SPREAD)


class Lane:
    """The queue of one environment, and its rollouts under way."""

    def __init__(self, site: EnvironmentSite, room: float, level: float, chance: random.Random) -> None:
        self.site = site
        self.crew = Crew(site, chance)
        self.room = room
        self.level = level
        """Sequences in the queue."""
        self.made = self.eaten = 0.0
        self.waited_s = 0.0
        """Time its workers waited for room, summed over them."""
        self.served = 0.0
        """Sequences taken by the trainer over the weight: the least served is next."""
        self._chance = chance
        self._under_way: deque[tuple[float, float]] = deque()
        """Arrival times and sequences of running rollouts."""
        self._begun = 0.0
        """Their total."""

    def crash(self, crashed: int) -> None:
        """Lose the running rollouts of crashed workers."""
        before = self.crew.ready + self.crew.drainers + crashed
        if not crashed or not self._under_way:
            return
        kept = 1.0 - crashed / before
        self._under_way = deque((at, size * kept) for at, size in self._under_way)
        self._begun *= kept

    def offer(self, now: float) -> tuple[float, float]:
        """Return the sequences its workers could begin in this step, and those there is room for."""
        site, crew = self.site, self.crew
        workers = crew.ready + (0 if site.rollout_s else crew.drainers)
        if not workers or any(begin <= now < end for begin, end in site.outages):
            return 0.0, 0.0
        spread = site.noise / math.sqrt(workers * DT_S)
        could = max(0.0, workers * site.per_worker.at(now) * DT_S * self._chance.gauss(1.0, spread))
        return could, min(could, max(0.0, self.room - self.level - self._begun))

    def make(self, now: float, could: float, begun: float) -> None:
        """Begin this many sequences where so many could be begun, and let those arrive that are due."""
        if could > 0.0:
            self.waited_s += self.crew.ready * DT_S * (1.0 - begun / could)
        self._under_way.append((now + self.site.rollout_s, begun))
        self._begun += begun
        while self._under_way and self._under_way[0][0] <= now:
            arrived = self._under_way.popleft()[1]
            self._begun -= arrived
            self.level += arrived
            self.made += arrived


class Server:
    """An inference server with its engines."""

    def __init__(self, site: ServerSite) -> None:
        self.site = site
        self.engines = 1
        self._starting: list[float] = []

    @property
    def counts(self) -> WorkerCounts:
        """Return the counts of its engines."""
        return WorkerCounts(ready=self.engines, starting=len(self._starting))

    def scale(self, target: int, now: float) -> None:
        """Start or remove engines to reach the target."""
        for _ in range(target - self.counts.current):
            self._starting.append(now + self.site.start_s)
        if target < self.engines and not self._starting:
            self.engines = target

    def advance(self, now: float) -> None:
        """Let engines serve that are due."""
        if self._starting:
            left = [at for at in self._starting if at > now]
            self.engines += len(self._starting) - len(left)
            self._starting = left

    def capacity(self, now: float) -> float:
        """Return the sequences of one step that it has capacity for."""
        return self.engines * self.site.capacity.at(now) * DT_S


class Plant:
    """A running plant."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.now = 0.0
        self.trainer_waited_s = 0.0
        self.settled_busy_s = 0.0
        """Time without waits of the trainer, at its last settlement."""
        chance = random.Random(seed)
        trainer = site.trainer
        self.lanes = {
            name: Lane(one, trainer.queue * share, trainer.queued * share, chance)
            for (name, one), share in zip(site.environments.items(), site.shares.values(), strict=True)
        }
        self.servers = {name: Server(one) for name, one in site.servers.items()}
        self._busy_until = 0.0
        self._in_hand: dict[str, float] = {}
        """Sequences of the batch in training, by environment."""

    @property
    def level(self) -> float:
        """Return the queued sequences of all environments."""
        return sum(lane.level for lane in self.lanes.values())

    @property
    def has_trainer(self) -> bool:
        """Return whether a trainer is connected."""
        return not any(begin <= self.now < end for begin, end in self.site.trainer.away)

    def busy(self, server: str) -> float:
        """Return the busy part of a server's engines, summed over them."""
        one = self.servers[server]
        whole = sum(
            lane.crew.ready * lane.site.per_worker.at(self.now)
            for lane in self.lanes.values()
            if lane.site.server == server
        )
        capacity = one.site.capacity.at(self.now)
        return min(float(one.engines), whole / capacity) if capacity > 0.0 else float(one.engines)

    def advance(self) -> None:
        """Advance by one time step."""
        self.now += DT_S
        for server in self.servers.values():
            server.advance(self.now)
        for lane in self.lanes.values():
            lane.crash(lane.crew.advance(self.now))
        self._make()
        self._eat()

    def _make(self) -> None:
        offers = {name: lane.offer(self.now) for name, lane in self.lanes.items()}
        parts = {
            name: self._part(server, (offers[env][1] for env in self._of(name)))
            for name, server in self.servers.items()
        }
        for name, lane in self.lanes.items():
            could, begun = offers[name]
            part = parts.get(lane.site.server, 1.0)
            lane.make(self.now, could * part, begun * part)

    def _of(self, server: str) -> Iterable[str]:
        return (name for name, lane in self.lanes.items() if lane.site.server == server)

    def _part(self, server: Server, wanted: Iterable[float]) -> float:
        whole = sum(wanted)
        return min(1.0, server.capacity(self.now) / whole) if whole > 0.0 else 1.0

    def _eat(self) -> None:
        if not self.has_trainer:
            self._give_back()
            return
        if self.now < self._busy_until:
            return
        if self._in_hand:
            self.settled_busy_s = self._busy_until - self.trainer_waited_s
        for name, size in self._in_hand.items():
            self.lanes[name].eaten += size
        self._in_hand = {}
        trainer = self.site.trainer
        rate = trainer.demand.at(self.now)
        if rate <= 0.0:
            self._busy_until = self.now + IDLE_S
        elif self.level < trainer.batch:
            self.trainer_waited_s += min(DT_S, self.now - self._busy_until)
        else:
            self._take(trainer.batch)
            began = self._busy_until if self.now - self._busy_until < DT_S else self.now
            self.trainer_waited_s += max(0.0, min(DT_S, began - self._busy_until))
            self._busy_until = began + trainer.batch / rate

    def _give_back(self) -> None:
        for name, size in self._in_hand.items():
            self.lanes[name].level += size
        self._in_hand = {}
        self._busy_until = self.now

    def _take(self, batch: int) -> None:
        """Take a batch, group by group from the least served environment that has one."""
        left = float(batch)
        lanes = [(name, lane) for name, lane in self.lanes.items() if lane.level > 0.0]
        while len(lanes) > 1 and left > 1e-9:
            name, lane = min(lanes, key=lambda one: one[1].served)
            size = min(left, float(GROUP), lane.level)
            self._take_from(name, lane, size)
            left -= size
            if lane.level <= 1e-9:
                lanes.remove((name, lane))
        if len(lanes) == 1 and left > 1e-9:
            self._take_from(*lanes[0], left)
        owed = max(lane.served for lane in self.lanes.values()) - DEBT * batch
        for lane in self.lanes.values():
            lane.served = max(lane.served, owed)

    def _take_from(self, name: str, lane: Lane, size: float) -> None:
        lane.level -= size
        lane.served += size / lane.site.weight
        self._in_hand[name] = self._in_hand.get(name, 0.0) + size
