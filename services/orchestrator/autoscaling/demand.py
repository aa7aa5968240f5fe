"""The demand estimator: the trainer's demand and the throughput of one worker. Pure.

Raw rates are misleading. A waiting trainer consumes the available sequences, not its demand; workers that wait for
credit produce the allowed amount, not their throughput. Both waits are measured, so both are taken out:

    demand     = consumed sequences / time in which the trainer did not wait
    per worker = produced sequences / time in which workers were present and did not wait

Demand is measured from one settlement to the next, see `settlements`. A worker counts from the earliest arrival of its
first rollout. What arrives now was begun a rollout ago, so workers and waits of that time divide it. Recent arrivals
that clearly differ replace the mean. Throughput is remembered while workers wait.
"""

import math
from typing import Final

import msgspec
from msgspec.structs import replace

from rolloutmq.services.orchestrator.autoscaling.availability import Availability
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample
from rolloutmq.services.orchestrator.autoscaling.scatter import PaceScatter
from rolloutmq.services.orchestrator.autoscaling.settlements import LATE, Settlements

SAMPLES_S: Final = 3.0
"""Longest interval one sample counts for: after a gap a sample says no more than any other."""
GAP_S: Final = 30.0
"""Gap after which the work in progress is unknown."""
MEMORY_S: Final = 15.0
"""Time constant of the means, for a trainer with short steps."""
STEPS: Final = 4.0
"""Time constant in trainer steps, if that is longer."""
LONGEST_S: Final = 900.0
STEP_PART: Final = 0.3
"""Weight of the last step in the mean step time."""
ROLLOUTS: Final = 2.0
GROUPS: Final = 40.0
"""Time constant of the throughput per worker in rollouts, and in groups that arrive, if that is longer."""
PRECISE: Final = 0.03
"""Relative precision that a longer time constant is to reach where groups arrive by chance."""
QUICK_S: Final = 5.0
"""Time constant of the recent throughput per worker; one rollout, if that is longer."""
QUICK_GROUPS: Final = 10
"""Groups that it must be measured from; groups that arrive together count as one."""
CHANGED: Final = 0.2
CHANCE: Final = 4.25
"""Relative difference from what was before that counts as a change; and that of chance, in standard errors."""
BEFORE: Final = 0.5
"""Least busy time before the recent one, relative to it, to compare with."""
LEAVING: Final = 0.1
"""Draining workers, relative to the ready ones, from which arrivals of short rollouts say nothing."""
SEEN_S: Final = 8.0
"""Worker-seconds without waits before the throughput per worker is reported."""
BUSY_PART: Final = 0.2
"""Busy part of their time below which workers say nothing about their throughput."""
FIRST_S: Final = 10.0
"""Time a trainer is observed before its demand is reported."""
ASLEEP_PART: Final = 0.9
"""Waiting part of the time from which a trainer has no work in progress."""
BATCH_PART: Final = 0.5
"""Part of a batch that the queue loses at once when the trainer takes one; workers add the rest meanwhile."""
STARVED_S: Final = 2.0
"""Time constant of the trainer's present wait."""
MISSED: Final = 10.0
"""Overdue groups that show that nothing arrives at all: a worker without output is not a slow worker. Groups that
arrive together count as one."""
QUIET_PART: Final = 0.6
"""Part of that time in which they must not have waited for credit: waits are reported up to a second late."""
SILENT_S: Final = 3.0
SILENT_ROLLOUTS: Final = 1.5
UNTOLD_S: Final = 30.0
"""Time without arrivals for that: longer than a rollout, or this if the rollout time is unknown."""
IDLE_S: Final = 5.0
"""Time constant of the workers' waits: they report once a second."""
AWAY_PART: Final = 0.5
"""Part of the workers waiting for the teacher from which, without arrivals, the teacher is the bottleneck."""
CHANGES: Final = 256
"""Changes of the worker count remembered within one rollout time."""


