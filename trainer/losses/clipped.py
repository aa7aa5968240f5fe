"""PPO's clipped policy gradient, token by token: GRPO, Dr. GRPO, DAPO and decoupled PPO.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        r = exp(logprob - anchor logprob)

Sources: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), eq. 7. The variants differ
in advantages, mean, clip and weight:

    grpo            Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), eq. 3
    dr_grpo         Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2
    dapo            Yu et al. 2025, DAPO (arXiv:2503.14476), eq. 8, sections 3.1 and 3.3
    decoupled_ppo   Hilton et al. 2021, "Batch size-invariance for policy optimization" (arXiv:2110.00641)

The minimum holds for either sign of the advantage A. If A is negative, it leaves a suppressed token alone (r below 1 -
clip_low) and keeps correcting one that grew. Some trainers take the maximum for negative A, which does the reverse.
"""

import torch
from torch import Tensor

from rolloutmq.schemas.config.losses import ClippedSection
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, Objective
from rolloutmq.trainer.losses.ratio import log_ratios
from rolloutmq.trainer.losses.total import total


def clipped(inputs: LossInputs, config: ClippedSection) -> LossOutputs:
    """Return the loss with one ratio per token."""
    return total(clip(log_ratios(inputs, config.correction).exp(), inputs.advantages, config), inputs, config)


def clip(ratio: Tensor, advantages: Tensor, config: ClippedSection) -> Objective:
    """Return the clipped objective of ratios `(N,)`; `cut` marks tokens whose gradient the clip removed."""
    free = ratio * advantages
    held = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return Objective(-torch.minimum(free, held), held < free)
