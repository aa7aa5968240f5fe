"""The loss: a clipped policy gradient with an entropy bonus. Pure.

    ratio = exp(logprob - old_logprob)
    loss  = sum over tokens of -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - entropy weight * entropy,  / normaliser

It is the minimum for either sign of the advantage A. Where A is negative the minimum leaves a token alone that is
already suppressed (ratio below 1 - low) and keeps correcting one that grew; with the maximum, as some trainers have it
for negative A, it would be the other way round.

The normaliser is the number of trained tokens of the *whole* optimizer batch. Losses of micro-batches therefore add up
to the loss of the batch, and so do their gradients and metrics, however the batch is cut.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios beyond it are cut: exp would overflow, and one token would be the whole gradient."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens of one micro-batch, `N` of them, one after the other.

    Attributes:
        logprobs: `(N,)` under the policy that learns, with gradient.
        entropy: `(N,)` of its distribution where the token was drawn, with gradient.
        old_logprobs: `(N,)` under the policy that sampled.
        advantages: `(N,)` of the token's sequence.
        normaliser: Trained tokens of the whole optimizer batch.
    """

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    normaliser: int


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; `entropy` is the weight of the bonus."""

    clip_low: float
    clip_high: float
    entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """This micro-batch's part of the loss, a scalar with gradient, and its part of each metric, without."""

    loss: Tensor
    metrics: dict[str, Tensor]


def clipped_policy_gradient(inputs: LossInputs, cfg: LossConfig) -> LossOutputs:
    """Return the loss of one micro-batch.

    Metrics, each a mean over the tokens of the optimizer batch once the parts are added: `loss`, `ratio`, `clipped`
    (fraction of tokens whose gradient the clip has cut), `kl` (of the learning policy from the sampling one, estimated
    by ratio - 1 - log ratio), `entropy`.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()  # (N,)
    free = ratio * inputs.advantages
    bounded = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * inputs.advantages
    per_token = -torch.minimum(free, bounded) - cfg.entropy * inputs.entropy  # (N,)
    loss = per_token.sum() / inputs.normaliser
    with torch.no_grad():
        parts = {
            "loss": per_token,
            "ratio": ratio,
            "clipped": (bounded < free).float(),
            "kl": ratio - 1 - log_ratio,
            "entropy": inputs.entropy,
        }
        metrics = {name: part.sum() / inputs.normaliser for name, part in parts.items()}
    return LossOutputs(loss, metrics)
