"""The saturation detector: the number of workers beyond which throughput stops growing (the knee). Pure.

Growth needs evidence. At most twice the workers known to help may run, or a few more, until enough of their groups have
arrived to tell how fast they are. If they are as fast as fewer were, they help, and the next doubling is free. If they
are clearly slower, they share something: the knee is the number that would have the same throughput at the earlier
pace, and the environment scales back to it. If throughput then drops, there was no saturation.

A pace that changes while the number stays is a change of the rollouts, and the baseline follows it.

After a hold time, which doubles, one more worker is tried at the knee; if that helps two more, then four: the server
may have become faster. A worker that crashed and starts again counts: the number that runs is what it was.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.demand import DemandEstimator
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample

GROUPS: Final = 24
"""Arrived groups that tell a pace: to about a tenth, since rollouts spread less than chance."""
CYCLES: Final = 1.0
"""Rollouts that they must span: workers that started together deliver together."""
SURE_GROUPS: Final = 200
SURE_S: Final = 45.0
"""The same for one more worker at the knee, whose effect is small."""
LIKE: Final = 0.15
"""Relative change of the number of workers within one measurement."""
SLOWER: Final = 0.85
"""Ratio to the earlier pace below which a worker is clearly slower."""
FIRST_HOLD_S: Final = 600.0
"""First hold time of a knee; it doubles each time."""
LONGEST_HOLD_S: Final = 3600.0
ROOM: Final = 1.05
"""Workers beyond the knee, so that the shared server stays saturated while one of them pauses."""
FURTHER: Final = 2
FEW: Final = 4
"""Limit of growth without evidence: this factor of the workers known to help, or this many more."""
KEPT: Final = 0.9
"""Minimum throughput of saturated workers, relative to that of fewer."""
CLOSE: Final = 0.8
"""Knee, relative to the workers before, from which only a sure measurement tells whether throughput dropped."""
HELPS: Final = 0.5
"""Minimum part of the expected gain that shows that more workers help. The total throughput is compared, not the pace
of each: the pace changes so little with one worker that the knee would creep up."""
FOLLOWS: Final = 0.25
"""Weight of a new measurement in the baseline."""
ROUND: Final = 0.5
LOST: Final = 0.95
"""Throughput at the knee, relative to that of more workers, from which it is not too low."""


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
    """Largest worker count that was not clearly slower."""
    top: float = 0.0
    """Total throughput at that count."""
    made: float = 0.0
    """Total throughput before scaling back to the knee; 0 once the result is known."""
    above: int = 0
    """Workers that made it."""
    doubted: bool = False
    """The last measurement differed clearly from the baseline, and may have begun before the change."""
    ready: int = 0
    """Workers at the beginning of the present measurement."""
    begun: tuple[float, float, float] = (0.0, 0.0, -math.inf)
    """What was made by then, the busy worker time, and the time."""
    engines: int = 0
    """Inference servers; a change of their number discards the knee."""

    @property
    def reach(self) -> int:
        """Return the largest count to try until the present workers are measured.

        It is twice the workers that would make as much alone, without slowing each other down.
        """
        alone = math.ceil(self.top / self.best - ROUND) if self.best else 0
        return max(FURTHER * alone, alone + FEW)

    def looked(self, rates: DemandEstimator, sample: PressureSample, now: float) -> "SaturationDetector":
        """Return the state after one more sample."""
        new = self if sample.engines == self.engines else self._with_engines(sample.engines)
        ready = rates.delivering
        like = 0.0 if new.tried else LIKE * new.ready
        if not ready or abs(ready - new.ready) > like:
            new = replace(new, ready=ready, begun=(rates.made_all, rates.busy_all_s, now))
        pace = rates.per_worker
        is_slow = pace is not None and new.among > 0 and ready > new.among and pace < SLOWER * new.best
        if is_slow != new.slow:
            new = replace(new, slow=is_slow)
        made, busy_s = rates.made_all - new.begun[0], rates.busy_all_s - new.begun[1]
        groups, took_s = made / max(1, sample.group_sequences), now - new.begun[2]
        if not ready or groups < GROUPS or took_s < CYCLES * rates.rollout_s or busy_s <= 0.0:
            return new
        is_sure = groups >= SURE_GROUPS and took_s >= SURE_S
        return new._judge(made / busy_s, ready, now, (rates.made_all, rates.busy_all_s, now), is_sure=is_sure)

    def _with_engines(self, engines: int) -> "SaturationDetector":
        """Forget the knee, but not how fast a worker is without one."""
        if not self.engines:
            return replace(self, engines=engines)
        return SaturationDetector(engines=engines, best=self.best, among=self.among, top=self.top)

    def _judge(
        self, pace: float, ready: int, now: float, here: tuple[float, float, float], *, is_sure: bool
    ) -> "SaturationDetector":
        """Judge a measured pace; `here` begins the next measurement."""
        fresh = replace(self, ready=ready, begun=here)
        if not self.among:
            return replace(fresh, best=pace, among=ready, top=pace * ready)
        if self.most and ready > self.most:
            return self  # scale-down in progress
        if self.made:
            return self._verified(fresh, pace, ready, is_sure=is_sure)
        if self.tried:
            return self._judge_tried(fresh, pace, ready, now, is_sure=is_sure)
        if not self.most and ready > self.among and pace < SLOWER * self.best:
            if pace * ready < KEPT * self.top:
                # Saturated workers share the throughput of fewer. Here every worker became slower: a new pace.
                return fresh._based(pace, ready)
            return fresh._found(max(1, math.ceil(ROOM * pace * ready / self.best)), pace, ready, now)
        if self.most and now >= self.until:
            if not is_sure:
                return self
            more = self.most + self.step
            fresh = replace(fresh, most=more, known=self.most, tried=True, until=now + self.hold_s)
            return replace(fresh, usual=pace * ready)
        if self.most and ready > CLOSE * self.most:
            return fresh  # the pace at the knee is not that of workers alone
        return fresh._followed(pace, ready)

    def _verified(
        self, fresh: "SaturationDetector", pace: float, ready: int, *, is_sure: bool
    ) -> "SaturationDetector":
        """Compare the throughput at a knee that was just found with that of more workers."""
        part = ready / self.above
        if pace * ready < self.made * (1.0 + part) / 2.0 and (is_sure or part < CLOSE):
            return replace(fresh._based(pace, ready), most=0, made=0.0)  # it dropped: no saturation
        if not is_sure:
            return self
        if pace * ready < LOST * self.made and self.most < self.above:  # the baseline was too high
            more = max(self.most, min(self.above, math.ceil(ready * self.made / (pace * ready))))
            return replace(fresh, most=more, best=self.made / more, made=0.0)
        return replace(fresh, made=0.0)

    def _based(self, pace: float, ready: int) -> "SaturationDetector":
        """Take a measurement as the new baseline."""
        return replace(self, best=pace, among=ready, top=pace * ready, slow=False, doubted=False)

    def _followed(self, pace: float, ready: int) -> "SaturationDetector":
        """Let the baseline follow workers that are not saturated.

        More workers than before are no measure of a change of the rollouts; the same number, or fewer, are.
        """
        if ready > self.among:
            return replace(self, among=ready, top=pace * ready, doubted=False)
        change = pace / (self.top / self.among if ready > CLOSE * self.among else self.best)
        clearly = abs(change - 1.0) > 1.0 - SLOWER
        if clearly and not self.doubted:
            return replace(self, doubted=True)
        change = change if clearly else 1.0 + (change - 1.0) * FOLLOWS
        return replace(self, best=self.best * change, top=self.top * change, doubted=False)

    def _judge_tried(
        self, fresh: "SaturationDetector", pace: float, ready: int, now: float, *, is_sure: bool
    ) -> "SaturationDetector":
        if pace < SLOWER * self.best * self.known / self.most:
            return fresh._found(self.known, pace, ready, now)
        if not is_sure or ready < self.most:
            return self
        if pace * ready < self.usual * (1.0 + HELPS * (ready / self.known - 1.0)):
            return fresh._found(self.known, pace, ready, now)
        new = replace(fresh, tried=False, until=now, hold_s=FIRST_HOLD_S, step=2 * self.step)
        return replace(new, among=ready, top=pace * ready)

    def _found(self, knee: int, pace: float, ready: int, now: float) -> "SaturationDetector":
        held, made = min(self.hold_s, LONGEST_HOLD_S), pace * ready
        new = replace(self, most=knee, tried=False, step=1, slow=False, doubted=False)
        new = replace(new, made=made if knee < ready else 0.0, above=ready)
        return replace(new, among=min(self.among, knee), until=now + held, hold_s=2.0 * held)
