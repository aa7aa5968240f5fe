"""What there is to learn from a batch: each of its groups judged, once. Pure.

repeated   learned from before, only its settlement was lost: settled again, never learned from again
rejected   the policy cannot learn from it at all
filtered   no difference between its sequences, so no signal
examples   the rest, with their advantages
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from rolloutmq.schemas.config import TrainerConfig
from rolloutmq.schemas.delivery import Rejected
from rolloutmq.schemas.trajectory import Group
from rolloutmq.trainer.advantages import Verdict, judge, shuffled
from rolloutmq.trainer.collate import Bounds, Example, find_fault


@dataclass(slots=True)
class Lesson:
    """The groups of a batch by what becomes of them; together they are the batch, in its order."""

    examples: list[Example] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    @property
    def trained(self) -> list[Group]:
        """The groups of the examples."""
        return [example.group for example in self.examples]

    def void(self, reason: str) -> None:
        """Reject what was to be learned from: it turned out to be unusable."""
        self.rejected += [Rejected(group_id=group.group_id, reason=reason) for group in self.trained]
        self.examples.clear()


def study(
    groups: Sequence[Group], config: TrainerConfig, bounds: Bounds, known: Container[str], seed: int
) -> Lesson:
    """Judge the groups of a batch.

    Args:
        groups: The batch.
        config: How advantages are computed, and whether scores are shuffled first.
        bounds: What the policy can read.
        known: Ids of groups that were learned from already.
        seed: Of the shuffling.
    """
    lesson = Lesson()
    for group in groups:
        if group.group_id in known:
            lesson.repeated.append(group.group_id)
        elif fault := find_fault(group, bounds):
            lesson.rejected.append(Rejected(group_id=group.group_id, reason=fault))
        else:
            _judge(lesson, group, config, seed)
    return lesson


def _judge(lesson: Lesson, group: Group, config: TrainerConfig, seed: int) -> None:
    scores = group.columns["scores"].numbers()
    if config.shuffle_rewards:
        scores = shuffled(scores, seed, group.group_id)
    judgement = judge(scores, config.advantage)
    if judgement.verdict is Verdict.USABLE:
        lesson.examples.append(Example(group, judgement.advantages))
    elif judgement.verdict is Verdict.FILTERED:
        lesson.filtered.append(group)
    else:
        lesson.rejected.append(Rejected(group_id=group.group_id, reason=judgement.reason))


def mean_score(groups: Sequence[Group]) -> float:
    """Return the mean raw score of all sequences of the groups, 0 if there are none."""
    scores = [group.columns["scores"].numbers() for group in groups]
    return float(np.concatenate(scores).mean()) if scores else 0.0
