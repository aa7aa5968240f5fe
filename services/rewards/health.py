"""Checks of the scores of an environment, and of the figures of the trainer. Pure.

Each check looks at a window, some also at the window before, and returns a `Symptom` or None. The scores come from the
trainer, over all workers: `LaneScores`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import atanh, inf, sqrt, tanh
from typing import Final, NamedTuple

from rolloutmq.schemas.wire.health import LaneScores, bounded

CONFIDENCE: Final = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
SURE: Final = 3.0
"""Standard errors that a fall of the mean must exceed, so that few groups raise no alarm."""
ROUNDING: Final = 1e-6
"""Deviation relative to the magnitude of the scores up to which it is rounding, for scores in float32 too."""


class Symptom(NamedTuple):
    """A failed check.

    Attributes:
        problem: What was found.
        remedy: What to do.
        numbers: The figures behind it.
    """

    problem: str
    remedy: str
    numbers: dict[str, float]


def solved_groups(now: LaneScores, *, passes: bool) -> float:
    """Return at least how many groups have the highest score alone: a policy that has learned the tasks learns nothing
    more from them.

    The sums tell how many sequences have another score, and these fill at most so many groups of mean size.

    Args:
        now: Scores of a batch or a window.
        passes: Whether the highest score is that of an answer that passes.
    """
    others = (now.sequences - now.at_high) * now.groups / now.sequences
    return max(0.0, now.flat - others) if passes else 0.0


def solved(now: LaneScores, limit: float, *, passes: bool) -> Symptom | None:
    """Find tasks that the policy has learned: at least a part `limit` of the scores is the highest, which passes."""
    share = now.at_high / now.sequences
    if not passes or share < limit:
        return None
    return Symptom(
        f"{share:.0%} of the answers pass with the score {now.high:g}: these tasks are learned",
        "end the run, or choose harder tasks; if it was so from the start, look at the score",
        {"share": share, "value": now.high, "sequences": float(now.sequences)},
    )


def collapse(now: LaneScores, limit: float, solved: float = 0.0) -> Symptom | None:
    """Find groups with equal scores: at least a part `limit` of those that are not `solved`."""
    groups = now.groups - solved
    if not groups or (flat := (now.flat - solved) / groups) < limit:
        return None
    equal = f"all scores are {now.low:g}" if now.low == now.high else "the scores within each group are equal"
    return Symptom(
        f"{flat:.0%} of the {_called(solved)} teach nothing: {equal}",
        "choose tasks at the edge of what the policy can do (a curriculum), make the score finer, or end the run",
        {"flat": flat, "groups": float(groups), "mean": now.mean},
    )


def saturation(now: LaneScores, limit: float, *, lasting: bool = False) -> Symptom | None:
    """Find scores at an end of their range: at least a part `limit` of all is the highest or the lowest.

    Scores that are all equal are a collapse; a saturation that has been found lasts nevertheless.
    """
    if now.low == now.high and not lasting:
        return None
    for name, value, count in (("highest", now.high, now.at_high), ("lowest", now.low, now.at_low)):
        share = count / now.sequences
        if share >= limit:
            return Symptom(
                f"{share:.0%} of the scores are the {name}, {value:g}",
                "choose harder tasks, or end the run"
                if name == "highest"
                else "choose easier tasks, or score parts",
                {"share": share, "value": value, "sequences": float(now.sequences)},
            )
    return None


def explosion(now: LaneScores, before: LaneScores, growth: float) -> Symptom | None:
    """Find scores that grew: their deviation or magnitude is at least `growth` times that of the window before.

    A deviation of rounding size is none, and growth from nothing is not found.
    """
    figures = (
        ("deviation", _std(now), _std(before), ROUNDING * _most(before)),
        ("magnitude", _most(now), _most(before), 0.0),
    )
    for name, new, old, floor in figures:
        if old > floor and new / old >= growth:
            return Symptom(
                f"the {name} of the scores grew from {old:.4g} to {new:.4g}",
                "bound the score, or make raters comparable (rewards.scale)",
                {"before": old, "now": new, "factor": bounded(new / old)},
            )
    return None


def drift(now: LaneScores, before: LaneScores, drop: float) -> Symptom | None:
    """Find a fall of the mean score by at least `drop` pooled deviations, beyond the noise of the groups."""
    fall = before.mean - now.mean
    count = now.sequences + before.sequences
    pooled = sqrt(now.m2 / count + before.m2 / count)
    noise = sqrt(now.m2 / now.sequences / now.groups + before.m2 / before.sequences / before.groups)
    if fall <= ROUNDING * _most(before) or fall < drop * pooled or fall <= SURE * noise:
        return None
    return Symptom(
        f"the mean score fell from {before.mean:.4g} to {now.mean:.4g}",
        "look whether raters or tasks changed; else lower the learning rate, or resume from an earlier checkpoint",
        {"before": before.mean, "now": now.mean, "deviations": bounded(fall / pooled if pooled else inf)},
    )


class Correlation(NamedTuple):
    """A correlation and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def correlation(now: LaneScores) -> Correlation | None:
    """Return Pearson's correlation of length and score within groups; None if either does not vary, or of too few.

    The interval is that of Fisher (1921), tanh(atanh(r) +- 1.96 / sqrt(d - 1)), where d are the degrees of freedom:
    sequences less groups, since the means of the groups are taken off, less one for the slope.
    """
    freedom = now.sequences - now.groups - 1
    if freedom < 2 or not (0 < now.sxx < inf and 0 < now.syy < inf):
        return None
    value = max(-1.0, min(1.0, now.sxy / sqrt(now.sxx) / sqrt(now.syy)))
    if abs(value) == 1.0:
        return Correlation(value, value, value)
    middle, half = atanh(value), CONFIDENCE / sqrt(freedom - 1)
    return Correlation(value, tanh(middle - half), tanh(middle + half))


