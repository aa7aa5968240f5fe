"""CISPO: a policy gradient weighted by a bounded ratio.

    loss = -stop_gradient(min(r, ratio_max)) A logprob        r = exp(logprob - anchor logprob)

Source: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5, without a lower bound.

PPO's clip drops the gradient of tokens whose probability changed most, which are rare and informative; CISPO bounds it.
Other trainers give the bound as 1 + epsilon_high, or as epsilon_high alone; `ratio_max` bounds the ratio itself.
"""

from rolloutmq.schemas.config.losses import CispoConfig
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, Objective
from rolloutmq.trainer.losses.ratio import log_ratios
from rolloutmq.trainer.losses.total import total


def cispo(inputs: LossInputs, config: CispoConfig) -> LossOutputs:
    ratio = log_ratios(inputs, config.correction).exp().detach()
    losses = -ratio.clamp(max=config.ratio_max) * inputs.advantages * inputs.logprobs
    return total(Objective(losses, ratio > config.ratio_max), inputs, config)
