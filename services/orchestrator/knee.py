"""The knee: where more workers bring no more, since they share something that is full. Pure.

At most twice as many workers as were seen to help are tried, or a few more, until those have been at work for a while.
While a worker makes clearly less than it made among fewer, nobody is started any more. Once those that were started
have been at work for a while, it is looked at how many would make the same at the pace of before; that is the knee, and
the environment goes back to it and stays. If fewer then bring less, it was none. After a while, which grows, one more
is tried, and where it helps two more, four more: the server may have got faster.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from rolloutmq.services.orchestrator.estimates import Rates
from rolloutmq.services.orchestrator.pressure import PressureSample

SLOWER: Final = 0.85
"""Below that part of the pace of before a worker is clearly slower."""
MEMORIES: Final = 3.0
"""So many memories of the means must pass before they show the workers that there are now."""
SURE: Final = 2.0
"""So many times as long one more worker must not have been slower before it is said to help."""
FIRST_HOLD_S: Final = 300.0
"""How long it is believed at first; then twice as long each time."""
LONGEST_HOLD_S: Final = 3600.0
ROOM: Final = 1.05
"""Workers above the knee, so that what they share stays full while one of them pauses."""
FURTHER: Final = 2
FEW: Final = 4
"""So many times those that were seen to help are tried at once, or so many more."""
KEPT: Final = 0.9
"""At the knee at least that part of what more workers made must come."""
HELPS: Final = 0.5
"""More workers help if they bring at least that part of what they would bring if nothing held them up. What all make is
compared, not the pace of each: that of one more differs so little that the knee would creep up by one after another."""
SAME: Final = 0.95
"""Above that part of the pace of fewer, more workers have met nothing."""
FOLLOW_S: Final = 60.0
"""In so long the pace that is remembered follows what is seen: single looks are noisy, and rollouts get longer."""


@dataclass(frozen=True, slots=True)
class Knee:
    """What is known of the bound that workers share."""

    most: int = 0
    """More than so many bring no more; 0: nothing is known of that."""
    known: int = 0
    """What it was before that was tried."""
    step: int = 1
    """How many more are tried: twice as many each time they help."""
    tried: bool = False
    """`most` is above the knee, to see whether it still is one."""
    usual: float = 0.0
    """What all made at the knee before that was tried."""
    slow: bool = False
    """A worker makes clearly less than it made among fewer; whether that is the knee is yet to be seen."""
    until: float = -math.inf
    """When more are tried."""
    hold_s: float = FIRST_HOLD_S
    best: float = 0.0
    """What a worker makes where nothing holds it up."""
    among: int = 0
    """Most workers at which that was seen."""
    made: float = 0.0
    """What all made before they went back to the knee; 0: it is known whether that was right."""
    ready: int = 0
    since: float = -math.inf
    """For how long there are as many workers as now, and none that starts."""
    steady: float = 0.0
    """What a worker makes among so many, the mean of a longer time; 0: they are not at work for long enough."""
    at: float = -math.inf
    engines: int = 0
    """Servers that they share: with another number of them nothing is known any more."""

    @property
    def reach(self) -> int:
        """Most workers that are tried before it is seen what those bring that there are; 0 if nothing was seen yet."""
        return max(FURTHER * self.among, self.among + FEW) if self.among else 0

    def looked(self, rates: Rates, sample: PressureSample, now: float) -> "Knee":
        """Return what is known after one more look."""
        ready, engines = sample.crew.ready, sample.engines
        new = replace(self, at=now) if engines == self.engines else Knee(engines=engines, at=now)
        if ready != self.ready or sample.crew.starting:
            new = replace(new, ready=ready, since=now, steady=0.0)
        pace = rates.per_worker
        if pace is None or not ready:
            return new
        if new.among:
            new = replace(new, slow=pace < SLOWER * new.best and ready > new.among)
        shows_s = MEMORIES * rates.making_memory_s + rates.rollout_s
        if now - new.since < shows_s:
            return new
        follows = 1.0 - math.exp(-min(max(0.0, now - self.at), 10.0) / FOLLOW_S)
        new = new._remember(pace, follows)
        return new._judge(pace, now, sure=now - new.since >= SURE * shows_s)

    def _remember(self, pace: float, follows: float) -> "Knee":
        """Follow the pace of these workers, and of the most that were not slower than fewer."""
        steady = self.steady + (pace - self.steady) * follows if self.steady else pace
        self = replace(self, steady=steady)
        if not self.among:
            return replace(self, best=pace, among=self.ready)
        if self.ready > self.among and pace < SAME * self.best:
            return self
        best = self.best + (pace - self.best) * follows
        return replace(self, best=best, among=max(self.among, self.ready))

    def _judge(self, pace: float, now: float, *, sure: bool) -> "Knee":
        if self.most and self.ready > self.most:
            return self  # they are yet to go
        if self.made and self.ready <= self.most:
            if pace * self.ready < KEPT * self.made:  # fewer brought less: it was no knee
                return replace(self, most=0, slow=False, made=0.0, best=pace)
            return replace(self, made=0.0)
        if self.slow and pace * self.ready < KEPT * self.best * self.among:
            # Who shares makes together what fewer made: here all of them have become slower, and that is the pace now.
            return replace(self, slow=False, best=pace, among=self.ready)
        if self.tried:
            return self._judge_tried(pace, now, sure=sure)
        crowded = not self.most and self.ready >= self.reach and pace < SAME * self.best
        if self.slow or crowded:
            knee = max(1, math.ceil(ROOM * pace * self.ready / self.best))
            if knee < self.ready or (crowded and knee == self.ready):
                return self._found(knee, pace, now)
        elif self.most and now >= self.until:
            more = self.most + self.step
            new = replace(self, most=more, known=self.most, tried=True, until=now + self.hold_s)
            return replace(new, usual=self.steady * self.ready)
        return self

    def _judge_tried(self, pace: float, now: float, *, sure: bool) -> "Knee":
        if self.slow:
            return self._found(
                min(self.known, max(1, math.ceil(ROOM * pace * self.ready / self.best))), pace, now
            )
        if not sure or self.ready < self.most:
            return self
        if self.steady * self.ready < self.usual * (1.0 + HELPS * (self.ready / self.known - 1.0)):
            return self._found(self.known, pace, now)
        return replace(self, tried=False, until=now, hold_s=FIRST_HOLD_S, step=2 * self.step)

    def _found(self, knee: int, pace: float, now: float) -> "Knee":
        held, made = min(self.hold_s, LONGEST_HOLD_S), pace * self.ready
        new = replace(self, most=knee, tried=False, step=1, slow=False, made=made)
        return replace(new, until=now + held, hold_s=2.0 * held)
