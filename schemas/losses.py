"""The `[trainer.loss]` of a run: one section for each loss, told apart by its `name`, with the defaults of its paper.

A key that a loss has no use for is unknown to its section, so that nobody believes to have set what nothing reads.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rolloutmq.schemas.section import Fraction, Section

Method = Literal["dr_grpo", "grpo", "rloo"]
Mean = Literal["tokens", "sequences", "constant"]


class CorrectionConfig(Section):
    """`[trainer.loss.correction]`: what is done about tokens that the policy of today did not sample.

    A weight is the probability of the token (or of the whole sequence) under the policy before the step, divided by
    that under the policy that sampled.
    """

    level: Literal["none", "token", "sequence"] = "none"
    """`none` gives no weights: the ratio of the loss is then the one to the policy that sampled, and its clip alone
    holds what is stale. Otherwise the weights take that part, and the ratio is to the policy before the step."""
    how: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight outside `low` to `high`: cut to `high` (there is no cut from below), or zero."""
    low: NonNegativeFloat = 0.0
    """Smallest weight that `mask` keeps."""
    high: PositiveFloat = 2.0
    """Largest weight. Beyond it few tokens would be the whole gradient."""
    from_staleness: NonNegativeInt = 0
    """Groups younger than so many policy versions get no weights. With 1 the difference between an engine's
    arithmetic and the trainer's is left to the clip, and only what is really stale is weighed."""
    max_staleness: NonNegativeInt | None = None
    """Groups older than so many policy versions are filtered before a loss sees them, `level` none or not: neither
    rewards, nor entropy, KL or a teacher act on them. None: what the broker hands out is learned from;
    `environment.NAME.max_staleness` bounds it already."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        return self


class LossSection(Section):
    """What all losses have in common."""

    name: str
    advantage: Method = "dr_grpo"
    """`dr_grpo` centres the rewards of a group; `grpo` also divides by their standard deviation; `rloo` takes each
    reward's distance to the mean of the others. Advantages that came with a group take their place."""
    std_ddof: Literal[0, 1] = 1
    """Of the standard deviation: 1 for that of a sample, n - 1; 0 for that of a population, n."""
    std_floor: PositiveFloat = 1e-4
    """Smallest standard deviation to divide by, so that a nearly flat group stays small instead of becoming noise."""
    mean: Mean = "tokens"
    """What the loss is divided by, always of the whole step: all its tokens; each sequence by its own tokens and then
    all by the number of sequences; or a constant, the number of sequences times `length`."""
    length: PositiveInt = 1024
    """Tokens of a sequence in the mean by a constant. Adam does not feel it, `clip_norm` does."""
    entropy: NonNegativeFloat = 0.02
    """Weight of the entropy bonus at the start. With half of it, one seed in three stops learning too early."""
    entropy_until: Fraction = 0.6
    """The bonus falls linearly to zero at this part of the run."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL divergence from a reference. Above 0 every group must come with `ref_logprobs`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """With d = logprob - ref_logprob: k1 is d, k2 d^2 / 2, k3 exp(-d) - 1 + d. As a term of the loss only k2 has the
    gradient of the reverse KL; in the reward k1 and k3 have its value."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or taken off the reward of each sequence before the policy learns."""
    correction: CorrectionConfig = CorrectionConfig()

    @field_validator("correction", mode="before")
    @classmethod
    def _over_its_own(cls, given: Any) -> Any:
        """Let keys that are left out be those of this loss, not those of any correction."""
        usual: CorrectionConfig = cls.model_fields["correction"].default
        return {**usual.model_dump(), **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _kl_has_an_effect(self) -> Self:
        if self.kl and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 has no gradient on average: take k2 in the loss, or k1 in the reward"
            )
        if self.kl and self.kl_in == "reward" and self.kl_estimator == "k2":
            raise ValueError(
                "kl_estimator k2 is not the KL on average: take k1 or k3 in the reward, or k2 in the loss"
            )
        return self


class ClippedSection(LossSection):
    """What losses with PPO's clip have in common."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""


class DapoConfig(ClippedSection):
    """DAPO: PPO's clip with more room upwards, and a mean over the tokens of the step."""

    name: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28


class GrpoConfig(ClippedSection):
    """GRPO: PPO's clip, each sequence weighs as much as any other."""

    name: Literal["grpo"] = "grpo"
    advantage: Method = "grpo"
    mean: Mean = "sequences"


class DrGrpoConfig(ClippedSection):
    """Dr. GRPO: PPO's clip, divided by nothing that depends on what was sampled."""

    name: Literal["dr_grpo"] = "dr_grpo"
    mean: Mean = "constant"


class DecoupledPpoConfig(ClippedSection):
    """Decoupled PPO: the clip bounds the step, weights make up for what other policies sampled."""

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    correction: CorrectionConfig = CorrectionConfig(level="token", how="mask", high=5.0)

    @model_validator(mode="after")
    def _decoupled(self) -> Self:
        if self.correction.level == "none":
            raise ValueError("correction.level none makes it PPO: take dapo, or level token or sequence")
        return self


class GspoConfig(ClippedSection):
    """GSPO: the clip is on the ratio of a whole sequence, as a geometric mean over its tokens."""

    name: Literal["gspo"] = "gspo"
    advantage: Method = "grpo"
    mean: Mean = "sequences"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4


class CispoConfig(LossSection):
    """CISPO: the ratio is a bounded weight and has no gradient, so that no token is ever left out."""

    name: Literal["cispo"] = "cispo"
    advantage: Method = "grpo"
    ratio_max: PositiveFloat = 5.0
    """Largest ratio, itself, not its distance to 1."""


class ReinforceConfig(LossSection):
    """REINFORCE with truncated importance sampling."""

    name: Literal["reinforce"] = "reinforce"
    correction: CorrectionConfig = CorrectionConfig(level="token")


class RlooConfig(LossSection):
    """RLOO: REINFORCE on whole sequences, against the mean of the others of the group."""

    name: Literal["rloo"] = "rloo"
    advantage: Method = "rloo"
    mean: Mean = "constant"
    length: PositiveInt = 1
    """Log-probabilities of a sequence are added up, not averaged."""
    correction: CorrectionConfig = CorrectionConfig(level="sequence")


LossConfig = Annotated[
    DapoConfig
    | GrpoConfig
    | DrGrpoConfig
    | DecoupledPpoConfig
    | GspoConfig
    | CispoConfig
    | ReinforceConfig
    | RlooConfig,
    Field(discriminator="name"),
]
