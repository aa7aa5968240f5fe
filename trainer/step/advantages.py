"""Advantages of a batch: each group is judged once, and its scores become advantages. Pure.

    repeated   trained on before, only the settlement was lost: settled again, not trained again
    rejected   the policy cannot learn from the group
    filtered   equal scores, so no signal; too stale for the loss (`too_old`); or alike in the unit of their
               environment (`negligible`)
    examples   the rest, with advantages

Whether a group has a signal is decided by its raw scores. With `trainer.rewards.normalize` the scores are then brought
to the scale of their environment (`step.normalization`); raw scores are what every report shows.

Only differences within a group carry a signal. A group with equal scores is filtered: dividing by its deviation would
blow up rounding noise. A group with a score that is not finite is rejected. All computation is in float64 and rounds
once, to float32.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import frexp
from types import MappingProxyType
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from rolloutmq.schemas.config.losses import LossSection, Method
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected
from rolloutmq.trainer.losses.kl import ESTIMATORS
from rolloutmq.trainer.step.collate import Bounds, Example, find_fault
from rolloutmq.trainer.step.normalization import NEGLIGIBLE, RAW, ScoreScale, scale_of
from rolloutmq.trainer.step.overrides import find_fault as find_fault_of_overrides
from rolloutmq.trainer.step.overrides import zeroed
from rolloutmq.trainer.step.teacher_columns import find_fault as find_fault_of_teacher
from rolloutmq.trainer.step.teacher_columns import likeliest
from rolloutmq.trainer.step.teacher_columns import shuffled as shuffled_teacher

SPREAD_FLOOR: Final = 1e-6
"""Relative spread below which scores are equal, above the rounding of float32 sums.

The rule assumes that scores are as large as the terms they were summed from. A score of 1e-17, left of terms of size 1,
looks like a reward of that size and is trained on; `std_floor` keeps its effect negligible.
"""

SMALLEST_SPREAD: Final = 1e-30
"""Absolute spread below which scores are equal: smaller advantages would underflow in float32."""


HIDDEN: Final = (
    f"its scores differ by less than {NEGLIGIBLE:g} of the deviation or range by which trainer.rewards.normalize "
    "divides: a few extreme scores make it"
)
"""Reason of a group that has no signal on the scale of its environment."""


class GroupVerdict(StrEnum):
    """Outcome of judging a group."""

    USABLE = "usable"
    FILTERED = "filtered"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Verdict and advantages of one group.

    Attributes:
        verdict: Whether the group is trained on.
        advantages: `[n]`, or `[tokens]` if they came with the group; zeros unless it is usable.
        reason: Why it is rejected, or filtered although its scores differ; else empty.
    """

    verdict: GroupVerdict
    advantages: NDArray[np.float32]
    reason: str = ""


def judge(
    scores: NDArray[Any],
    config: LossSection,
    penalties: NDArray[np.float64] | None = None,
    scale: ScoreScale = RAW,
) -> GroupAdvantages:
    """Compute the advantages of one group.

    Args:
        scores: `[n]` from the environment.
        config: Method of comparison.
        penalties: `[n]`, KL penalty of each sequence. They are centred like the scores but never divided by a
            deviation, so that a group with nearly equal scores does not amplify them. Only the scores decide whether
            there is a signal.
        scale: Scale of the scores in the comparison. `std_floor` and the test for equal scores are of raw scores. A
            clip may make different scores equal: then the group is filtered. So is one whose scores are alike in this
            scale; `grpo` scales by the group itself.
    """
    values = np.asarray(scores, np.float64)
    if not np.isfinite(values).all():
        return _nothing(values, GroupVerdict.REJECTED, "a score is not a finite number")
    if not has_spread(values):
        return _nothing(values, GroupVerdict.FILTERED)
    hidden = HIDDEN if scale.hides(values) else ""
    if hidden and config.advantage != "grpo":
        return _nothing(values, GroupVerdict.FILTERED, hidden)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = scale.apply(values)
        if scaled.max() == scaled.min():
            return _nothing(values, GroupVerdict.FILTERED, hidden)
        floor = config.std_floor / scale.divisor
        found = compare(scaled, config.advantage, ddof=config.std_ddof, floor=floor)
        if penalties is not None:
            found = found - (leave_one_out if config.advantage == "rloo" else centre)(penalties)
        advantages = found.astype(np.float32)
    if not np.isfinite(advantages).all():
        return _nothing(
            values, GroupVerdict.REJECTED, "the range of its scores is too large: an advantage is not finite"
        )
    return GroupAdvantages(GroupVerdict.USABLE, advantages)


