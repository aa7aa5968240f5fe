"""Probability ratios, and the weights that make up for what another policy sampled. Pure.

Of a token three policies have an opinion: the one that learns (pi), the one before the step (proximal), and the one
that sampled (behaviour). Without a correction the ratio of a loss is pi / behaviour. With one it is pi / proximal, and
proximal / behaviour is a weight without gradient: the product is the same, but only the first part is the step's own
doing and has to be clipped. Both at once would count the distance to the behaviour twice.
"""

from typing import Final

import torch
from torch import Tensor

from rolloutmq.schemas.losses import CorrectionConfig
from rolloutmq.trainer.losses.inputs import LossInputs

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios beyond it are cut: exp would overflow, and one token would be the whole gradient."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Cut log-ratios at the limit; beyond it they have no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratios(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """Return the log `(N,)` of the ratio that a loss works with, with gradient."""
    return bounded(inputs.logprobs - _anchor(inputs, correction))


def _anchor(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    if correction.level == "none":
        return inputs.behaviour_logprobs
    return torch.where(weighed(inputs, correction), inputs.proximal(), inputs.behaviour_logprobs)


def weighed(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """Tell which tokens `(N,)` get a weight, if there are weights: those of groups that are stale enough."""
    return inputs.staleness >= correction.from_staleness


def weights(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """Return the weight `(N,)` of each token, without gradient: 1 where there is nothing to correct."""
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
