"""REINFORCE, and RLOO: REINFORCE on whole sequences with leave-one-out advantages.

    loss = -w A logprob

Sources: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning"; for
RLOO Kool et al. 2019 and Ahmadian et al. 2024, "Back to Basics" (arXiv:2402.14740).

Only the weight w corrects for stale samples: see `[trainer.loss.correction]`. RLOO sums over the tokens of a sequence
and uses the weight of the sequence; on-policy that weight is 1, and the loss is the paper's.
"""

import torch

from rolloutmq.schemas.config.losses import LossSection
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, Objective
from rolloutmq.trainer.losses.total import total


def reinforce(inputs: LossInputs, config: LossSection) -> LossOutputs:
    losses = -inputs.advantages * inputs.logprobs
    return total(Objective(losses, torch.zeros_like(losses, dtype=torch.bool)), inputs, config)
