"""`[trainer.loss]`: one section for each loss, selected by `name`, with the defaults of its paper.

A section has only the keys that its loss uses, so a useless key is refused instead of ignored. Its docstring names the
source of each default. A default that no paper gives is marked `ours`.
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

from rolloutmq.schemas.config.base import Fraction, Section

Method = Literal["dr_grpo", "grpo", "rloo"]
Mean = Literal["tokens", "sequences", "constant"]


class CorrectionConfig(Section):
    """`[trainer.loss.correction]`: off-policy correction by importance weights.

    The weight of a token (or of a whole sequence) is its probability under the policy before the step, divided by its
    probability under the policy that sampled it.
    """

    level: Literal["none", "token", "sequence"] = "none"
    """`none`: no weights; the loss uses the ratio to the policy that sampled, and only its clip bounds staleness.
    `token` or `sequence`: weights for tokens or for whole sequences; the loss uses the ratio to the policy before the
    step."""
    how: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight outside `low` to `high`. `truncate` lowers it to `high` and does not raise small ones;
    `mask` sets it to zero."""
    low: NonNegativeFloat = 0.0
    """Smallest weight kept by `mask`."""
    high: PositiveFloat = 2.0
    """Largest weight. Larger ones would let a few tokens dominate the gradient."""
    from_staleness: NonNegativeInt = 0
    """Groups with a smaller staleness get no weights. With 1 only stale groups get weights; the clip handles numerical
    differences between inference engine and trainer."""
    max_staleness: NonNegativeInt | None = None
    """The trainer filters groups with a larger staleness, whatever `level` is: rewards, entropy, KL and teacher do not
    act on them. None: train on every group of the batch; `environment.NAME.max_staleness` already bounds them."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low must not be above high {self.high:g} (got {self.low:g})")
        return self


class LossSection(Section):
    """Keys of all losses."""

    name: Any  # each loss narrows it to its own literal; pydantic fields cannot narrow a `str`
    advantage: Method = "dr_grpo"
    """Advantage of a sequence within its group. `dr_grpo`: reward minus the group's mean; `grpo`: the same divided by
    the standard deviation; `rloo`: reward minus the mean of the other sequences. Advantages that a group brings replace
    it."""
    std_ddof: Literal[0, 1] = 1
    """Degrees of freedom of the standard deviation: 1 divides by n - 1 (sample), 0 by n (population)."""
    std_floor: PositiveFloat = 1e-4
    """Smallest divisor for `grpo`. It keeps the advantages of a group with nearly equal rewards small."""
    mean: Mean = "tokens"
    """Divisor of the loss over the whole step. `tokens`: all tokens; `sequences`: each sequence by its own tokens, then
    all by the number of sequences; `constant`: the number of sequences times `length`."""
    length: PositiveInt = 1024
    """Tokens of a sequence for `mean = "constant"`. Adam cancels this scale, `clip_norm` does not."""
    entropy: NonNegativeFloat = 0.0
    """Initial weight of an entropy bonus. No paper of these losses has one. A model of random weights needs it; the
    quickstart has 0.02."""
    entropy_until: Fraction = 0.6
    """Fraction of the run after which the entropy bonus is zero; it decreases linearly until then."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL divergence from a reference policy. Above 0 every group needs the column `ref_logprobs`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of the KL, with d = logprob - ref_logprob: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d. In the loss
    only k2 has the gradient of the reverse KL; in the reward k1 and k3 have its value."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: the KL is a term of the loss. `reward`: it is subtracted from the reward of each sequence."""
    correction: CorrectionConfig = CorrectionConfig.default()

    @field_validator("correction", mode="before")
    @classmethod
    def _over_its_own(cls, given: Any) -> Any:
        """Fill keys that are left out from the correction of this loss, not from the general defaults."""
        usual: CorrectionConfig = cls.model_fields["correction"].default
        return {**usual.model_dump(), **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _kl_has_an_effect(self) -> Self:
        if self.kl and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                'kl_estimator must not be k1 with kl_in = "loss": k1 has no gradient on average; use k2, or '
                'kl_in = "reward"'
            )
        if self.kl and self.kl_in == "reward" and self.kl_estimator == "k2":
            raise ValueError(
                'kl_estimator must not be k2 with kl_in = "reward": k2 is not the KL on average; use k1 or k3, or '
                'kl_in = "loss"'
            )
        return self


