"""PPO's clipped policy gradient: GRPO, Dr. GRPO, DAPO and decoupled PPO, which differ in mean, clip and weight.

    loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)

It is the minimum for either sign of the advantage A. Where A is negative the minimum leaves a token alone that is
already suppressed (ratio below 1 - low) and keeps correcting one that grew; with the maximum, as some trainers have it
for negative A, it would be the other way round.
"""

import torch
from torch import Tensor

from rolloutmq.schemas.losses import ClippedSection
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, Objective
from rolloutmq.trainer.losses.ratio import log_ratios
from rolloutmq.trainer.losses.total import total


def clipped(inputs: LossInputs, config: ClippedSection) -> LossOutputs:
    """Return the loss with a ratio for each token."""
    return total(clip(log_ratios(inputs, config.correction).exp(), inputs.advantages, config), inputs, config)


def clip(ratio: Tensor, advantages: Tensor, config: ClippedSection) -> Objective:
    """Bound what a step gains from ratios `(N,)` that have left the band."""
    free = ratio * advantages
    held = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return Objective(-torch.minimum(free, held), held < free)
