"""What goes into a loss and what comes out. Pure data.

Tokens are flat: the trained ones of one forward pass, one after the other, and each says which sequence it is of. What
a loss is divided by is of the whole step, so that the losses of forward passes add up to that of the step, and so do
their gradients and metrics, however the step is cut between sequences. A sequence is never cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a whole optimizer step learns from, all forward passes (and ranks) of it together.

    Attributes:
        tokens: Trained tokens.
        sequences: Sequences with at least one of them.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The `N` trained tokens of `S` whole sequences: one forward pass.

    Attributes:
        logprobs: `(N,)` under the policy that learns, with gradient.
        entropy: `(N,)` of its distribution where the token was drawn, in nats, with gradient.
        behaviour_logprobs: `(N,)` under the policy that sampled.
        advantages: `(N,)`.
        sequences: `(N,)` i64, the token's sequence, 0 to S - 1.
        sequence_count: `S`; some may have no token here.
        step: What is learned from in the whole step.
        staleness: `(N,)` i64, policy versions between the one that learns and the oldest that sampled the group.
        proximal_logprobs: `(N,)` under the policy before the step, without gradient. None where the policy has not
            moved since, because each batch is one step: then they are `logprobs`.
        ref_logprobs: `(N,)` under a reference, if a loss or a metric is to know of one.
        columns: Whatever else the loss asked for, `(N, ...)` each.
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
        """Return the sums `(S,)` of values `(N,)` over the tokens of each sequence."""
        return values.new_zeros(self.sequence_count).index_add(0, self.sequences, values)

    def lengths(self) -> Tensor:
        """Return the trained tokens `(S,)` of each sequence, at least 1."""
        return self.by_sequence(torch.ones_like(self.advantages)).clamp(min=1)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """This pass's part of the loss, a scalar with gradient, and its part of each metric, without."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a loss makes of its tokens, before weights, KL, entropy and mean.

    Attributes:
        losses: `(N,)` with gradient.
        cut: `(N,)` bool, tokens whose gradient the loss has cut off or bounded.
    """

    losses: Tensor
    cut: Tensor
