"""What the controller measures: how much the trainer would eat, and how much a worker makes. Pure.

Rates as they are seen say little by themselves. A trainer that waits eats what there is, not what it could; workers
that wait for credit make what they may, not what they can. Both waits are counted, so both are taken out:

    appetite   = sequences that were eaten, over the time in which the trainer did not wait
    per worker = sequences that were made, over the time in which workers were there and did not wait

The appetite is taken from one settlement to the next, since a batch is eaten all at once: between two of them nothing
is known but that it has become less, if the time for a batch is over. Old settlements count less and less. Where the
last few agree that something has changed, they count alone. A worker counts from the moment on at which its first
rollout may arrive; how much it makes is remembered while it waits.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from rolloutmq.services.orchestrator.pressure import PressureSample

SAMPLES_S: Final = 3.0
"""Longest time that one look counts for: behind a gap the next one says no more than any other."""
GAP_S: Final = 30.0
"""Behind a gap that is longer nothing is known of what was under way."""
MEMORY_S: Final = 15.0
"""After so long most of a mean is forgotten, where the trainer's steps are short."""
STEPS: Final = 4.0
"""The same in steps of the trainer, where that is more."""
LONGEST_S: Final = 900.0
RECENT_S: Final = 3.0
"""What was eaten in about so long counts alone if it differs from what was before."""
RECENT_LOOKS: Final = 4.0
"""The same in looks, where that is more: settlements are seen when it is looked, and not when they are."""
RECENT_STEPS: Final = 1.0
"""The same in steps of the trainer, where that is more."""
LOOK_PART: Final = 0.1
"""Weight of the last look in the mean time between two."""
STEP_PART: Final = 0.3
"""Weight of the last step in the mean time between two."""
LATE: Final = 1.5
"""A batch that takes so many times as long as usual tells that the trainer eats less, before it is settled."""
CHANGED: Final = 0.2
"""Part by which they must differ."""
ROLLOUTS: Final = 2.0
"""What a worker makes is remembered for so many rollouts, where that is more."""
SEEN_S: Final = 8.0
"""Worker-seconds in which nobody waited, before it is said what a worker makes."""
BUSY_PART: Final = 0.2
"""Workers that work for less than that part of their time say nothing about what they could make."""
FIRST_S: Final = 10.0
"""So long the trainer is watched before it is said what it eats."""
ASLEEP_PART: Final = 0.9
"""A trainer that waited for that part of the time has nothing under way."""
STARVED_S: Final = 2.0
"""Memory of whether the trainer waits just now."""
MISSED: Final = 10.0
"""Groups that should have come and did not tell that nothing comes at all: who makes nothing is no slow worker."""
QUIET_PART: Final = 0.6
"""For that part of the time at least they must not have waited for room: waits are told up to a second later."""
SILENT_S: Final = 3.0
SILENT_ROLLOUTS: Final = 1.5
UNTOLD_S: Final = 30.0
"""For so long nothing must come for that: for longer than a rollout, or this where nobody has told how long one is."""
IDLE_S: Final = 5.0
"""Memory of whether workers wait: they tell once a second."""
AWAY_PART: Final = 0.5
"""Where that part of the workers waits for the teacher and nothing comes, it is the teacher that is short."""
CHANGES: Final = 256
"""Changes of the number of workers that are remembered, for as long as a rollout takes."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Means of what was seen."""

    last: PressureSample | None = None
    last_at: float = -math.inf
    first_at: float = math.inf
    """When it was looked at for the first time."""
    eaten: float = 0.0
    awake_s: float = 0.0
    """Time in which `eaten` was eaten; both forget."""
    recent: tuple[float, float] = (0.0, 0.0)
    """The same two, which forget sooner."""
    last_eaten: int = 0
    open_s: float = 0.0
    """Time in which the trainer did not wait, since the last settlement."""
    settled_at: float = -math.inf
    look_s: float = 1.0
    """Mean time between two looks."""
    step_s: float = 0.0
    """Mean time between two settlements; 0 while there was none."""
    made: float = 0.0
    present_s: float = 0.0
    blocked_s: float = 0.0
    """Time of workers in which `made` was made, and how much of it they waited; all three forget."""
    per_worker: float | None = None
    """Sequences a second that one worker makes while it does not wait; None while nobody knows."""
    idle: float = 0.0
    """Part of the last seconds in which workers waited."""
    silent: bool = False
    """Nothing comes from workers that should be at work: what they all need is away."""
    away: bool = False
    """Nothing came just now, and most workers wait for the teacher."""
    made_at: float = -math.inf
    """When something came last."""
    quiet_s: float = 0.0
    """Time of workers since then in which they did not wait."""
    vain_s: float = 0.0
    """The same as a part of `present_s`, which forgets."""
    readies: tuple[tuple[float, int], ...] = ()
    """When there were how many workers, back to before the rollouts that arrive now."""
    rollout_s: float = 0.0
    starved: float = 0.0
    """Part of the last seconds in which the trainer waited."""
    waits: float = 0.0
    """The same, of a time as long as the memory."""

    @property
    def memory_s(self) -> float:
        """Seconds after which the means have forgotten most of what was."""
        return min(max(MEMORY_S, STEPS * self.step_s), LONGEST_S)

    @property
    def appetite(self) -> float | None:
        """Sequences a second that the trainer would eat if it never waited; None while nobody knows."""
        if not self.last_eaten or self.last_at - self.first_at < FIRST_S:
            return None
        eaten, awake_s = self.eaten, self.awake_s
        usual_s = awake_s * self.last_eaten / eaten
        return _over(eaten, awake_s + max(0.0, self.open_s - LATE * usual_s))

    @property
    def making_memory_s(self) -> float:
        """The same for what workers make."""
        return min(max(MEMORY_S, ROLLOUTS * self.rollout_s), LONGEST_S)

    def looked(self, seen: PressureSample, now: float) -> "Rates":
        """Return the means with one more look."""
        last, elapsed = self.last, now - self.last_at
        if last is None or not 0.0 < elapsed < GAP_S or seen.epoch != last.epoch or not seen.trainers:
            return self._anew(seen, now)
        waited = _part(seen.starved_s - last.starved_s, elapsed)
        settled_at = self.settled_at
        if math.isinf(settled_at) and waited > ASLEEP_PART:
            settled_at = self.last_at  # what it eats next will have been seen from its beginning
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
        if new.away and new.silent:  # how long the batch that is under way takes is the teacher's doing
            return replace(new, open_s=0.0, settled_at=-math.inf)
        return new

    def _anew(self, seen: PressureSample, now: float) -> "Rates":
        """Keep the means, but know nothing of what is under way."""
        readies = ((now, seen.crew.ready),)
        first_at = min(self.first_at, now)
        new = replace(self, last=seen, last_at=now, first_at=first_at, readies=readies)
        new = replace(new, open_s=0.0, settled_at=-math.inf, silent=False, away=False)
        new = replace(new, made_at=now, quiet_s=0.0, vain_s=0.0)
        return replace(new, starved=0.0, waits=0.0, idle=0.0)

    def _settled(self, eaten: int, at: float) -> "Rates":
        took_s = at - self.settled_at
        if math.isinf(took_s):
            return replace(self, open_s=0.0, settled_at=at)  # nobody saw it begin
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

    def _made(self, seen: PressureSample, last: PressureSample, elapsed: float) -> "Rates":
        new = self._rostered(seen, self.last_at)
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

    def _paced(self) -> "Rates":
        busy_s = self.present_s - self.blocked_s
        if busy_s < max(SEEN_S, BUSY_PART * self.present_s) or not self.made:
            return self
        return replace(self, per_worker=self.made / busy_s)

    def _without(self, worker_s: float) -> "Rates":
        """Take out the time of workers in which nothing came, as it turned out since nothing could."""
        return replace(self, present_s=max(0.0, self.present_s - worker_s))._paced()

    def _is_silent(self, seen: PressureSample, workers: int) -> bool:
        """Say whether so much should have come since something came last that its absence is no chance."""
        since = self.last_at - self.made_at
        least_s = SILENT_ROLLOUTS * seen.rollout_s if seen.rollout_s else UNTOLD_S
        if self.per_worker is None or since < max(SILENT_S, least_s):
            return False
        if self.away:
            return True
        if self.quiet_s < QUIET_PART * workers * since:
            return False
        return self.per_worker * self.quiet_s / max(1, seen.group_sequences) >= MISSED

    def _rostered(self, seen: PressureSample, now: float) -> "Rates":
        """Note how many are ready. The first that is kept is how many there were when the rollouts began that arrive
        now: those that came since have brought nothing yet, and those that went finish what they had in hand."""
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
    """Return a part of a whole, 0 to 1; what went backwards is a counter that began anew."""
    return min(max(of / whole, 0.0), 1.0) if whole > 0.0 else 0.0