class DemandEstimator(msgspec.Struct, frozen=True):
    """Means of the samples so far."""

    last: PressureSample | None = None
    last_at: float = -math.inf
    first_at: float = math.inf
    """Time of the first sample."""
    settlements: Settlements = Settlements()
    open_s: float = 0.0
    """Time without trainer waits since the last settlement."""
    settled_at: float = -math.inf
    was_away: bool = False
    """The trainer was away since the last settlement, so the exact time of the next one includes its absence."""
    step_s: float = 0.0
    """Mean time between two settlements; 0 before the first."""
    made: float = 0.0
    present_s: float = 0.0
    blocked_s: float = 0.0
    """Worker time in which `made` was produced, and the waiting part of it; all three decay."""
    made_squared: float = 0.0
    """`made` with the squares of its weights: how many sequences such a mean is worth."""
    group_s: float = 0.0
    """Time between two groups, at the pace of the last throughput; 0 while unknown."""
    recent: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    """`made`, `made_squared` and busy worker time with shorter time constants, the shortest first, to see a change."""
    scatter: PaceScatter = PaceScatter()
    """How much the throughput differs by chance."""
    made_all: float = 0.0
    busy_all_s: float = 0.0
    present_all_s: float = 0.0
    """`made`, busy and present worker time without decay, for differences."""
    counted_s: float = 0.0
    """Time that these count: not that in which arrivals say nothing."""
    completions_all: int = 0
    tokens_all: int = 0
    running_all_s: float = 0.0
    """Completions, their tokens, and the time in which running workers did not wait, without decay."""
    per_worker: float | None = None
    """Throughput of one worker that does not wait, in sequences per second; None while unknown."""
    crashes: Availability = Availability()
    """Part of their time in which workers that were ready once are ready."""
    idle: float = 0.0
    """Part of the last seconds in which workers waited."""
    silent: bool = False
    """No group arrives from workers that should be busy: a shared dependency is down."""
    away: bool = False
    """No group arrived lately, and most workers wait for the teacher."""
    made_at: float = -math.inf
    """Time of the last arrival."""
    quiet_s: float = 0.0
    """Worker time without waits since then."""
    vain_s: float = 0.0
    """The same as a part of `present_s`, which decays."""
    readies: tuple[tuple[float, int, int], ...] = ()
    """Times and counts of ready workers, and of those with the crashed ones, back to before the rollouts arriving now
    began."""
    rollout_s: float = 0.0
    blocks: tuple[tuple[float, float], ...] = ()
    """Times, and the time workers had waited until then, back to before the rollouts arriving now began."""
    blocked_begun_s: float = 0.0
    """That time when those rollouts began."""
    starved: float = 0.0
    """Part of the last seconds in which the trainer waited."""

    @property
    def step_part(self) -> float:
        """Return the part of a usual step for which the trainer has had its batch; 1 while it waits for one."""
        usual_s = self.settlements.usual_s
        return min(1.0, max(self.open_s / usual_s if usual_s else 0.0, self.starved))

    @property
    def memory_s(self) -> float:
        """Return the time constant of the means, in seconds."""
        return min(max(MEMORY_S, STEPS * self.step_s), LONGEST_S)

    @property
    def pace(self) -> float | None:
        """Return the sequences per second a trainer without waits would consume; None while unknown."""
        if self.last_at - self.first_at < FIRST_S:
            return None
        return self.settlements.now(self.open_s)

    @property
    def demand(self) -> float | None:
        """Return the part of the pace that this environment should deliver; None while unknown."""
        return None if self.pace is None or self.last is None else self.pace * self.last.share

    @property
    def per_worker_least(self) -> float | None:
        """Return a lower bound of `per_worker` from workers that wait most of their time; None while unknown.

        They were busy for less than `BUSY_PART` of their time. How much less is unknown: waits are reported late.
        """
        if not self.made or self.present_s < SEEN_S:
            return None
        return self.made / (BUSY_PART * self.present_s)

    @property
    def making_memory_s(self) -> float:
        """Return the time constant of the throughput per worker, in seconds."""
        groups = max(GROUPS, self.scatter.groups_for(PRECISE))
        return min(max(MEMORY_S, ROLLOUTS * self.rollout_s, groups * self.group_s), LONGEST_S)

    @property
    def available(self) -> float:
        """Return the part of their time in which workers that were ready once are ready: the others crashed."""
        return self.crashes.part

    @property
    def error(self) -> float:
        """Return the standard error of demand over throughput and availability, relative to it."""
        sequences = _worth(self.made, self.made, self.made_squared)
        groups = sequences / max(1, self.last.group_sequences) if self.last is not None else 0.0
        return math.hypot(self.scatter.error(groups), self.settlements.error, self.crashes.error)

    def looked(self, seen: PressureSample, now: float) -> "DemandEstimator":
        """Return the means with one more sample."""
        last, elapsed = self.last, now - self.last_at
        if last is None or not 0.0 < elapsed < GAP_S or seen.epoch != last.epoch:
            return replace(self._anew(seen, now), was_away=self.was_away or not seen.trainers)
        if not seen.trainers:
            return self._without_trainer(seen, last, now)
        waited = _part(seen.starved_s - last.starved_s, elapsed)
        settled_at = self.settled_at
        if math.isinf(settled_at) and waited > ASLEEP_PART:
            settled_at = self.last_at  # its next batch is observed from the start
        soon = 1.0 - math.exp(-min(elapsed, SAMPLES_S) / STARVED_S)
        new = replace(
            self,
            last=seen,
            last_at=now,
            settled_at=settled_at,
            open_s=self.open_s + (1.0 - waited) * elapsed,
            starved=self.starved + (waited - self.starved) * soon,
        )
        if seen.eaten > last.eaten:
            # Not positive where two trainers that wait count twice: then the samples' own times have to do.
            is_exact = last.settled_busy_s > 0.0 and not self.was_away
            exact_s = seen.settled_busy_s - last.settled_busy_s if is_exact else 0.0
            new = replace(new, was_away=False)._settled(
                seen.eaten - last.eaten, now, exact_s, min(elapsed, SAMPLES_S)
            )
        elif new._is_late and self._took_batch(seen):
            new = replace(new, open_s=0.0)  # the pause is over: the trainer has begun its next batch
        new = new._sampled(seen, last, elapsed)._made(seen, last, elapsed)
        if new.away and new.silent:  # the duration of this batch depends on the teacher
            return replace(new, open_s=0.0, settled_at=-math.inf)
        return new

    @property
    def _is_late(self) -> bool:
        """Return whether the open step takes so long that it lowers the demand."""
        usual_s = self.settlements.usual_s
        return 0.0 < LATE * usual_s < self.open_s

    def _took_batch(self, seen: PressureSample) -> bool:
        """Return whether the trainer has taken a batch from the queue since the last sample."""
        last = self.last
        if last is None or seen.batch_sequences != last.batch_sequences:
            return False
        return last.pressure - seen.pressure >= BATCH_PART

    def _anew(self, seen: PressureSample, now: float) -> "DemandEstimator":
        """Keep the means, but forget the work in progress."""
        readies = ((now, seen.crew.ready, seen.crew.ready + seen.crew.restarting),)
        first_at = min(self.first_at, now)
        new = replace(self, last=seen, last_at=now, first_at=first_at, readies=readies)
        new = replace(new, open_s=0.0, settled_at=-math.inf, silent=False, away=False)
        new = replace(new, made_at=now, quiet_s=0.0, vain_s=0.0)
        return replace(new, starved=0.0, idle=0.0, blocks=((now, 0.0),), blocked_begun_s=0.0)

    def _without_trainer(self, seen: PressureSample, last: PressureSample, now: float) -> "DemandEstimator":
        """Keep the means, and go on to record how many workers are ready and how long they wait.

        Once the trainer returns, they all begin at once, and nothing arrives for one rollout.
        """
        blocked_s = max(0.0, seen.blocked_s - last.blocked_s) / max(1, seen.slots)
        waited, _ = self._with_ready(seen, self.last_at)._with_blocked(blocked_s, now)
        return replace(
            self._anew(seen, now),
            was_away=True,
            readies=waited.readies,
            rollout_s=waited.rollout_s,
            blocks=waited.blocks,
            blocked_begun_s=waited.blocked_begun_s,
        )

    def _settled(self, eaten: int, at: float, exact_s: float, grain_s: float) -> "DemandEstimator":
        took_s = at - self.settled_at
        if math.isinf(took_s):
            return replace(self, open_s=0.0, settled_at=at)  # its start was not observed
        return replace(
            self,
            settlements=self.settlements.added(
                eaten, exact_s if exact_s > 0.0 else self.open_s, 0.0 if exact_s > 0.0 else grain_s
            ),
            open_s=0.0,
            settled_at=at,
            step_s=took_s if not self.step_s else self.step_s + (took_s - self.step_s) * STEP_PART,
        )

    def _sampled(self, seen: PressureSample, last: PressureSample, elapsed: float) -> "DemandEstimator":
        """Count completions. Draining workers get some, too: they count as running."""
        workers = (seen.crew.ready + seen.crew.draining + last.crew.ready + last.crew.draining) / 2.0
        blocked_s = max(0.0, seen.blocked_s - last.blocked_s) / max(1, seen.slots)
        return replace(
            self,
            completions_all=self.completions_all + max(0, seen.completions - last.completions),
            tokens_all=self.tokens_all + max(0, seen.completion_tokens - last.completion_tokens),
            running_all_s=self.running_all_s + max(0.0, elapsed * workers - blocked_s),
        )

    def _made(self, seen: PressureSample, last: PressureSample, elapsed: float) -> "DemandEstimator":
        crew = seen.crew
        crashes = self.crashes.looked(crew.ready, crew.restarting, crew.start_s, elapsed)
        new = replace(self._with_ready(seen, self.last_at), crashes=crashes)
        workers = float(new.readies[0][1])
        if seen.rollout_s <= elapsed:
            workers = (seen.crew.ready + last.crew.ready) / 2.0
            if seen.crew.ready + seen.crew.restarting > last.crew.ready + last.crew.restarting:
                workers = min(seen.crew.ready, last.crew.ready)  # new ones have delivered nothing yet
            if seen.crew.draining > LEAVING * workers:
                workers = 0.0  # what arrives is theirs, too
        fades = math.exp(-elapsed / IDLE_S)
        made = max(0, seen.made - last.made)
        if not workers or elapsed > SAMPLES_S:
            if made or not seen.crew.ready or elapsed > SAMPLES_S:
                new = replace(new, made_at=new.last_at, quiet_s=0.0, vain_s=0.0, away=False, silent=False)
            return replace(new, idle=new.idle * fades)
        away = not made and 0 < seen.untaught >= AWAY_PART * seen.crew.ready
        new = replace(new, away=away)
        blocked_s = max(0.0, seen.blocked_s - last.blocked_s) / max(1, seen.slots)
        idle = _part(blocked_s, elapsed * max(seen.crew.ready, last.crew.ready))
        new = replace(new, idle=idle + (new.idle - idle) * fades)
        new, begun_blocked_s = new._with_blocked(blocked_s, self.last_at + elapsed)
        if seen.rollout_s <= elapsed:
            begun_blocked_s = blocked_s
        if made:
            new = replace(new, made_at=new.last_at, quiet_s=0.0, vain_s=0.0)
        else:
            new = replace(new, quiet_s=new.quiet_s + elapsed * workers - blocked_s)
        silent = new._is_silent(seen, workers)
        if silent and not self.silent:
            new = replace(new._without(self.vain_s), vain_s=0.0)
        new = replace(new, silent=silent)
        if silent:
            return replace(new, recent=DemandEstimator().recent)
        kept = math.exp(-elapsed / self.making_memory_s)
        busy_s = max(0.0, elapsed * workers - begun_blocked_s)
        fading = [math.exp(-elapsed / span_s) for span_s in self._recent_s]
        new = replace(
            new,
            recent=tuple(
                (made_before * fade + made, squared * fade**2 + made, busy_before_s * fade + busy_s)
                for fade, (made_before, squared, busy_before_s) in zip(fading, self.recent, strict=True)
            ),
            scatter=self.scatter.looked(
                made / max(1, seen.group_sequences), busy_s, elapsed, max(QUICK_S, self.rollout_s)
            ),
            made_all=self.made_all + made,
            busy_all_s=self.busy_all_s + busy_s,
            present_all_s=self.present_all_s + elapsed * workers,
            counted_s=self.counted_s + elapsed,
            made=self.made * kept + made,
            made_squared=self.made_squared * kept**2 + made,
            present_s=self.present_s * kept + elapsed * workers,
            blocked_s=self.blocked_s * kept + begun_blocked_s,
            vain_s=0.0 if made else self.vain_s * kept + elapsed * workers - begun_blocked_s,
        )
        if made:  # else the throughput stays: it may be an outage, in which more workers would not help
            new = new._changed(max(1, seen.group_sequences))._paced()
        if new.per_worker:
            new = replace(new, group_s=max(1, seen.group_sequences) / (new.per_worker * workers))
        return new

    def _with_blocked(self, blocked_s: float, now: float) -> tuple["DemandEstimator", float]:
        """Record time in which workers waited; return that of when the rollouts arriving now began."""
        total = (self.blocks[-1][1] if self.blocks else 0.0) + blocked_s
        blocks = (*self.blocks, (now, total))
        if len(blocks) > 2 and blocks[-1][0] - blocks[-3][0] < self.rollout_s / CHANGES:
            blocks = (*blocks[:-2], blocks[-1])
        began = now - self.rollout_s
        while len(blocks) > 2 and blocks[1][0] <= began:
            blocks = blocks[1:]
        begun_s = max(self.blocked_begun_s, _between(blocks[0], blocks[min(1, len(blocks) - 1)], began))
        return replace(self, blocks=blocks, blocked_begun_s=begun_s), begun_s - self.blocked_begun_s

    @property
    def delivering(self) -> int:
        """Return the workers whose rollouts arrive now, and those that crashed and start again."""
        return self.readies[0][2] if self.readies else 0

    @property
    def running(self) -> int:
        """Return the workers that are ready, whether their rollouts arrive yet or not."""
        return self.last.crew.ready if self.last is not None else 0

    @property
    def _recent_s(self) -> tuple[float, float]:
        """Return the time constants of `recent`."""
        quick_s = max(QUICK_S, self.rollout_s)
        return quick_s, math.sqrt(quick_s * max(quick_s, self.making_memory_s))

    def _changed(self, group_sequences: int) -> "DemandEstimator":
        """Forget the older means if the recent ones clearly differ: rollouts became longer or shorter."""
        if self.per_worker is None:
            return self
        least = QUICK_GROUPS * self.scatter.together * group_sequences
        for made, squared, busy_s in self.recent:
            before, before_s = self.made - made, self.present_s - self.blocked_s - busy_s
            if made < least or busy_s < SEEN_S:
                continue
            if before <= 0.0 or before_s < BEFORE * busy_s:
                continue
            expected = before / before_s * busy_s  # by chance, it differs from this
            worth = _worth(expected, made, squared), _worth(before, self.made, self.made_squared)
            error = math.hypot(*(self.scatter.error(sequences / group_sequences) for sequences in worth))
            if abs(made / busy_s * before_s / before - 1.0) > max(CHANGED, CHANCE * error):
                recent = tuple(min(one, (made, squared, busy_s)) for one in self.recent)
                new = replace(
                    self, made=made, made_squared=squared, present_s=busy_s, blocked_s=0.0, vain_s=0.0
                )
                return replace(new, recent=recent)
        return self

    def _paced(self) -> "DemandEstimator":
        busy_s = self.present_s - self.blocked_s
        if busy_s < max(SEEN_S, BUSY_PART * self.present_s) or not self.made:
            return self
        return replace(self, per_worker=self.made / busy_s)

    def _without(self, worker_s: float) -> "DemandEstimator":
        """Remove worker time in which nothing could arrive."""
        return replace(self, present_s=max(0.0, self.present_s - worker_s))._paced()

    def _is_silent(self, seen: PressureSample, workers: float) -> bool:
        """Return whether arrivals are overdue by more than chance."""
        since = self.last_at - self.made_at
        least_s = SILENT_ROLLOUTS * seen.rollout_s if seen.rollout_s else UNTOLD_S
        if self.per_worker is None or since < max(SILENT_S, least_s):
            return False
        if self.away:
            return True
        if self.quiet_s < QUIET_PART * workers * since:
            return False
        missed = MISSED * self.scatter.together * max(1, seen.group_sequences)
        return self.per_worker * self.quiet_s >= missed

    def _with_ready(self, seen: PressureSample, now: float) -> "DemandEstimator":
        """Record the count of ready workers. The oldest entry is the count when the rollouts arriving now began: newer
        workers have delivered nothing yet, and departed ones finish their running rollouts."""
        readies, counts = self.readies, (seen.crew.ready, seen.crew.ready + seen.crew.restarting)
        if not readies or readies[-1][1:] != counts:
            readies = (*readies[-CHANGES:], (now, *counts))
        began = now - seen.rollout_s
        while len(readies) > 1 and readies[1][0] < began:
            readies = readies[1:]
        return replace(self, readies=readies, rollout_s=seen.rollout_s)


def _between(low: tuple[float, float], high: tuple[float, float], at: float) -> float:
    """Return the value at a time between two points."""
    if high[0] <= low[0]:
        return low[1]
    return low[1] + (high[1] - low[1]) * min(max((at - low[0]) / (high[0] - low[0]), 0.0), 1.0)


def _worth(sequences: float, decayed: float, squared: float) -> float:
    """Return how many sequences, counted once each, are as precise as these of a mean that decays.

    Such a mean is worth twice what it holds, once it is older than its time constant.
    """
    return sequences * decayed / squared if squared else sequences


def _part(of: float, whole: float) -> float:
    """Return a part of a whole, 0 to 1; a counter that went backwards has restarted."""
    return min(max(of / whole, 0.0), 1.0) if whole > 0.0 else 0.0
