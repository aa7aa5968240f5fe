"""Reports of a trainer's steps: what each learned from, and what was filtered since the step before.

A trainer may filter groups by themselves, such as those without variance, while it looks for the groups of its next
step. The health of the rewards needs them all, so they count with that step.
"""

import time
from collections.abc import Iterable, Sequence

from rolloutmq.bus.consumer.groups import HeldGroup
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.health import LaneScores
from rolloutmq.trainer.step.lane_scores import lane_scores, merged


class StepReports:
    """Makes the report of each step of one trainer. Keeps sums, no group."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._groups = self._filtered = 0
        self._reward = 0.0
        """Sum of the groups' mean rewards."""
        self._scores: tuple[LaneScores, ...] = ()

    def add_filtered(self, held: Sequence[HeldGroup]) -> None:
        """Count groups that no step used."""
        self._add(held)
        self._filtered += len(held)

    def _add(self, held: Iterable[HeldGroup]) -> None:
        groups = [one.group for one in held]
        self._groups += len(groups)
        self._reward += sum(group.rewards().mean for group in groups)
        self._scores = merged([*self._scores, *lane_scores(groups)])

    def step(
        self, used: Sequence[HeldGroup], learned: PolicyVersion, after: PolicyVersion, run: str
    ) -> StepDone:
        """Return the report of a step, and begin the next one. Its loss is known to the trainer alone.

        Args:
            used: Groups that the step used, at least one.
            learned: Policy before the step.
            after: Policy after it.
            run: Name of the run.
        """
        self._add(used)
        now = time.monotonic()
        ages = [held.staleness(learned) for held in used]
        report = StepDone(
            run=run,
            incarnation=after.incarnation,
            step=after.step,
            at=time.time(),
            reward=self._reward / self._groups,
            loss=0.0,
            tokens=sum(held.group.tokens for held in used),
            groups=self._groups,
            filtered=self._filtered,
            staleness_max=max(ages),
            staleness_mean=sum(ages) / len(ages),
            pull_s=0.0,
            step_s=now - self._began,
            scores=self._scores,
        )
        self._begin()
        return report
