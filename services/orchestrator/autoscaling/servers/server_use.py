"""What the workers of an environment did lately, and measurements of several environments together. Pure.

Sizes and throughputs are in sequences per second: the size of a fleet is what its workers would make if none slowed
another down. A measurement tells as much as its groups do: where these arrive evenly, a few of them are as precise as
many that arrive by chance.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from rolloutmq.services.orchestrator.autoscaling.servers.progress import Sampled

GROUPS: Final = 24
"""Arrived groups that tell a throughput, while nobody knows how much it differs by chance."""
LEAST_GROUPS: Final = 8
PRECISE: Final = 0.1
"""Least groups if they arrive evenly; and the relative error that they may have."""
OWN_GROUPS: Final = 12
"""Most groups that one environment needs for its own pace, if it makes at least `LARGE` of all."""
LONG_S: Final = 30.0
"""Rollouts from which tokens may confirm growth. Of shorter ones groups tell as early, and of two noisy measurements
the one that lets more workers start would count."""
SURE_GROUPS: Final = 200
SURE_S: Final = 45.0
"""Groups and seconds that tell the effect of one more worker among many."""
TELLS: Final = 5.0
"""Part of the workers that comes or goes, in standard errors of their throughput, which tells its effect."""
CLEAR: Final = 2.0
"""Difference of a throughput, in standard errors, that is not due to chance: 24 independent groups tell a doubling."""
CHANGE: Final = 3.0
"""The same of workers that are measured all the time: one of many differences is large by chance."""
STEADY: Final = 0.05
MORE: Final = 0.15
"""Relative difference of two throughputs of a full server from which it is not the same server, or rollout."""
EARLY_GROUPS, EARLY_S = 4.0, 10.0
"""Groups of fewer workers that raise this suspicion, and seconds that they span."""


class ServerUse(msgspec.Struct, frozen=True):
    """What the detector knows of one environment.

    Attributes:
        env: Its name.
        workers: Workers whose rollouts arrive now; crashed ones that start again count.
        made: Sequences made, in total.
        busy_s: Time in which its workers did not wait meanwhile, summed over them.
        present_s: Time in which they were there.
        counted_s: Time in which this was measured.
        pace: Sequences per second of one worker, lately; None while unknown.
        rollout_s: Mean duration of a rollout.
        group_sequences: Sequences of one group.
        weight: Its share, relative to the others.
        want: Workers it would run if the servers fed them all.
        available: Part of their time in which its workers are ready; the others crashed and start again.
        demand: Sequences per second the trainer would consume; None while unknown.
        starved_s: Time in which the trainer waited, in total.
        sampled: What its workers have sampled, whether their rollouts arrive yet or not.
        dispersion: Variance of the number of groups relative to that of independent ones.
    """

    env: str
    workers: int
    made: float
    busy_s: float
    present_s: float
    counted_s: float
    pace: float | None
    rollout_s: float = 0.0
    group_sequences: int = 1
    weight: float = 1.0
    want: float = 0.0
    available: float = 1.0
    demand: float | None = None
    starved_s: float = 0.0
    sampled: Sampled = msgspec.field(default_factory=Sampled)
    dispersion: float = 1.0

    @property
    def trusts_tokens(self) -> bool:
        """Return whether tokens may confirm growth: rollouts are long, and enough groups have arrived to know how many
        workers to grow to."""
        return self.rollout_s >= LONG_S and self.made >= self.group_sequences * min(OWN_GROUPS, self.workers)


class Span(msgspec.Struct, frozen=True):
    """What one environment did since some time: sequences and groups made, time without waits, and mean workers."""

    made: float
    groups: float
    busy_s: float
    workers: float

    @classmethod
    def of(cls, then: ServerUse, now: ServerUse) -> "Span":
        made = now.made - then.made
        workers = (now.present_s - then.present_s) / max(now.counted_s - then.counted_s, 1e-3)
        return cls(made, made / max(1, now.group_sequences), now.busy_s - then.busy_s, workers)

    def pace(self, least: float) -> float | None:
        """Return the sequences per second of one worker; None with fewer groups than `least`."""
        return self.made / self.busy_s if self.busy_s > 0.0 and self.groups >= least else None

    @property
    def early_pace(self) -> float | None:
        """Return the pace if it may raise a suspicion later."""
        return self.pace(EARLY_GROUPS) if self.busy_s >= EARLY_S * self.workers else None


class Rest(msgspec.Struct):
    """The environments without a pace of their own in a measurement, taken together."""

    size: float = 0.0
    made: float = 0.0
    expected: float = 0.0
    """What they would have made if none slowed another down."""
    groups: float = 0.0

    def add(self, span: Span, best: float) -> None:
        self.size += span.workers * best
        self.made += span.made
        self.expected += span.busy_s * best
        self.groups += span.groups

    def total(self, usual: float) -> float:
        """Return their throughput: of their size, the part that they made; the `usual` part with too few groups."""
        is_told = self.groups >= OWN_GROUPS and self.expected > 0.0
        return self.size * (self.made / self.expected if is_told else usual)


class Measurement(msgspec.Struct, frozen=True):
    """One measurement: paces by environment; size, throughput and groups; whether the trainer got what it demands."""

    paces: Mapping[str, float]
    size: float
    total: float
    groups: float
    is_sure: bool
    is_enough: bool
    took_s: float = 0.0
    dispersion: float = 1.0

    @property
    def error(self) -> float:
        """Return its relative standard error."""
        return math.sqrt(self.dispersion / self.groups)

    def is_clear(self, part: float, groups: float = math.inf) -> bool:
        """Return whether such a relative difference from a throughput of so many groups is more than chance."""
        return abs(part) >= CLEAR * self.error_beside(groups)

    def error_beside(self, groups: float) -> float:
        """Return the relative standard error of its difference from a throughput of so many groups."""
        return math.hypot(self.error, math.sqrt(self.dispersion / groups))

    @property
    def is_precise(self) -> bool:
        """Return whether more groups would hardly make it more precise than what it is compared with."""
        return self.error <= STEADY

    def is_changed(self, part: float, groups: float) -> bool:
        """Return whether such a difference is a change: chance is looked at again and again."""
        return abs(part) >= CHANGE * self.error_beside(groups)

    def is_less(self, made: float, part: float, groups: float) -> bool:
        """Return whether this part of the workers makes less than all of them `made`, as so many groups told.

        Workers of a full server make as much, others that part of it.
        """
        is_below = self.total < made * (1.0 + part) / 2.0
        return is_below and self.is_clear(1.0 - min(part, self.total / made), groups)

    def is_more(self, made: float, groups: float) -> bool:
        """Return whether fewer workers make more than all of them: rollouts became shorter, or the servers faster."""
        change = self.total / made - 1.0
        return change > MORE and self.is_clear(change, groups)

    def shows(self, part: float, groups: float = math.inf) -> bool:
        """Return whether it is precise enough to act on such a difference, or will hardly become more precise."""
        return self.is_sure or self.is_clear(part, groups)

    def tells(self, part: float) -> bool:
        """Return whether it tells what the coming or going of this part of the workers does."""
        if self.is_sure or part <= 0.0:
            return self.is_sure
        groups = max(LEAST_GROUPS, self.dispersion * (TELLS / part) ** 2)
        return self.took_s >= SURE_S and self.groups >= groups


def telling_groups(uses: Sequence[ServerUse]) -> int:
    """Return the groups that tell the throughput of all: fewer if they arrive more evenly than by chance."""
    dispersion = max((one.dispersion for one in uses), default=1.0)
    return min(GROUPS, max(LEAST_GROUPS, math.ceil(dispersion / PRECISE**2)))