class ClippedSection(LossSection):
    """Keys of the losses with PPO's clip."""

    clip_low: PositiveFloat = 0.2
    """Distance of the lower clip from 1; see `clip_high`."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""


class DapoConfig(ClippedSection):
    """DAPO: PPO's clip with a higher upper bound, and a mean over the tokens of the step.

    Source: Yu et al. 2025 (arXiv:2503.14476). `clip_low` .2 and `clip_high` .28: section 4.1. Advantages divided by the
    standard deviation: eq. 9. Mean over tokens: eq. 12. No KL: section 2.3.
    """

    name: Literal["dapo"] = "dapo"
    advantage: Method = "grpo"
    clip_high: PositiveFloat = 0.28


class GrpoConfig(ClippedSection):
    """GRPO: PPO's clip, with equal weight for each sequence.

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300). Mean over sequences: eq. 3. KL estimator k3: eq. 4.
    Advantages divided by the standard deviation: section 4.1.2. The paper's weight of the KL is .04 (section 4.2). Here
    it is 0, since the groups have to bring `ref_logprobs`; with `kl = 0.04` the loss is eq. 3 whole. The paper gives no
    clip; .2 is PPO's (arXiv:1707.06347, table 1).
    """

    name: Literal["grpo"] = "grpo"
    advantage: Method = "grpo"
    mean: Mean = "sequences"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"


class DrGrpoConfig(ClippedSection):
    """Dr. GRPO: PPO's clip, divided by a constant instead of sampled lengths.

    Source: Liu et al. 2025 (arXiv:2503.20783), section 3.2: advantages not divided, and one constant for all lengths,
    the longest answer that is allowed. Set `length` to that; 1024 is ours. The clip is PPO's (arXiv:1707.06347, table
    1).
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    mean: Mean = "constant"


class DecoupledPpoConfig(ClippedSection):
    """Decoupled PPO: the clip bounds the step, and importance weights correct for the policy that sampled.

    Source: Hilton et al. 2021 (arXiv:2110.00641), the decoupled objective; for language models Fu et al. 2025, AReaL
    (arXiv:2505.24298), section 5. The clip is PPO's (arXiv:1707.06347, table 1). The bound of the weight is ours.
    """

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    correction: CorrectionConfig = CorrectionConfig(level="token", how="mask", high=5.0)

    @model_validator(mode="after")
    def _decoupled(self) -> Self:
        if self.correction.level == "none":
            raise ValueError(
                "correction.level must be token or sequence for decoupled_ppo: none makes it PPO; use dapo for that"
            )
        return self


class GspoConfig(ClippedSection):
    """GSPO: clips the ratio of a whole sequence, the geometric mean over its tokens.

    Source: Zheng et al. 2025 (arXiv:2507.18071). `clip_low` 3e-4 and `clip_high` 4e-4: section 5.1. Advantages divided
    by the standard deviation: eq. 6. Mean over sequences: eq. 5. No KL: section 4.1.
    """

    name: Literal["gspo"] = "gspo"
    advantage: Method = "grpo"
    mean: Mean = "sequences"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4


class CispoConfig(LossSection):
    """CISPO: uses the ratio as a bounded weight without gradient, so no token loses its gradient.

    Source: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5: advantages of GRPO, mean over tokens, no KL. The
    paper gives no bound; 5 is that of ScaleRL (arXiv:2510.13786).
    """

    name: Literal["cispo"] = "cispo"
    advantage: Method = "grpo"
    ratio_max: PositiveFloat = 5.0
    """Largest ratio. It bounds the ratio itself, not its distance from 1."""


class ReinforceConfig(LossSection):
    """REINFORCE with truncated importance sampling.

    Sources: Williams 1992; for the truncated weights Ionides 2008. The group's mean as the baseline, the mean over
    tokens, and the bound of the weight are ours.
    """

    name: Literal["reinforce"] = "reinforce"
    correction: CorrectionConfig = CorrectionConfig(level="token")


class RlooConfig(LossSection):
    """RLOO: REINFORCE on whole sequences, with the mean of the other sequences as the baseline.

    Sources: Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740): the baseline, and whole answers as one action,
    so that their tokens are summed. On policy the weight is 1; its bound is ours.
    """

    name: Literal["rloo"] = "rloo"
    advantage: Method = "rloo"
    mean: Mean = "constant"
    length: PositiveInt = 1
    """With 1 the log-probabilities of a sequence are summed, not averaged."""
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
