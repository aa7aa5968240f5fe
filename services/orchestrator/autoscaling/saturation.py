"""The saturation detector: the number of workers beyond which throughput stops growing (the knee). Pure.

It tries at most twice the workers known to help, or a few more, until those have run for a while. While a worker makes
clearly less than it did among fewer, no worker is started. Once the new workers have run for a while, the detector
computes how many would have the same throughput at the earlier pace. That is the knee, and the environment scales back
to it. If throughput then drops, there was no saturation. After a hold time, which doubles, it probes with one more
worker; if that helps with two more, then four: the server may have become faster.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.demand import DemandEstimator
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample

SLOWER: Final = 0.85
"""Ratio to the earlier pace below which a worker is clearly slower."""
MEMORIES: Final = 3.0
"""Time constants of the means to wait before they reflect the present workers."""
SURE: Final = 2.0
"""Factor on that time during which one more worker must not be slower before it counts as helpful."""
FIRST_HOLD_S: Final = 300.0
"""First hold time of a knee; it doubles each time."""
LONGEST_HOLD_S: Final = 3600.0
ROOM: Final = 1.05
"""Workers beyond the knee, so that the shared server stays saturated while one of them pauses."""
FURTHER: Final = 2
FEW: Final = 4
"""Limit of a probe: this factor of the workers known to help, or this many more."""
KEPT: Final = 0.9
"""Minimum throughput at the knee, relative to that of more workers."""
HELPS: Final = 0.5
"""Minimum part of the expected gain that shows that more workers help. The total throughput is compared, not the pace
of each: the pace changes so little with one worker that the knee would creep up."""
SAME: Final = 0.95
"""Ratio to the pace among fewer above which more workers are not saturated."""
FOLLOW_S: Final = 60.0
"""Time constant of the remembered pace: single samples are noisy, and rollouts get longer."""


@dataclass(frozen=True, slots=True)
class SaturationDetector:
    """State of the search for the knee."""

    most: int = 0
    """Knee: more workers add no throughput; 0 if unknown."""
    known: int = 0
    """Knee before the present probe."""
    step: int = 1
    """Workers of the next probe; doubles each time they help."""
    tried: bool = False
    """A probe is running: `most` is above the knee."""
    usual: float = 0.0
    """Total throughput at the knee before the probe."""
    slow: bool = False
    """A worker makes clearly less than among fewer; saturation is not confirmed yet."""
    until: float = -math.inf
    """Time of the next probe."""
    hold_s: float = FIRST_HOLD_S
    best: float = 0.0
    """Throughput of a worker without saturation."""
    among: int = 0
    """Largest worker count at which that was measured."""
    made: float = 0.0
    """Total throughput before scaling back to the knee; 0 once the result is known."""
    ready: int = 0
    since: float = -math.inf
    """Time since which the worker count is unchanged and none is starting."""
    steady: float = 0.0
    """Mean throughput of a worker at this count; 0 until they have run long enough."""
    at: float = -math.inf
    engines: int = 0
    """Inference servers; a change of their number discards the knee."""

    @property
    def reach(self) -> int:
        """Return the largest count to try until the present workers are measured; 0 before any measurement."""
        return max(FURTHER * self.among, self.among + FEW) if self.among else 0

    def looked(self, rates: DemandEstimator, sample: PressureSample, now: float) -> "SaturationDetector":
        """Return the state after one more sample."""
        ready, engines = sample.crew.ready, sample.engines
        new = (
            replace(self, at=now) if engines == self.engines else SaturationDetector(engines=engines, at=now)
        )
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

    def _remember(self, pace: float, follows: float) -> "SaturationDetector":
        """Track the pace of these workers, and of the largest count that was not slower."""
        steady = self.steady + (pace - self.steady) * follows if self.steady else pace
        self = replace(self, steady=steady)
        if not self.among:
            return replace(self, best=pace, among=self.ready)
        if self.ready > self.among and pace < SAME * self.best:
            return self
        best = self.best + (pace - self.best) * follows
        return replace(self, best=best, among=max(self.among, self.ready))

    def _judge(self, pace: float, now: float, *, sure: bool) -> "SaturationDetector":
        if self.most and self.ready > self.most:
            return self  # scale-down in progress
        if self.made and self.ready <= self.most:
            if pace * self.ready < KEPT * self.made:  # throughput dropped: no saturation
                return replace(self, most=0, slow=False, made=0.0, best=pace)
            return replace(self, made=0.0)
        if self.slow and pace * self.ready < KEPT * self.best * self.among:
            # Saturated workers share the throughput of fewer. Here every worker became slower: a new pace.
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

    def _judge_tried(self, pace: float, now: float, *, sure: bool) -> "SaturationDetector":
        if self.slow:
            return self._found(
                min(self.known, max(1, math.ceil(ROOM * pace * self.ready / self.best))), pace, now
            )
        if not sure or self.ready < self.most:
            return self
        if self.steady * self.ready < self.usual * (1.0 + HELPS * (self.ready / self.known - 1.0)):
            return self._found(self.known, pace, now)
        return replace(self, tried=False, until=now, hold_s=FIRST_HOLD_S, step=2 * self.step)

    def _found(self, knee: int, pace: float, now: float) -> "SaturationDetector":
        held, made = min(self.hold_s, LONGEST_HOLD_S), pace * self.ready
        new = replace(self, most=knee, tried=False, step=1, slow=False, made=made)
        return replace(new, until=now + held, hold_s=2.0 * held)
