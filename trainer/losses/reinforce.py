"""REINFORCE, and RLOO, which is REINFORCE on whole sequences with leave-one-out advantages.

    loss = -weight A logprob

The weight is the whole answer to what is stale: see `[trainer.loss.correction]`. RLOO adds up the tokens of a sequence
and takes the weight of the sequence; on policy that weight is 1, and the loss is that of the paper.
"""

import torch

from rolloutmq.schemas.losses import LossSection
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, Objective
from rolloutmq.trainer.losses.total import total


def reinforce(inputs: LossInputs, config: LossSection) -> LossOutputs:
    """Return the loss."""
    losses = -inputs.advantages * inputs.logprobs
    return total(Objective(losses, torch.zeros_like(losses, dtype=torch.bool)), inputs, config)
