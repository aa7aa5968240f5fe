"""What a batch came to, as it is told to others: a line for `trained.jsonl`, an event for `step`. Pure.

Rewards are the raw scores, as the environments gave them, of all groups, those without a signal included: what was
shuffled, centred or divided for the advantages never shows here.
"""

from dataclasses import dataclass
from typing import Final

from rolloutmq.schemas.control import StepDone
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.records import SettledBatch
from rolloutmq.trainer.lesson import Lesson, mean_score
from rolloutmq.trainer.uplink import PulledBatch

LOSS: Final = "loss"


@dataclass(frozen=True, slots=True)
class Account:
    """One batch, judged and done with.

    Attributes:
        batch, lesson: What was pulled, and what became of each group.
        before, after: The policy that pulled it, and the one that exists now; the same if there was no step.
        metrics: Of the step, if there was one.
    """

    batch: PulledBatch
    lesson: Lesson
    before: PolicyVersion
    after: PolicyVersion
    metrics: dict[str, float]

    @property
    def trained(self) -> list[str]:
        """Ids of the groups that the step learned from."""
        return [group.group_id for group in self.lesson.trained]

    @property
    def filtered(self) -> list[str]:
        """Ids of the groups without a signal."""
        return [group.group_id for group in self.lesson.filtered]

    @property
    def rejected(self) -> list[str]:
        """Ids of the groups that could not be used, those that did not even decode included."""
        return [one.group_id for one in (*self.batch.rejected, *self.lesson.rejected)]

    def line(self, at: float) -> SettledBatch | None:
        """Return the journal's line, or None if all of the batch stands in an earlier one."""
        if not (self.trained or self.filtered or self.rejected):
            return None
        scored = (*self.lesson.trained, *self.lesson.filtered)
        return SettledBatch(
            at=at,
            version=self.after,
            trained=tuple(self.trained),
            filtered=tuple(self.filtered),
            rejected=tuple(self.rejected),
            staleness=tuple(self._staleness()),
            rewards=tuple(mean_score([group]) for group in scored),
            rewound=self.batch.rewound,
        )

    def event(self, run: str, at: float, pull_s: float, step_s: float) -> StepDone:
        """Return the event of a batch that was a step."""
        staleness = self._staleness()
        rest = {name: value for name, value in self.metrics.items() if name != LOSS}
        return StepDone(
            run=run,
            incarnation=self.after.incarnation,
            step=self.after.step,
            at=at,
            reward=mean_score(self.batch.groups),
            loss=self.metrics[LOSS],
            tokens=sum(group.tokens for group in self.batch.groups),
            groups=len(self.batch.groups),
            filtered=len(self.filtered),
            staleness_max=max(staleness),
            staleness_mean=sum(staleness) / len(staleness),
            pull_s=pull_s,
            step_s=step_s,
            extra=rest
            | {
                "rejected": len(self.rejected),
                "repeated": len(self.lesson.repeated),
                "short": float(self.batch.short),
                "rewound": float(self.batch.rewound),
            },
        )

    def _staleness(self) -> list[int]:
        return [self.before.distance(group.oldest) for group in self.lesson.trained]
