"""The plant: workers that start, crash and drain, queues that integrate, a trainer that consumes whole batches.

The plant knows no controller. Time advances in steps of `DT_S`; the trainer takes and settles batches at exact times.
Sequences are a fluid: real numbers, not groups. All randomness comes from one seed.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.simulation.site import EnvironmentSite, ServerSite, Site

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
"""Shares of a batch that an environment without groups may be owed."""
REPLACED_S: Final = 10.0
"""Time for which a worker that failed for good keeps its place."""
BUSY_S: Final = 1.0
"""Time constant of the busy part of an inference server."""
NOTHING: Final = 1e-9
"""Sequences too few to count: they are rounding errors."""


class Crew:
    """The workers of one environment."""

    def __init__(self, site: EnvironmentSite, chance: random.Random) -> None:
        self.site = site
        self.ready = 0
        self.moved = 0
        """Workers started and removed, in total."""
        self._chance = chance
        self._starting: list[float] = []
        """Times at which starting workers are ready."""
        self._restarting: list[float] = []
        """The same of workers that crashed."""
        self._draining: list[float] = []
        self._failed: list[float] = []
        """Times at which the place of a failed worker is free."""
        self._deaths: list[float] = []
        """Heap of the times at which ready workers crash."""
        self._lost = deque(sorted(site.lost))
        self._add_ready(site.ready, 0.0)

    @property
    def current(self) -> int:
        """Return the workers that count towards the target."""
        return self.ready + len(self._starting) + len(self._restarting) + len(self._failed)

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
        """Return the workers that cost something: all but those that crashed."""
        return self.ready + len(self._starting) + len(self._draining)

    @property
    def alive(self) -> int:
        """Return the workers that are ready or about to be."""
        return self.ready + len(self._starting) + len(self._restarting)

    def scale(self, target: int, now: float) -> None:
        """Start or remove workers to reach the target; starting ones go first."""
        change = target - self.current
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
    """The queue of one environment, and its rollouts under way.

    Attributes:
        crew: Its workers.
        share: Part of a batch from this environment.
        room: Most sequences queued and under way.
        level: Sequences in the queue.
        made, eaten: Sequences that arrived, and those of settled batches.
        held: Sequences of the batch in training.
        waited_s: Time its workers waited for room, summed over them.
        served: Sequences taken by the trainer over the share, from a common origin: the least served is next.
    """

    def __init__(
        self, site: EnvironmentSite, share: float, room: float, level: float, chance: random.Random
    ) -> None:
        self.site = site
        self.crew = Crew(site, chance)
        self.share = share
        self.room = room
        self.level = level
        self.made = self.eaten = self.held = 0.0
        self.waited_s = 0.0
        self.served = 0.0
        self._chance = chance
        self._under_way: deque[tuple[float, float]] = deque()
        """Arrival times and sequences of running rollouts, over `_kept`."""
        self._kept = 1.0
        """Part of the rollouts under way that no crash has lost."""
        self._begun = 0.0
        """Sequences under way."""

    def advance(self, now: float) -> None:
        """Advance the workers; crashed ones lose their running rollouts."""
        crashed = self.crew.advance(now)
        if crashed and self._under_way:
            self._lose(crashed / (self.crew.ready + self.crew.drainers + crashed))

    def _lose(self, part: float) -> None:
        self._begun *= 1.0 - part
        self._kept *= 1.0 - part
        if self._kept < NOTHING:
            self._under_way.clear()
            self._begun, self._kept = 0.0, 1.0

    def offer(self, now: float) -> tuple[float, float]:
        """Return the sequences its workers could begin in this step, and those there is room for."""
        site, crew = self.site, self.crew
        workers = crew.ready if site.rollout_s else crew.ready + crew.drainers
        if not workers or (site.outages and _is_within(site.outages, now)):
            return 0.0, 0.0
        could = workers * site.per_worker.at(now) * DT_S
        if site.noise:
            could *= max(0.0, self._chance.gauss(1.0, site.noise / math.sqrt(workers * DT_S)))
        return could, min(could, max(0.0, self.room - self.level - self._begun))

    def make(self, now: float, could: float, begun: float) -> None:
        """Begin this many sequences where so many could be begun, and let those arrive that are due."""
        if begun < could:
            self.waited_s += self.crew.ready * DT_S * (1.0 - begun / could)
        if not self.site.rollout_s:
            self.level += begun
            self.made += begun
            return
        under_way = self._under_way
        if begun:
            under_way.append((now + self.site.rollout_s, begun / self._kept))
            self._begun += begun
        while under_way and under_way[0][0] <= now:
            arrived = under_way.popleft()[1] * self._kept
            self._begun = max(0.0, self._begun - arrived)
            self.level += arrived
            self.made += arrived

    def take(self, size: float) -> None:
        """Give sequences to the trainer."""
        self.level = max(0.0, self.level - size)
        self.held += size
        self.served += size / self.share

    def settle(self) -> None:
        """Count the sequences of the batch in training as consumed."""
        self.eaten += self.held
        self.held = 0.0

    def give_back(self) -> None:
        """Return the sequences of the batch in training to the queue."""
        self.level += self.held
        self.held = 0.0


class Server:
    """An inference server with its engines.

    Attributes:
        engines: Engines that serve.
        busy: Busy part of its engines in the last second, summed over them.
    """

    def __init__(self, site: ServerSite, lanes: Sequence[Lane]) -> None:
        self.site = site
        self.engines = 1
        self.busy = 0.0
        self._lanes = lanes
        """Those whose workers share it."""
        self._starting: list[float] = []

    @property
    def counts(self) -> WorkerCounts:
        """Return the counts of its engines."""
        return WorkerCounts(ready=self.engines, starting=len(self._starting))

    def scale(self, target: int, now: float) -> None:
        """Start or remove engines to reach the target; none is removed while another starts."""
        for _ in range(target - self.engines - len(self._starting)):
            self._starting.append(now + self.site.start_s)
        if target < self.engines and not self._starting:
            self.engines = target

    def advance(self, now: float) -> None:
        """Let engines serve that are due."""
        if self._starting:
            left = [at for at in self._starting if at > now]
            self.engines += len(self._starting) - len(left)
            self._starting = left

    def serve(self, now: float) -> None:
        """Let its workers make what they can, divided alike where that exceeds its capacity."""
        offers = [lane.offer(now) for lane in self._lanes]
        whole = sum(begun for _, begun in offers)
        one = self.site.capacity.at(now) * DT_S
        part = min(1.0, self.engines * one / whole) if whole > 0.0 else 1.0
        self.busy += (part * whole / one - self.busy) * DT_S / BUSY_S
        for lane, (could, begun) in zip(self._lanes, offers, strict=True):
            lane.make(now, part * could, part * begun)


class Plant:
    """A running plant.

    Attributes:
        now: Seconds since the start.
        lanes: Queues by environment.
        servers: Inference servers by name.
        trainer_waited_s: Time in which the trainer waited.
        settled_busy_s: Time without waits of the trainer, at its last settlement.
    """

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.now = 0.0
        self.trainer_waited_s = 0.0
        self.settled_busy_s = 0.0
        chance = random.Random(seed)
        trainer = site.trainer
        self.lanes = {
            name: Lane(one, share, trainer.queue * share, trainer.queued * share, chance)
            for (name, one), share in zip(site.environments.items(), site.shares.values(), strict=True)
        }
        self.servers = {
            name: Server(one, [lane for lane in self.lanes.values() if lane.site.server == name])
            for name, one in site.servers.items()
        }
        self._lanes = tuple(self.lanes.values())
        self._alone = tuple(lane for lane in self._lanes if not lane.site.server)
        """Lanes whose workers share no server."""
        self._busy_until = 0.0
        self._has_batch = self._waits = False

    @property
    def level(self) -> float:
        """Return the queued sequences of all environments."""
        level = 0.0
        for lane in self._lanes:
            level += lane.level
        return level

    @property
    def has_trainer(self) -> bool:
        """Return whether a trainer is connected."""
        away = self.site.trainer.away
        return not (away and _is_within(away, self.now))

    def advance(self) -> None:
        """Advance by one time step."""
        self.now += DT_S
        now = self.now
        for lane in self._lanes:
            lane.advance(now)
        for lane in self._alone:
            lane.make(now, *lane.offer(now))
        for server in self.servers.values():
            server.advance(now)
            server.serve(now)
        self._train()

    def _train(self) -> None:
        """Let the trainer settle and take what falls into this step."""
        if not self.has_trainer:
            for lane in self._lanes:
                lane.give_back()
            self._has_batch = self._waits = False
            self._busy_until = self.now
            return
        trainer = self.site.trainer
        while self._busy_until <= self.now:
            if self._has_batch:
                self._settle()
            rate = trainer.demand.at(self._busy_until)
            if rate <= 0.0:
                self._busy_until += IDLE_S
                self._waits = False
                continue
            if self._waits:
                self._wait()
            if self.level < trainer.batch - NOTHING:
                self._wait()
                self._waits = True
                return
            self._waits = False
            self._take(trainer.batch)
            self._busy_until += trainer.batch / rate

    def _wait(self) -> None:
        self.trainer_waited_s += self.now - self._busy_until
        self._busy_until = self.now

    def _settle(self) -> None:
        self.settled_busy_s = self._busy_until - self.trainer_waited_s
        for lane in self._lanes:
            lane.settle()
        self._has_batch = False

    def _take(self, batch: int) -> None:
        """Take a batch from the least served environments that have sequences, so that they become equal."""
        self._has_batch = True
        if len(self._lanes) == 1:
            self._lanes[0].take(batch)
            return
        left = float(batch)
        while left > NOTHING:
            lanes = [lane for lane in self._lanes if lane.level > NOTHING]
            if not lanes:
                break
            lowest = min(lane.served for lane in lanes)
            least = [lane for lane in lanes if lane.served <= lowest + NOTHING]
            rise = min(
                left / sum(lane.share for lane in least),
                min(lane.level / lane.share for lane in least),
                min((lane.served - lowest for lane in lanes if lane not in least), default=math.inf),
            )
            for lane in least:
                lane.take(rise * lane.share)
                left -= rise * lane.share
        owed = max(lane.served for lane in self._lanes) - DEBT * batch
        for lane in self._lanes:
            lane.served = max(lane.served - owed, 0.0)


def _is_within(spans: Sequence[tuple[float, float]], at: float) -> bool:
    return any(begin <= at < end for begin, end in spans)
