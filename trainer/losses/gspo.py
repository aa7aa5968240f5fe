"""GSPO: PPO's clip on the ratio of whole sequences.

    s = exp(mean over the sequence's tokens of log r)
    loss of each of its tokens = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5 and 7.

The clip range is about a hundred times narrower than for tokens, because the mean of many log-ratios moves much less. A
forward pass holds all tokens of a sequence, so the mean is known there.
"""

from rolloutmq.schemas.config.losses import GspoConfig
from rolloutmq.trainer.losses.clipped import clip
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs
from rolloutmq.trainer.losses.ratio import log_ratios
from rolloutmq.trainer.losses.total import total


def gspo(inputs: LossInputs, config: GspoConfig) -> LossOutputs:
    """Return the loss with one ratio per sequence."""
    mean = inputs.by_sequence(log_ratios(inputs, config.correction)) / inputs.lengths()  # (S,)
    return total(clip(mean.exp()[inputs.sequences], inputs.advantages, config), inputs, config)
