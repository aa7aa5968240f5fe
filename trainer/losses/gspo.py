"""GSPO: PPO's clip on the ratio of whole sequences.

    s = exp(mean over the sequence's tokens of log ratio)
    loss of each of its tokens = -min(s A, clip(s, 1 - low, 1 + high) A)

The clip is two orders of magnitude narrower than that of single tokens, because the mean of many log-ratios moves so
much less. All tokens of a sequence are in one forward pass, so its mean is known there.
"""

from rolloutmq.schemas.losses import GspoConfig
from rolloutmq.trainer.losses.clipped import clip
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs
from rolloutmq.trainer.losses.ratio import log_ratios
from rolloutmq.trainer.losses.total import total


def gspo(inputs: LossInputs, config: GspoConfig) -> LossOutputs:
    """Return the loss with a ratio for each sequence."""
    mean = inputs.by_sequence(log_ratios(inputs, config.correction)) / inputs.lengths()  # (S,)
    return total(clip(mean.exp()[inputs.sequences], inputs.advantages, config), inputs, config)
