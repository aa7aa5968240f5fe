"""Progress within rollouts: growth that the tokens of running rollouts confirm. Pure.

Groups tell how fast workers are, and where a rollout takes minutes they tell it late. The completions of a rollout with
several turns tell it earlier: on a full server workers sample fewer tokens per second. The pace of a worker is its
tokens over the time in which it did not wait for credit. So it includes tools, and everything else that workers share.

After each change of the workers a meter waits for as many completions as sequences run, since new workers have
sampled and reported nothing yet. A few fast sequences may give them. Then it measures over as many completions as 24
groups have sequences, and at least as many as sequences run. Workers that are about as fast as the base are confirmed.
The base is the pace of the first workers, and of those that groups have proven: groups have the final word.

Without completions, nothing is confirmed: workers may sample in a way that nobody counts. With one completion for each
rollout, groups tell as early.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

GROUPS: Final = 24
"""Completions that tell a pace, in groups with one for each sequence: as many as groups tell a throughput."""
LIKE: Final = 0.15
"""Relative change of the workers within one measurement."""
SLOWER: Final = 0.9
"""Ratio to the base below which a worker is clearly slower."""
NEW_PART: Final = 0.25
"""Weight of another pace of the same workers in the base."""
FURTHER: Final = 1.5
"""Growth without evidence, as a factor of the confirmed workers. Those may be a fifth more than the servers can feed,
and groups need two rollouts to send the rest away."""


class Sampled(msgspec.Struct, frozen=True):
    """What the workers of one environment have sampled.

    Attributes:
        workers: Workers that are ready now.
        sequences: Sequences that one of them rolls out at once.
        group_sequences: Sequences of one group.
        running_s: Time in which workers did not wait, summed over them.
        completions: Completions in total, those of rollouts in progress included.
        tokens: Their sampled tokens.
    """

    workers: int = 0
    sequences: int = 1
    group_sequences: int = 1
    running_s: float = 0.0
    completions: int = 0
    tokens: int = 0


class ProgressMeter(msgspec.Struct, frozen=True):
    """The pace of the workers of one environment, in tokens per second of one worker.

    Attributes:
        base: Pace of a worker that nothing slows; 0 while unknown.
        among: Workers with that pace.
        pace: Last pace of the present workers; 0 while unknown.
        confirmed: Most workers that were not clearly slower.
        begun: What was known at the beginning of the measurement; None before the first.
        has_settled: As many completions as sequences run have come since the workers changed.
    """

    base: float = 0.0
    among: int = 0
    pace: float = 0.0
    confirmed: int = 0
    begun: Sampled | None = None
    has_settled: bool = False

    @property
    def is_slow(self) -> bool:
        """Return whether the present workers are clearly slower than the base."""
        return 0.0 < self.pace < SLOWER * self.base

    def looked(self, seen: Sampled, *, confirms: bool, begins: bool = True) -> "ProgressMeter":
        """Return the meter after one more sample.

        Args:
            seen: The sample.
            confirms: Workers may be confirmed.
            begins: The present workers may become the first base: nothing is known of smaller fleets.
        """
        begun = self.begun
        if begun is None or abs(seen.workers - begun.workers) > LIKE * begun.workers:
            return replace(self, pace=0.0, begun=seen, has_settled=False)
        completions, each = seen.completions - begun.completions, seen.workers * seen.sequences
        if not self.has_settled:
            return replace(self, begun=seen, has_settled=True) if completions >= max(1, each) else self
        if completions < max(each, GROUPS * seen.group_sequences):
            return self
        running_s = seen.running_s - begun.running_s
        if running_s <= 0.0:
            return replace(self, begun=seen)
        pace = (seen.tokens - begun.tokens) / running_s
        new = replace(self, pace=pace, begun=seen)
        if not self.base and begins:
            new = replace(new, base=pace, among=seen.workers)
        if new.is_slow or not new.base:
            return new
        if seen.workers <= (1.0 + LIKE) * new.among:
            new = replace(new, base=new.base + NEW_PART * (pace - new.base))
        return replace(new, confirmed=max(new.confirmed, seen.workers)) if confirms else new

    def proven(self) -> "ProgressMeter":
        """Take the pace as the base: groups have proven these workers."""
        if not self.pace or self.begun is None:
            return self
        return replace(self, base=self.pace, among=self.begun.workers)


Meters = Mapping[str, ProgressMeter]
"""Meters by environment."""


def reach(meters: Meters, env: str) -> int:
    """Return the most workers of an environment to try; 0 while any environment is slower, since servers are shared."""
    if env not in meters or any(one.is_slow for one in meters.values()):
        return 0
    return math.floor(FURTHER * meters[env].confirmed + 1e-9)


def unslowed(meters: Meters, env: str, pace: float) -> float:
    """Return the pace, in any unit, that a worker would have if nothing slowed it."""
    meter = meters.get(env)
    return pace * meter.base / meter.pace if meter is not None and meter.is_slow else pace
