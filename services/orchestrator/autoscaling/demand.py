"""The demand estimator: the trainer's demand and the throughput of one worker. Pure.

Raw rates are misleading. A waiting trainer consumes the available sequences, not its demand; workers that wait for
credit produce the allowed amount, not their throughput. Both waits are measured, so both are taken out:

    demand     = consumed sequences / time in which the trainer did not wait
    per worker = produced sequences / time in which workers were present and did not wait

Demand is measured from one settlement to the next, since the trainer consumes a whole batch at once. Between two
settlements only a lower demand can be detected, once the usual time for a batch is over. Old settlements decay. If the
last few agree on a change, they replace the mean. A worker counts from the earliest arrival of its first rollout. Its
throughput is remembered while it waits.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample

SAMPLES_S: Final = 3.0
"""Longest interval one sample counts for: after a gap a sample says no more than any other."""
GAP_S: Final = 30.0
"""Gap after which the work in progress is unknown."""
MEMORY_S: Final = 15.0
"""Time constant of the means, for a trainer with short steps."""
STEPS: Final = 4.0
"""Time constant in trainer steps, if that is longer."""
LONGEST_S: Final = 900.0
RECENT_S: Final = 3.0
"""Window of recent consumption, used alone if it differs from the mean."""
RECENT_LOOKS: Final = 4.0
"""The window in samples, if that is longer: a settlement is seen at the next sample."""
RECENT_STEPS: Final = 1.0
"""The window in trainer steps, if that is longer."""
LOOK_PART: Final = 0.1
"""Weight of the last interval in the mean interval between samples."""
STEP_PART: Final = 0.3
"""Weight of the last step in the mean step time."""
LATE: Final = 1.5
"""Factor on the usual batch time from which a late batch lowers the demand before it settles."""
CHANGED: Final = 0.2
"""Relative difference that counts as a change."""
ROLLOUTS: Final = 2.0
"""Time constant of the throughput per worker in rollouts, if that is longer."""
SEEN_S: Final = 8.0
"""Worker-seconds without waits before the throughput per worker is reported."""
BUSY_PART: Final = 0.2
"""Busy part of their time below which workers say nothing about their throughput."""
FIRST_S: Final = 10.0
"""Time a trainer is observed before its demand is reported."""
ASLEEP_PART: Final = 0.9
"""Waiting part of the time from which a trainer has no work in progress."""
STARVED_S: Final = 2.0
"""Time constant of the trainer's present wait."""
MISSED: Final = 10.0
"""Overdue groups that show that nothing arrives at all: a worker without output is not a slow worker."""
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


