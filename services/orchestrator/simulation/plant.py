"""The plant: workers that start, crash and drain, queues that integrate, a trainer that consumes whole batches.

The plant knows no controller. Time advances in steps of `DT_S`; the trainer takes and settles batches at exact times.
Sequences are a fluid: real numbers, not groups. All randomness comes from one seed. A controller sees what a run would
measure, not what the plant is made of: see `Crew.counts` and `Lane.rollout_s`.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import Final, NamedTuple

from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.simulation.site import GROUP, EnvironmentSite, ServerSite, Site
from rolloutmq.services.orchestrator.supervision.worker_table import STARTS

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
NEW_PART: Final = 0.1
"""Weight of a new group in the mean rollout time, as in the broker."""
MANY: Final = 50.0
"""Groups in a step from which their number is normally distributed."""
COMPLETION_TOKENS: Final = 100
"""Tokens of a completion."""
TURN_SPREAD: Final = 0.5
"""Largest relative difference of the duration of a turn from its mean."""
NOTHING: Final = 1e-9
"""Sequences too few to count: they are rounding errors."""


class Crew:
    """The workers of one environment."""

    def __init__(self, site: EnvironmentSite, chance: random.Random) -> None:
        self.site = site
        self.ready = 0
        self.moved = 0
        """Workers started and removed, in total."""
        self.sent_away = 0
        """Ready workers that were sent away, in total."""
        self.rollout_s = site.rollout_s
        """Time that a draining worker takes for its rollouts."""
        self._chance = chance
        self._now = 0.0
        self._starting: list[tuple[float, float]] = []
        """Times at which starting workers are ready, and at which they were started."""
        self._restarting: list[tuple[float, float]] = []
        """The same of workers that crashed."""
        self._starts = deque((self._start_s(0.0) for _ in range(site.ready)), STARTS)
        """Last times from a start until a worker was ready; those ready at the start were started before."""
        self._usual_start_s = median(self._starts) if self._starts else 0.0
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
        """Return the counts, and the time that starts take, as the supervisor measures them."""
        return WorkerCounts(
            ready=self.ready,
            starting=len(self._starting) + len(self._restarting),
            draining=len(self._draining),
            failed=len(self._failed),
            restarting=len(self._restarting),
            start_s=self._recent_start_s(),
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
            self._starting.append((now + self._start_s(now), now))
        for _ in range(-change):
            if self._failed:
                self._failed.remove(max(self._failed))
            elif waiting := self._restarting or self._starting:
                waiting.remove(max(waiting))
            else:
                self._remove_ready()
                self.sent_away += 1
                ends_s = self.rollout_s + self._chance.expovariate(1.0 / DRAIN_S)
                self._draining.append(now + ends_s)

    def advance(self, now: float) -> int:
        """Start, crash and end what is due; return the number of crashed workers."""
        self._now = now
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
            again = now + CRASH_PAUSE_S
            self._restarting.append((again + self._start_s(again), again))
        while self._lost and self._lost[0][0] <= now:
            lost = min(self._lost.popleft()[1], self.ready)
            for _ in range(lost):
                self._remove_ready()
                self._failed.append(now + REPLACED_S)
            crashed += lost
        return crashed

    def _begun(self, waiting: list[tuple[float, float]], now: float) -> list[tuple[float, float]]:
        left = []
        for ready_at, since in waiting:
            if ready_at > now:
                left.append((ready_at, since))
            elif self._chance.random() < self.site.failing_starts:
                left.append((now + self._start_s(now), now))
            else:
                self._starts.append(ready_at - since)
                self._usual_start_s = median(self._starts)
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

    def _start_s(self, now: float) -> float:
        return self.site.start_at(now) * self._chance.uniform(1.0 - SPREAD, 1.0 + SPREAD)

    def _recent_start_s(self) -> float:
        """Return the median of the last starts, longer while all present ones take longer; 0 while unknown."""
        if not self._starts:
            return 0.0
        waiting = self._starting + self._restarting
        under_way = [self._now - since for _, since in waiting if since <= self._now]
        return max(self._usual_start_s, median_low(under_way)) if under_way else self._usual_start_s


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
        completions: Completions of its rollouts; with several turns, also of those under way.
        rollout_s: Mean rollout time of recent groups, as a broker measures it; 0 before the first one.
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
        self.made = self.eaten = self.held = self.completions = 0.0
        self.waited_s = 0.0
        self.served = 0.0
        self._takes_s = max(site.rollout_s, DT_S)
        """Time of a rollout that nothing slows."""
        self.rollout_s = self._takes_s if site.ready else 0.0
        self._chance = chance
        self._progress_s = 0.0
        """Time that rollouts ran, less where a full server or an outage slowed them."""
        self._under_way: deque[tuple[float, float, float]] = deque()
        """Running rollouts: progress at their arrival, sequences over `_kept`, and time of their start."""
        self._kept = 1.0
        """Part of the rollouts under way that no crash has lost."""
        self._begun = 0.0
        """Sequences under way."""

    def advance(self, now: float) -> None:
        """Advance the workers; crashed ones lose their running rollouts."""
        crashed = self.crew.advance(now)
        if crashed and self._begun:
            self._lose(crashed / (self.crew.ready + self.crew.drainers + crashed))

    def _lose(self, part: float) -> None:
        self._begun *= 1.0 - part
        self._kept *= 1.0 - part
        if self._kept < NOTHING:
            self._count_anew()
            self._kept = 1.0

    def _count_anew(self) -> None:
        """Count what is under way as what is left of it after all crashes so far."""
        self._under_way = deque(
            (at, sequences * self._kept, since) for at, sequences, since in self._under_way
        )

    def offer(self, now: float) -> float:
        """Return the sequences its workers could begin in this step and have room for; count their waits for it.

        Of groups it is the mean: `make` draws them at the pace of the server.
        """
        site, crew = self.site, self.crew
        workers = crew.ready if site.rollout_s else crew.ready + crew.drainers
        if not workers or self._is_out(now):
            return 0.0
        could = workers * site.per_worker.at(now) * DT_S
        if site.noise:  # gamma: positive, with this mean and deviation however long a step is
            variance = site.noise**2 / (workers * DT_S)
            could *= self._chance.gammavariate(1.0 / variance, variance)
        room = max(0.0, self.room - self.level - self._begun)
        self._wait(room, could)
        return min(could, room)

    def _wait(self, room: float, tried: float) -> None:
        """Count the time that its workers wait in this step if they lack room for what they try to begin."""
        if room < tried:
            self.waited_s += self.crew.ready * DT_S * (1.0 - room / tried)

    def _drawn(self, mean: float) -> float:
        """Return the sequences of the groups that begin in this step: whole ones, at random times."""
        size = self.site.group_sequences
        drawn = float(size * _poisson(mean / size, self._chance))
        room = max(0.0, self.room - self.level - self._begun)
        if mean < room:  # else `offer` has counted the wait, also while no group is due
            self._wait(room, drawn)
        return min(drawn, room)

    def load(self, now: float, begun: float) -> float:
        """Return the sequences per second that would arrive if its running rollouts and those begun were not slowed."""
        if self._is_out(now):
            return 0.0
        return self._begun / self._takes_s if self.site.rollout_s else begun / DT_S

    def make(self, now: float, begun: float, pace: float = 1.0) -> None:
        """Begin these sequences, and let those arrive that are due; rollouts run at a pace of 0 to 1."""
        begun *= pace
        if self.site.group_sequences:
            begun = self._drawn(begun)
        if not self.site.rollout_s:
            self._arrive(begun, self._takes_s / pace)
            return
        self._progress_s += 0.0 if self._is_out(now) else DT_S * pace
        under_way = self._under_way
        if begun:
            under_way.append((self._progress_s + self._takes_s, begun / self._kept, now))
            self._begun += begun
        while under_way and under_way[0][0] <= self._progress_s + NOTHING:
            _, sequences, since = under_way.popleft()
            arrived = sequences * self._kept
            self._begun = max(0.0, self._begun - arrived)
            self._arrive(arrived, now - since)
            self.crew.rollout_s = self.rollout_s

    def _arrive(self, sequences: float, took_s: float) -> None:
        if sequences <= 0.0:
            return
        self.level += sequences
        self.made += sequences
        self.completions += sequences
        groups = sequences / (self.site.group_sequences or GROUP)
        part = 1.0 - (1.0 - NEW_PART) ** groups if self.rollout_s else 1.0
        self.rollout_s += (took_s - self.rollout_s) * part

    def _is_out(self, now: float) -> bool:
        return bool(self.site.outages) and _is_within(self.site.outages, now)

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


class _Turn(NamedTuple):
    """A running turn: progress at its end, turns left with it, sequences over `_kept`, time when their rollouts began,
    and whether their worker was sent away."""

    ends_s: float
    left: int
    sequences: float
    since: float
    is_last: bool = False


class TurnLane(Lane):
    """A lane with rollouts of several turns: each asks the policy once.

    A worker runs as many sequences as make its throughput, and begins all of them as soon as it is ready.
    """

    def __init__(
        self, site: EnvironmentSite, share: float, room: float, level: float, chance: random.Random
    ) -> None:
        super().__init__(site, share, room, level, chance)
        self._turn_s = self._takes_s / site.turns
        self._turns: list[_Turn] = []
        """Heap of the running turns."""
        self._sent_away = 0
        """Workers sent away so far, whose turns are known."""

    def offer(self, now: float) -> float:
        """See `Lane.offer`: a worker begins as many sequences as have ended."""
        site, crew = self.site, self.crew
        if not crew.ready or self._is_out(now):
            return 0.0
        holds = site.per_worker.at(now) * self._takes_s
        self._send_away(crew.sent_away - self._sent_away)
        running = self._kept * sum(turn.sequences for turn in self._turns if not turn.is_last)
        lacks = max(0.0, crew.ready * holds - running)
        size = float(site.group_sequences or GROUP)
        lacks -= math.fmod(lacks + NOTHING, size)
        room = max(0.0, self.room - self.level - self._begun)
        if room < lacks:
            self.waited_s += DT_S * (lacks - room) / holds
        return min(lacks, room - math.fmod(room, size))

    def make(self, now: float, begun: float, pace: float = 1.0) -> None:
        """See `Lane.make`."""
        self._progress_s += 0.0 if self._is_out(now) else DT_S * pace
        size, left = float(self.site.group_sequences or GROUP), begun
        while left > NOTHING:
            self._ask(_Turn(self._progress_s, self.site.turns, min(size, left) / self._kept, now))
            self._begun += min(size, left)
            left -= size
        while self._turns and self._turns[0][0] <= self._progress_s + NOTHING:
            turn = heapq.heappop(self._turns)
            if turn.left > 1:
                self.completions += turn.sequences * self._kept
                self._ask(turn._replace(left=turn.left - 1))
                continue
            self._begun = max(0.0, self._begun - turn.sequences * self._kept)
            self._arrive(turn.sequences * self._kept, now - turn.since)
            self.crew.rollout_s = self.rollout_s

    def _ask(self, turn: "_Turn") -> None:
        takes_s = self._turn_s * self._chance.uniform(1.0 - TURN_SPREAD, 1.0 + TURN_SPREAD)
        heapq.heappush(self._turns, turn._replace(ends_s=turn.ends_s + takes_s))

    def _send_away(self, workers: int) -> None:
        """Let the rollouts of so many workers be their last."""
        self._sent_away += workers
        part = workers / (workers + self.crew.ready)
        for place, turn in enumerate(self._turns):
            if workers and not turn.is_last and self._chance.random() < part:
                self._turns[place] = turn._replace(is_last=True)

    def load(self, now: float, begun: float) -> float:
        """See `Lane.load`."""
        return 0.0 if self._is_out(now) else (self._begun + begun) / self._takes_s

    def _count_anew(self) -> None:
        self._turns = [turn._replace(sequences=turn.sequences * self._kept) for turn in self._turns]

    def _lose(self, part: float) -> None:
        super()._lose(part)
        if not self._begun:
            self._turns.clear()


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
        """Let its workers make what they can; rollouts beyond its capacity slow all of them alike."""
        offers = [lane.offer(now) for lane in self._lanes]
        load = sum(lane.load(now, begun) for lane, begun in zip(self._lanes, offers, strict=True))
        one = self.site.capacity.at(now)
        pace = min(1.0, self.engines * one / load) if load > 0.0 else 1.0
        self.busy += (pace * load / one - self.busy) * DT_S / BUSY_S
        for lane, begun in zip(self._lanes, offers, strict=True):
            lane.make(now, begun, pace)


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
            name: _lane(one)(one, share, trainer.queue * share, trainer.queued * share, chance)
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
            lane.make(now, lane.offer(now))
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
            batch = trainer.batch_at(self._busy_until)
            if self.level < batch - NOTHING:
                self._wait()
                self._waits = True
                return
            self._waits = False
            self._take(batch)
            self._busy_until += batch / rate

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


def _lane(site: EnvironmentSite) -> type[Lane]:
    return TurnLane if site.turns > 1 else Lane


def _poisson(mean: float, chance: random.Random) -> int:
    """Return a number of independent events; for many, by the normal distribution."""
    if mean > MANY:
        return max(0, round(chance.gauss(mean, math.sqrt(mean))))
    number, left = 0, math.exp(-mean)
    product = chance.random()
    while product > left:
        number += 1
        product *= chance.random()
    return number


def _is_within(spans: Sequence[tuple[float, float]], at: float) -> bool:
    return any(begin <= at < end for begin, end in spans)
