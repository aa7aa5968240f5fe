"""CISPO: a policy gradient whose ratio is a bounded weight.

    loss = -stop_gradient(min(ratio, ratio_max)) A logprob

PPO's clip drops the gradient of a token that moved far, which are the rare and telling ones; here it is only bounded.
Other trainers write the bound as 1 + epsilon_high, or as epsilon_high alone; `ratio_max` is the ratio itself.
"""

from rolloutmq.schemas.losses import CispoConfig
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, Objective
from rolloutmq.trainer.losses.ratio import log_ratios
from rolloutmq.trainer.losses.total import total


def cispo(inputs: LossInputs, config: CispoConfig) -> LossOutputs:
    """Return the loss."""
    ratio = log_ratios(inputs, config.correction).exp().detach()
    losses = -ratio.clamp(max=config.ratio_max) * inputs.advantages * inputs.logprobs
    return total(Objective(losses, ratio > config.ratio_max), inputs, config)