def judge_given(given: NDArray[np.float64], trained: NDArray[np.bool_]) -> GroupAdvantages:
    """Take over the advantages `[tokens]` of a group; values at tokens that are not trained are ignored."""
    if not np.isfinite(given[trained]).all():
        return _nothing(
            given, GroupVerdict.REJECTED, "an advantage of a trained token is not a finite number"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        advantages = np.where(trained, given, 0.0).astype(np.float32)
    if not np.isfinite(advantages).all():
        return _nothing(given, GroupVerdict.REJECTED, "an advantage is too large for float32")
    if not advantages.any():
        return _nothing(given, GroupVerdict.FILTERED)
    return GroupAdvantages(GroupVerdict.USABLE, advantages)


def _nothing(values: NDArray[np.float64], verdict: GroupVerdict, reason: str = "") -> GroupAdvantages:
    return GroupAdvantages(verdict, np.zeros(values.shape, np.float32), reason)


def has_spread(scores: NDArray[np.float64]) -> bool:
    """Return whether the scores `[n]` differ by more than rounding, at their scale."""
    if not scores.size:
        return False
    high, low = float(scores.max()), float(scores.min())
    return high - low > max(SMALLEST_SPREAD, SPREAD_FLOOR * max(abs(high), abs(low)))


def compare(scores: NDArray[np.float64], method: Method, *, ddof: int, floor: float) -> NDArray[np.float64]:
    """Return the advantage of each score `[n]` within its group."""
    match method:
        case "dr_grpo":
            return centre(scores)
        case "grpo":
            # The square of a score of 1e300 overflows. Dividing by a power of two changes no bit of the quotient.
            unit = 2.0 ** (frexp(max(1.0, float(np.abs(scores).max())))[1] - 1)
            scores, floor = scores / unit, floor / unit
            return centre(scores) / max(float(scores.std(ddof=ddof)), floor)
        case "rloo":
            return leave_one_out(scores)


def centre(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores minus their mean."""
    return scores - np.mean(scores)


def leave_one_out(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each of two or more scores minus the mean of the others.

    A baseline without the sequence's own score leaves the gradient unbiased.
    """
    return centre(scores) * (len(scores) / (len(scores) - 1))


def shuffled(scores: NDArray[Any], seed: int, group_id: str) -> NDArray[Any]:
    """Return the scores in random order, always the same for the same group: a control experiment."""
    order = np.random.default_rng([seed, crc32(group_id.encode())])
    return order.permutation(scores)


ADVANTAGES: Final = "advantages"
"""Column with an environment's own advantages, one per token; used unchanged."""


@dataclass(slots=True)
class BatchAdvantages:
    """The groups of a batch by outcome; together they are the batch, in its order.

    Attributes:
        too_old: Filtered groups that exceed `trainer.loss.correction.max_staleness`.
        negligible: Filtered groups whose scores are alike in the unit of their environment, by environment.
    """

    examples: list[Example] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    too_old: int = 0
    negligible: dict[str, int] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    @property
    def trained(self) -> list[Group]:
        """The groups of the examples."""
        return [example.group for example in self.examples]

    def void(self, reason: str) -> None:
        """Reject all examples: the step turned out to be unusable."""
        self.rejected += [Rejected(group_id=group.group_id, reason=reason) for group in self.trained]
        self.examples.clear()


def study(
    groups: Sequence[Group],
    config: TrainerConfig,
    bounds: Bounds,
    known: Container[str],
    seed: int,
    age: Callable[[PolicyVersion], int] = PolicyVersion().staleness,
    moments: Mapping[str, Moments] = MappingProxyType({}),
) -> BatchAdvantages:
    """Judge the groups of a batch.

    Args:
        groups: The batch.
        config: Method of advantages, and control experiments.
        bounds: Limits of the policy and needs of the loss.
        known: Ids of groups that were trained on before.
        seed: Seed of the shuffling.
        age: Returns the optimizer steps between a policy and the learner.
        moments: Moments of the scores by environment, as the batch brought them.
    """
    batch = BatchAdvantages()
    for group in groups:
        if group.group_id in known:
            batch.repeated.append(group.group_id)
        elif fault := _fault(group, config, bounds):
            batch.rejected.append(Rejected(group_id=group.group_id, reason=fault))
        else:
            judgement = _judged(group, config, seed, moments.get(group.env))
            group = likeliest(group, config.distillation, bounds.vocabulary)
            if config.distillation.shuffle_teacher:
                group = shuffled_teacher(group, config.distillation, seed)
            _admit(batch, group, judgement, age(group.oldest), config)
    return batch


def _fault(group: Group, config: TrainerConfig, bounds: Bounds) -> str:
    return (
        find_fault_of_overrides(group)
        or find_fault(group, bounds)
        or find_fault_of_teacher(group, config.distillation, bounds.vocabulary, bounds.tokenizer)
    )


def _admit(
    batch: BatchAdvantages, group: Group, judgement: GroupAdvantages, staleness: int, config: TrainerConfig
) -> None:
    most = config.loss.correction.max_staleness
    taught = judgement.verdict is GroupVerdict.FILTERED and config.distillation.teaches
    if judgement.verdict is not GroupVerdict.REJECTED and most is not None and staleness > most:
        batch.filtered.append(group)
        batch.too_old += 1
    elif judgement.verdict is GroupVerdict.USABLE or taught:
        judged = judgement.verdict is GroupVerdict.USABLE
        batch.examples.append(Example(group, judgement.advantages, staleness, judged))
    elif judgement.verdict is GroupVerdict.FILTERED:
        batch.filtered.append(group)
        if judgement.reason:
            batch.negligible[group.env] = batch.negligible.get(group.env, 0) + 1
    else:
        batch.rejected.append(Rejected(group_id=group.group_id, reason=judgement.reason))


def _judged(group: Group, config: TrainerConfig, seed: int, moments: Moments | None) -> GroupAdvantages:
    given, lengths = group.columns.get(ADVANTAGES), group.columns["tokens"].lengths[0]
    kept = ~zeroed(group).repeat(lengths)
    if given is not None and not config.shuffle_rewards:
        return judge_given(given.numbers(), trained_tokens(group) & kept)
    scores = group.columns["scores"].numbers()
    if config.shuffle_rewards:
        scores = shuffled(scores, seed, group.group_id)
    scale = scale_of(group, config.rewards, moments)
    judgement = judge(scores, config.loss, _penalties(group, config.loss), scale)
    # From here on one advantage per token, from either source. A zeroed sequence counted in the comparison.
    judgement = replace(judgement, advantages=judgement.advantages.repeat(lengths) * kept)
    if judgement.verdict is GroupVerdict.USABLE and not judgement.advantages.any():
        return replace(judgement, verdict=GroupVerdict.FILTERED)
    return judgement


def _penalties(group: Group, config: LossSection) -> NDArray[np.float64] | None:
    """Return each sequence's KL penalty, if the KL term is part of the reward."""
    if not config.kl or config.kl_in == "loss":
        return None
    sampled, reference = (group.columns[name].numbers() for name in ("inference_logprobs", "ref_logprobs"))
    trained = trained_tokens(group)
    difference = torch.from_numpy(np.where(trained, sampled - reference, 0.0))
    estimate: NDArray[np.float64] = ESTIMATORS[config.kl_estimator](difference).numpy()
    rows = np.arange(group.sequences).repeat(group.columns["tokens"].lengths[0])
    penalties = np.zeros(group.sequences)
    np.add.at(penalties, rows, config.kl * estimate)
    return penalties


def mean_score(groups: Sequence[Group]) -> float:
    """Return the mean raw score of all sequences, 0 if there are none."""
    scores = [group.columns["scores"].numbers() for group in groups]
    return float(np.concatenate(scores).mean()) if scores else 0.0