@dataclass(frozen=True, slots=True)
class DemandEstimator:
    """Means of the samples so far."""

    last: PressureSample | None = None
    last_at: float = -math.inf
    first_at: float = math.inf
    """Time of the first sample."""
    eaten: float = 0.0
    awake_s: float = 0.0
    """Time in which `eaten` was consumed; both decay."""
    recent: tuple[float, float] = (0.0, 0.0)
    """The same two with a shorter time constant."""
    last_eaten: int = 0
    open_s: float = 0.0
    """Time without trainer waits since the last settlement."""
    settled_at: float = -math.inf
    look_s: float = 1.0
    """Mean interval between two samples."""
    step_s: float = 0.0
    """Mean time between two settlements; 0 before the first."""
    made: float = 0.0
    present_s: float = 0.0
    blocked_s: float = 0.0
    """Worker time in which `made` was produced, and the waiting part of it; all three decay."""
    per_worker: float | None = None
    """Throughput of one worker that does not wait, in sequences per second; None while unknown."""
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
    readies: tuple[tuple[float, int], ...] = ()
    """Times and counts of ready workers, back to before the rollouts arriving now."""
    rollout_s: float = 0.0
    starved: float = 0.0
    """Part of the last seconds in which the trainer waited."""
    waits: float = 0.0
    """The same over the time constant of the means."""

    @property
    def memory_s(self) -> float:
        """Return the time constant of the means, in seconds."""
        return min(max(MEMORY_S, STEPS * self.step_s), LONGEST_S)

    @property
    def demand(self) -> float | None:
        """Return the sequences per second a trainer without waits would consume; None while unknown."""
        if not self.last_eaten or self.last_at - self.first_at < FIRST_S:
            return None
        eaten, awake_s = self.eaten, self.awake_s
        usual_s = awake_s * self.last_eaten / eaten
        return _over(eaten, awake_s + max(0.0, self.open_s - LATE * usual_s))

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
        return min(max(MEMORY_S, ROLLOUTS * self.rollout_s), LONGEST_S)

    def looked(self, seen: PressureSample, now: float) -> "DemandEstimator":
        """Return the means with one more sample."""
        last, elapsed = self.last, now - self.last_at
        if last is None or not 0.0 < elapsed < GAP_S or seen.epoch != last.epoch or not seen.trainers:
            return self._anew(seen, now)
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
            look_s=self.look_s + (elapsed - self.look_s) * LOOK_PART,
            open_s=self.open_s + (1.0 - waited) * elapsed,
            starved=self.starved + (waited - self.starved) * soon,
            waits=self.waits + (waited - self.waits) * (1.0 - math.exp(-elapsed / self.memory_s)),
        )
        if seen.eaten > last.eaten:
            new = new._settled(seen.eaten - last.eaten, now)
        new = new._made(seen, last, elapsed)
        if new.away and new.silent:  # the duration of this batch depends on the teacher
            return replace(new, open_s=0.0, settled_at=-math.inf)
        return new

    def _anew(self, seen: PressureSample, now: float) -> "DemandEstimator":
        """Keep the means, but forget the work in progress."""
        readies = ((now, seen.crew.ready),)
        first_at = min(self.first_at, now)
        new = replace(self, last=seen, last_at=now, first_at=first_at, readies=readies)
        new = replace(new, open_s=0.0, settled_at=-math.inf, silent=False, away=False)
        new = replace(new, made_at=now, quiet_s=0.0, vain_s=0.0)
        return replace(new, starved=0.0, waits=0.0, idle=0.0)

    def _settled(self, eaten: int, at: float) -> "DemandEstimator":
        took_s = at - self.settled_at
        if math.isinf(took_s):
            return replace(self, open_s=0.0, settled_at=at)  # its start was not observed
        recent_s = max(RECENT_S, RECENT_LOOKS * self.look_s, RECENT_STEPS * self.step_s)
        soon = math.exp(-took_s / recent_s)
        kept = math.exp(-took_s / self.memory_s)
        recent = self.recent[0] * soon + eaten, self.recent[1] * soon + self.open_s
        whole = self.eaten * kept + eaten, self.awake_s * kept + self.open_s
        if abs(_over(*recent) / _over(*whole) - 1.0) > CHANGED:
            whole = recent
        return replace(
            self,
            eaten=whole[0],
            awake_s=whole[1],
            recent=recent,
            last_eaten=eaten,
            open_s=0.0,
            settled_at=at,
            step_s=took_s if not self.step_s else self.step_s + (took_s - self.step_s) * STEP_PART,
        )

    def _made(self, seen: PressureSample, last: PressureSample, elapsed: float) -> "DemandEstimator":
        new = self._with_ready(seen, self.last_at)
        workers = new.readies[0][1]
        if seen.rollout_s <= elapsed:
            workers = min(seen.crew.ready, last.crew.ready)
        fades = math.exp(-elapsed / IDLE_S)
        if not workers or elapsed > SAMPLES_S:
            new = replace(new, made_at=new.last_at, quiet_s=0.0, vain_s=0.0, away=False)
            return replace(new, idle=new.idle * fades)
        made = max(0, seen.made - last.made)
        away = not made and 0 < seen.untaught >= AWAY_PART * seen.crew.ready
        new = replace(new, away=away)
        blocked_s = max(0.0, seen.blocked_s - last.blocked_s) / max(1, seen.slots)
        idle = _part(blocked_s, elapsed * max(seen.crew.ready, last.crew.ready))
        new = replace(new, idle=idle + (new.idle - idle) * fades)
        if made:
            new = replace(new, made_at=new.last_at, quiet_s=0.0, vain_s=0.0)
        else:
            new = replace(new, quiet_s=new.quiet_s + elapsed * workers - blocked_s)
        silent = new._is_silent(seen, workers)
        if silent and not self.silent:
            new = replace(new._without(self.vain_s), vain_s=0.0)
        new = replace(new, silent=silent)
        if silent:
            return new
        kept = math.exp(-elapsed / self.making_memory_s)
        new = replace(
            new,
            made=self.made * kept + made,
            present_s=self.present_s * kept + elapsed * workers,
            blocked_s=self.blocked_s * kept + blocked_s,
            vain_s=0.0 if made else self.vain_s * kept + elapsed * workers - blocked_s,
        )
        return new._paced()

    def _paced(self) -> "DemandEstimator":
        busy_s = self.present_s - self.blocked_s
        if busy_s < max(SEEN_S, BUSY_PART * self.present_s) or not self.made:
            return self
        return replace(self, per_worker=self.made / busy_s)

    def _without(self, worker_s: float) -> "DemandEstimator":
        """Remove worker time in which nothing could arrive."""
        return replace(self, present_s=max(0.0, self.present_s - worker_s))._paced()

    def _is_silent(self, seen: PressureSample, workers: int) -> bool:
        """Return whether arrivals are overdue by more than chance."""
        since = self.last_at - self.made_at
        least_s = SILENT_ROLLOUTS * seen.rollout_s if seen.rollout_s else UNTOLD_S
        if self.per_worker is None or since < max(SILENT_S, least_s):
            return False
        if self.away:
            return True
        if self.quiet_s < QUIET_PART * workers * since:
            return False
        return self.per_worker * self.quiet_s / max(1, seen.group_sequences) >= MISSED

    def _with_ready(self, seen: PressureSample, now: float) -> "DemandEstimator":
        """Record the count of ready workers. The oldest entry is the count when the rollouts arriving now began: newer
        workers have delivered nothing yet, and departed ones finish their running rollouts."""
        readies = self.readies
        if not readies or readies[-1][1] != seen.crew.ready:
            readies = (*readies[-CHANGES:], (now, seen.crew.ready))
        began = now - seen.rollout_s
        while len(readies) > 1 and readies[1][0] < began:
            readies = readies[1:]
        return replace(self, readies=readies, rollout_s=seen.rollout_s)


def _over(of: float, by: float) -> float:
    return of / max(by, 1e-3)


def _part(of: float, whole: float) -> float:
    """Return a part of a whole, 0 to 1; a counter that went backwards has restarted."""
    return min(max(of / whole, 0.0), 1.0) if whole > 0.0 else 0.0