def length_bias(now: LaneScores, limit: float) -> Symptom | None:
    """Find a score that goes with the length: the whole interval of their correlation is beyond `limit`."""
    found = correlation(now)
    if found is None or max(found.low, -found.high) <= limit:
        return None
    longer = "longer" if found.value > 0 else "shorter"
    return Symptom(
        f"{longer} answers score higher: correlation {found.value:.2f} ({found.low:.2f} to {found.high:.2f})",
        "look whether the score rewards the length itself; rate the length apart, or rate what it stands for",
        {"correlation": found.value, "low": found.low, "high": found.high},
    )


Figures = Mapping[str, float]
"""Figures of one step of the trainer: the metrics of its `step` event, with `staleness_max`."""


def clipping(steps: Sequence[Figures], limit: float) -> Symptom | None:
    """Find a clip that cuts most gradients: the mean of `clipped` is at least `limit`."""
    value = _mean([step["clipped"] for step in steps if "clipped" in step])
    if value is None or value < limit:
        return None
    return Symptom(
        f"{value:.0%} of the tokens have a cut gradient",
        "lower the learning rate or max_staleness, or widen the clip of the loss",
        {"clipped": value, "ratio": _mean([step["ratio"] for step in steps if "ratio" in step]) or 0.0},
    )


def precision(steps: Sequence[Figures], limit: float) -> Symptom | None:
    """Find trainer and sampler that compute differently: the mean `kl` of steps on fresh groups exceeds `limit`."""
    fresh = [step for step in steps if "kl" in step and not step.get("staleness_max")]
    value = _mean([step["kl"] for step in fresh])
    if value is None or value <= limit:
        return None
    return Symptom(
        f"trainer and sampler disagree by {value:.3g} nats a token on groups that are not stale",
        "compare their precision and weights: model.dtype, trainer.fp32_head, `rolloutmq doctor --weights`",
        {"kl": value, "steps": float(len(fresh))},
    )


def rejection(groups: int, rejected: float, limit: float) -> Symptom | None:
    """Find groups that the trainer cannot use: `rejected` of the `groups` are at least a part `limit`."""
    if not groups or rejected / groups < limit:
        return None
    return Symptom(
        f"the trainer rejected {rejected / groups:.0%} of the groups",
        "read the reasons: `rolloutmq dead list`",
        {"rejected": rejected, "groups": float(groups)},
    )


class FilterRule(StrEnum):
    """Why groups were filtered, as a trainer reports it; the text of a finding."""

    FLAT = "equal scores"  # other than those of solved groups
    TOO_OLD = "older than trainer.loss.correction.max_staleness"
    NEGLIGIBLE = "scores alike beside those of their environment (trainer.rewards.normalize)"
    OTHER = "a rule of the trainer's own"


FILTER_REMEDIES: Final[Mapping[FilterRule, str]] = {
    FilterRule.FLAT: "choose tasks at the edge of what the policy can do (a curriculum), or make the score finer",
    FilterRule.TOO_OLD: "lower max_staleness of the environments, or raise that of the correction",
    FilterRule.NEGLIGIBLE: "bound the score, so that single ones do not outweigh the rest",
    FilterRule.OTHER: "look at the filter of your trainer",
}


def filtering(
    groups: float, filtered: Mapping[FilterRule, float], limit: float, solved: float = 0.0
) -> Symptom | None:
    """Find groups that are rolled out and not trained: at least a part `limit` of those that are not solved.

    Args:
        groups: Groups of a window. Sums that leave less than half of one unsolved leave none, but for rounding.
        filtered: Filtered groups among them, by rule, without the solved ones.
        limit: Least part that is found.
        solved: Filtered groups among them that are solved.
    """
    rest, total = groups - solved, sum(filtered.values())
    if rest < 0.5 or total / rest < limit:
        return None
    rules = sorted((rule for rule in filtered if filtered[rule] > 0), key=lambda rule: -filtered[rule])
    shares = ", ".join(f"{filtered[rule] / rest:.0%} {rule}" for rule in rules)
    return Symptom(
        f"{total / rest:.0%} of the {_called(solved)} were filtered: {shares}",
        FILTER_REMEDIES[rules[0]] if rules else "",
        {"groups": float(rest), **{rule.name.lower(): filtered[rule] for rule in rules}},
    )


def _called(solved: float) -> str:
    return "groups that are not solved" if solved else "groups"


def _std(scores: LaneScores) -> float:
    return sqrt(scores.m2 / scores.sequences)


def _most(scores: LaneScores) -> float:
    return max(abs(scores.low), abs(scores.high))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
