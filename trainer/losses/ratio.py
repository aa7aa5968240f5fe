"""Probability ratios, and importance weights for stale samples. Pure.

Three policies give a probability to each token: the learner (pi), the policy before the step (proximal), and the policy
that sampled (behaviour). Without off-policy correction the ratio is pi / behaviour. With it,

    ratio = pi / proximal        weight = stop_gradient(proximal / behaviour)

Source: Hilton et al. 2021 (arXiv:2110.00641), the decoupled objective. The product is the same, but only the ratio is
the effect of this step and has to be clipped. Using pi / behaviour together with the weight would count the distance to
the behaviour policy twice.
"""

from typing import Final

import torch
from torch import Tensor

from rolloutmq.schemas.config.losses import CorrectionConfig
from rolloutmq.trainer.losses.inputs import LossInputs

LOG_RATIO_LIMIT: Final = 20.0
"""Bound of log-ratios, in nats: beyond it exp may overflow, and one token would dominate the gradient."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios to the limit; beyond it their gradient is zero."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratios(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """Return the log-ratio `(N,)` of the loss, with gradient."""
    return bounded(inputs.logprobs - _anchor(inputs, correction))


def _anchor(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    if correction.level == "none":
        return inputs.behaviour_logprobs
    return torch.where(weighed(inputs, correction), inputs.proximal(), inputs.behaviour_logprobs)


def weighed(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """Return which tokens `(N,)` get a weight: those of groups that are stale enough."""
    return inputs.staleness >= correction.from_staleness


def weights(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """Return the importance weight `(N,)` of each token, without gradient; 1 for tokens without correction."""
    found = torch.ones_like(inputs.behaviour_logprobs)
    if correction.level == "none":
        return found
    return torch.where(weighed(inputs, correction), _importance(inputs, correction), found)


def _importance(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    log_weight = inputs.proximal() - inputs.behaviour_logprobs
    if correction.level == "sequence":
        log_weight = inputs.by_sequence(log_weight)[inputs.sequences]
    weight = bounded(log_weight).exp()
    if correction.how == "truncate":
        return weight.clamp(max=correction.high)
    inside = (weight >= correction.low) & (weight <= correction.high)
    return torch.where(inside, weight, 0.0)
