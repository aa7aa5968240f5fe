"""`[environment.NAME.rewards]`, the raters of an environment, and `[health]`, the checks of all scores."""

from math import floor
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rolloutmq.schemas.config.base import Fraction, NameText, Section

Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

RATERS_LIMIT: Final = 63
"""Most raters of an ensemble: the shared window marks each outlier with one of 64 bits, and low agreement with one."""
RATIO_RATINGS: Final = 1536
"""Most ratings of a window (answers x raters) with the metric `ratio`: each group compares all pairs of them."""


class RaterConfig(Section):
    """`[environment.NAME.rewards.raters.RATER]`: one rater."""

    rater: str = ""
    """A built-in rater (`exact`, `length`, `number`, `regex`), one of another package (entry point in the group
    `rolloutmq.raters`), or a function `(task, answer)`: `file.py:function`, relative to the configuration file, or
    `package.module:function`."""
    options: dict[str, Any] = {}
    """Keyword arguments of a built-in rater, or of one of another package. For a function they are passed with each
    call."""
    weight: Weight = 1.0
    """Weight in the score. 0: counts for the agreement only."""
    timeout_s: PositiveFloat = 30.0
    """Longest wait for a rating; after it the rating is missing."""
    retries: NonNegativeInt = 0
    """Further attempts after an exception or a time-out."""
    concurrency: PositiveInt = 8
    """Most calls at once in one worker."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not self.rater:
            raise ValueError("rater is required: name a built-in rater, or `file.py:function`")
        if self.rater.count(":") > 1:
            raise ValueError(f"rater must be a name, or `file.py:function` (got {self.rater!r})")
        return self


class AgreementConfig(Section):
    """`[environment.NAME.rewards.agreement]`: agreement of the raters, and what a low one causes."""

    metric: Literal["nominal", "ordinal", "interval", "ratio"] = "interval"
    """Scale of the ratings, for Krippendorff's alpha: names, ranks, differences, or proportions of at least 0. `ratio`
    compares all pairs of ratings after each group: `window` times the number of raters is then at most 1536."""
    low: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.0
    """Alpha below which the agreement is low; 0 is chance. A low agreement ends 0.05 or 10 % above."""
    act: Literal["warn", "down_weight", "hold"] = "warn"
    """At a low agreement: `warn` publishes an event; `down_weight` also reduces the weights of outliers, the raters at
    odds with all others; `hold` keeps the groups from training, with the reason."""
    outlier_weight: Fraction = 0.0
    """Factor on the weight of an outlying rater, with `down_weight`."""
    min_items: PositiveInt = 64
    """Rated answers in the window before alpha counts: of a few it is noise."""


class RewardsConfig(Section):
    """`[environment.NAME.rewards]`: raters, and how their ratings become a score. Without raters: the class scores."""

    raters: dict[NameText, RaterConfig] = {}
    """`[environment.NAME.rewards.raters.RATER]` sections by name."""
    combine: Literal["mean", "median", "trimmed_mean", "minimum", "majority"] = "mean"
    """Score of an answer: weighted mean, weighted median, weighted mean without the extremes, least rating, or the
    vote of the raters by weight: 1 for passed, 0 for failed, 0.5 at a tie."""
    trim: Fraction = 0.25
    """With `trimmed_mean`: part of the ratings of raters with weight dropped at either end, rounded down. Below 0.5."""
    pass_at: Annotated[float, Field(allow_inf_nan=False)] = 0.5
    """With `majority`: least rating of a passed answer."""
    scale: Literal["none", "rank", "zscore"] = "none"
    """Makes ratings of different raters comparable, by the window of each rater: `rank` is the part of its ratings
    below, 0 to 1; `zscore` is the distance to its mean in standard deviations."""
    window: Annotated[int, Field(ge=2, le=1 << 20)] = 512
    """Latest rated answers, of all workers on a host, for the scale and the agreement. With `agreement.metric =
    "ratio"` at most 1536 divided by the number of raters."""
    min_raters: PositiveInt = 1
    """Fewest ratings of an answer, of raters with weight."""
    missing: Literal["hold", "resubmit", "filter"] = "resubmit"
    """With fewer ratings: `hold` asks the missing raters again, up to `hold_s`; `resubmit` fails the rollout, and a
    submitted task returns to the queue; `filter` sends the answer with the reason, and no trainer learns from it."""
    hold_s: PositiveFloat = 300.0
    """With `hold`: longest wait for the raters; then the rollout fails."""
    agreement: AgreementConfig = AgreementConfig.default()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.raters:
            if given := _changed(self):
                raise ValueError(
                    f"{given[0]} has no effect without raters in this section; add "
                    "`[environment.NAME.rewards.raters.RATER]`, or remove it: an ensemble of the class takes it in the "
                    f"code, `Ensemble(..., {given[0]}=...)`"
                )
            return self
        if len(self.raters) > RATERS_LIMIT:
            raise ValueError(f"raters must be at most {RATERS_LIMIT} (got {len(self.raters)})")
        weighed = [one for one in self.raters.values() if one.weight > 0]
        if not weighed:
            raise ValueError("raters must have weights that add up to more than 0 (got 0); give one a weight")
        if self.min_raters > len(weighed):
            raise ValueError(
                f"min_raters must not exceed the {len(weighed)} raters with weight (got {self.min_raters})"
            )
        if self.trim >= 0.5:
            raise ValueError(f"trim must be below 0.5, or nothing is left (got {self.trim:g})")
        self._require_effect(len(weighed))
        self._require_agreement()
        return self

    def _require_effect(self, weighed: int) -> None:
        """Refuse what has no effect on the scores of raters, of which `weighed` have a weight."""
        for key, needed, value in (
            ("hold_s", "missing", "hold"),
            ("pass_at", "combine", "majority"),
            ("trim", "combine", "trimmed_mean"),
        ):
            if key in _changed(self) and getattr(self, needed) != value:
                raise ValueError(
                    f'{key} has no effect without {needed} = "{value}" (got {getattr(self, key):g}); remove it'
                )
        if self.combine == "majority" and self.scale != "none":
            raise ValueError(
                f"scale has no effect on votes (got {self.scale!r}); remove it, or combine otherwise"
            )
        if self.combine == "trimmed_mean" and not floor(self.trim * weighed):
            raise ValueError(
                f"trim drops none of {weighed} ratings, of raters with weight (got {self.trim:g}); raise it, or "
                "combine by `mean`"
            )

    def _require_agreement(self) -> None:
        """Refuse an agreement that is never computed or never acts, or takes too long."""
        given, raters = self.agreement, len(self.raters)
        if raters == 1 and (changed := _changed(given)):
            raise ValueError(
                f"agreement.{changed[0]} has no effect with one rater (got {getattr(given, changed[0])!r}); remove it, "
                "or add a rater"
            )
        if given.act == "down_weight" and raters < 3:
            raise ValueError(
                f"agreement.act must not be `down_weight` with {raters} raters: of two neither is the outlier; use "
                "`warn`"
            )
        if "outlier_weight" in _changed(given) and given.act != "down_weight":
            raise ValueError(
                f'agreement.outlier_weight has no effect without act = "down_weight" (got {given.outlier_weight:g}); '
                "remove it"
            )
        if given.min_items > self.window:
            raise ValueError(
                f"agreement.min_items must not exceed window {self.window} (got {given.min_items})"
            )
        if given.metric == "ratio":
            self._require_ratio(raters)

    def _require_ratio(self, raters: int) -> None:
        if self.scale == "zscore":
            raise ValueError(
                "agreement.metric must not be `ratio` with scale `zscore`: it is undefined for ratings below 0; use "
                "`interval`"
            )
        if self.window * raters > RATIO_RATINGS:
            raise ValueError(
                f"window must be at most {RATIO_RATINGS // raters} with agreement.metric `ratio` and {raters} raters: "
                f"it compares all pairs of ratings after each group (got {self.window})"
            )


def _changed(section: Section) -> list[str]:
    """Return the keys with another value than their default, in order of the alphabet."""
    fields = type(section).model_fields.items()
    return sorted(key for key, field in fields if getattr(section, key) != field.default)


FindingName = Literal[
    "solved",
    "collapse",
    "saturation",
    "explosion",
    "length_bias",
    "drift",
    "clipping",
    "precision",
    "rejection",
    "filtering",
    "low_agreement",
]


class HealthConfig(Section):
    """`[health]`: limits of healthy scores and of healthy figures of the trainer; see `docs/guides/rewards.md`."""

    window_steps: Annotated[int, Field(ge=2, le=1000)] = 20
    """Batches of a window, those without a signal included; drift and explosion compare two windows."""
    flat: Fraction = 0.95
    """`collapse`: least part of groups with equal scores, of those not solved; nothing is learned from them."""
    saturated: Fraction = 0.95
    """`saturation`: least part of scores at the highest or lowest of the window. `solved`, in place of it: the highest
    score is that of an answer that passes (`pass_score`)."""
    growth: Annotated[float, Field(gt=1)] = 10.0
    """`explosion`: least growth of the deviation or the magnitude of the scores, as a factor."""
    length_correlation: Fraction = 0.5
    """`length_bias`: correlation of score and length within groups, exceeded by its whole 95 % interval."""
    drop: PositiveFloat = 1.0
    """`drift`: least fall of the mean score, in standard deviations."""
    clipped: Fraction = 0.5
    """`clipping`: least part of trained tokens with a cut gradient."""
    fresh_kl: PositiveFloat = 0.05
    """`precision`: KL divergence, in nats for each token, between trainer and sampler in a step without stale groups.
    Exact arithmetic on both sides would give 0."""
    rejected: Fraction = 0.1
    """`rejection`: least part of groups rejected by the trainer, for example for infinite advantages."""
    filtered: Fraction = 0.75
    """`filtering`: least part of groups that the trainer filtered, by whatever rule, of those not solved."""
    stop_on: tuple[FindingName, ...] = ()
    """Findings to end the run on: on `solved` with exit code 0, once each training environment with a weight is solved;
    on any other, of whatever environment, with 1."""
