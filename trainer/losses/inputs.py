"""Inputs and outputs of a loss. Pure data.

Tokens are flat: the trained tokens of one forward pass in a row, each with the number of its sequence. Denominators
count the whole step, so that losses, gradients and metrics of its forward passes add up, however the step is split. A
sequence is never split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a whole optimizer step, over all forward passes and ranks.

    Attributes:
        tokens: Trained tokens.
        sequences: Sequences with at least one trained token.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The `N` trained tokens of `S` whole sequences: one forward pass. Log-probabilities and entropies in nats.

    Attributes:
        logprobs: `(N,)` under the learner, with gradient.
        entropy: `(N,)` of the learner's distribution at the token, with gradient.
        behaviour_logprobs: `(N,)` under the policy that sampled.
        advantages: `(N,)`.
        sequences: `(N,)` i64, sequence of the token, 0 to S - 1.
        sequence_count: `S`; some sequences may have no token here.
        step: Size of the whole step.
        staleness: `(N,)` i64, optimizer steps between the oldest policy that sampled the group and the
            learner.
        proximal_logprobs: `(N,)` under the policy before the step, without gradient. None if each batch is one step:
            then they equal `logprobs`.
        ref_logprobs: `(N,)` under a reference policy, if the loss or a metric needs one.
        columns: Further columns that the loss asked for, `(N, ...)` each.
    """

    logprobs: Tensor
    entropy: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    sequence_count: int
    step: StepSize
    staleness: Tensor
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def proximal(self) -> Tensor:
        """Return the log-probabilities `(N,)` under the policy before the step, without gradient."""
        before = self.logprobs if self.proximal_logprobs is None else self.proximal_logprobs
        return before.detach()

    def by_sequence(self, values: Tensor) -> Tensor:
        """Return the sum `(S,)` of values `(N,)` over each sequence."""
        return values.new_zeros(self.sequence_count).index_add(0, self.sequences, values)

    def lengths(self) -> Tensor:
        """Return the number of trained tokens `(S,)` of each sequence, at least 1."""
        return self.by_sequence(torch.ones_like(self.advantages)).clamp(min=1)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """This pass's part of the loss, a scalar with gradient, and of each metric, without gradient."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Objective:
    """Per-token losses before weights, KL, entropy and mean.

    Attributes:
        losses: `(N,)` with gradient.
        cut: `(N,)` bool, tokens whose gradient the loss removed or bounded.
    """

    losses: Tensor
    cut: Tensor
