"""What there is to learn from a batch: each of its groups judged, once. Pure.

repeated   learned from before, only its settlement was lost: settled again, never learned from again
rejected   the policy cannot learn from it at all
filtered   no difference between its sequences, so no signal; or older than the loss has use for (`too_old`)
examples   the rest, with their advantages
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from rolloutmq.schemas.delivery import Rejected
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.losses import LossSection
from rolloutmq.schemas.mask import trained_tokens
from rolloutmq.schemas.training import TrainerConfig
from rolloutmq.schemas.trajectory import Group
from rolloutmq.trainer.advantages import Judgement, Verdict, judge, judge_given, shuffled
from rolloutmq.trainer.collate import Bounds, Example, find_fault
from rolloutmq.trainer.losses.kl import ESTIMATORS
from rolloutmq.trainer.losses.ratio import bounded
from rolloutmq.trainer.teaching import find_fault as find_fault_of_teacher
from rolloutmq.trainer.teaching import shuffled as shuffled_teacher

ADVANTAGES: Final = "advantages"
"""Column of advantages that an environment gives itself, one a token. They are used as they are."""


@dataclass(slots=True)
class Lesson:
    """The groups of a batch by what becomes of them; together they are the batch, in its order.

    Attributes:
        too_old: How many of the filtered ones are older than `trainer.loss.correction.max_staleness`.
    """

    examples: list[Example] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    too_old: int = 0
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
    groups: Sequence[Group],
    config: TrainerConfig,
    bounds: Bounds,
    known: Container[str],
    seed: int,
    age: Callable[[PolicyVersion], int] = PolicyVersion().distance,
) -> Lesson:
    """Judge the groups of a batch.

    Args:
        groups: The batch.
        config: How advantages are computed, and whether scores are shuffled first.
        bounds: What the policy can read, and the loss needs.
        known: Ids of groups that were learned from already.
        seed: Of the shuffling.
        age: Tells how many optimizer steps lie between a policy and the one that will learn.
    """
    lesson = Lesson()
    for group in groups:
        if group.group_id in known:
            lesson.repeated.append(group.group_id)
        elif fault := find_fault(group, bounds) or find_fault_of_teacher(
            group, config.distillation, bounds.vocabulary, bounds.tokenizer
        ):
            lesson.rejected.append(Rejected(group_id=group.group_id, reason=fault))
        else:
            judgement = _judged(group, config, seed)
            if config.distillation.shuffle_teacher:
                group = shuffled_teacher(group, config.distillation, seed)
            _admit(lesson, group, judgement, age(group.oldest), config)
    return lesson


def _admit(lesson: Lesson, group: Group, judgement: Judgement, staleness: int, config: TrainerConfig) -> None:
    most = config.loss.correction.max_staleness
    taught = judgement.verdict is Verdict.FILTERED and config.distillation.teaches
    if judgement.verdict is not Verdict.REJECTED and most is not None and staleness > most:
        lesson.filtered.append(group)
        lesson.too_old += 1
    elif judgement.verdict is Verdict.USABLE or taught:
        judged = judgement.verdict is Verdict.USABLE
        lesson.examples.append(Example(group, judgement.advantages, staleness, judged))
    elif judgement.verdict is Verdict.FILTERED:
        lesson.filtered.append(group)
    else:
        lesson.rejected.append(Rejected(group_id=group.group_id, reason=judgement.reason))


def _judged(group: Group, config: TrainerConfig, seed: int) -> Judgement:
    given = group.columns.get(ADVANTAGES)
    if given is not None and not config.shuffle_rewards:
        return judge_given(given.numbers(), trained_tokens(group))
    scores = group.columns["scores"].numbers()
    if config.shuffle_rewards:
        scores = shuffled(scores, seed, group.group_id)
    judgement = judge(scores, config.loss, _penalties(group, config.loss))
    # One for each token from here on, whoever made them.
    return replace(judgement, advantages=judgement.advantages.repeat(group.columns["tokens"].lengths[0]))


def _penalties(group: Group, config: LossSection) -> NDArray[np.float64] | None:
    """Return what each sequence loses for its distance to the reference, if that is a matter of the reward."""
    if not config.kl or config.kl_in == "loss":
        return None
    sampled, reference = (group.columns[name].numbers() for name in ("inference_logprobs", "ref_logprobs"))
    trained = trained_tokens(group)
    difference = torch.from_numpy(np.where(trained, sampled - reference, 0.0))
    estimate: NDArray[np.float64] = ESTIMATORS[config.kl_estimator](bounded(difference)).numpy()
    rows = np.arange(group.sequences).repeat(group.columns["tokens"].lengths[0])
    penalties = np.zeros(group.sequences)
    np.add.at(penalties, rows, config.kl * estimate)
    return penalties


def mean_score(groups: Sequence[Group]) -> float:
    """Return the mean raw score of all sequences of the groups, 0 if there are none."""
    scores = [group.columns["scores"].numbers() for group in groups]
    return float(np.concatenate(scores).mean()) if scores else 0.0
