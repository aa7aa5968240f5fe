"""Total loss: the per-token losses, weighted, with KL and entropy terms, reduced to one number. Pure.

    total = mean over the step of  weight * loss  +  kl coefficient * kl  -  entropy coefficient * entropy

All three terms use the same mean. A token with weight 0 still counts in the mean: otherwise masking half of a step
would double the effect of the other half.
"""

import torch
from torch import Tensor

from rolloutmq.schemas.config.losses import LossSection
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, Objective
from rolloutmq.trainer.losses.kl import divergence, k3
from rolloutmq.trainer.losses.ratio import bounded, weights


def total(objective: Objective, inputs: LossInputs, config: LossSection) -> LossOutputs:
    """Return this pass's part of the loss of the step.

    Metrics, each a mean over the tokens of the step once the parts are added up: `ratio` (learner to behaviour policy),
    `clipped` (fraction of tokens whose gradient was cut), `kl` (of the learner from the behaviour policy, estimated by
    ratio - 1 - log ratio), `entropy`, `weight` (of the correction), `masked` (fraction of tokens with weight 0), and
    `kl_ref` if there is a reference. `loss` uses the mean of the loss.
    """
    weight = weights(inputs, config.correction)
    per_token = weight * objective.losses - config.entropy * inputs.entropy  # (N,)
    if config.kl and config.kl_in == "loss":
        reference = _required(inputs.ref_logprobs)
        per_token = per_token + config.kl * divergence(inputs.logprobs, reference, config.kl_estimator)
    loss = reduce(per_token, inputs, config)
    return LossOutputs(loss, _metrics(objective, inputs, weight) | {"loss": loss.detach()})


def _required(ref_logprobs: Tensor | None) -> Tensor:
    if ref_logprobs is None:
        raise ValueError("ref_logprobs: required by a loss with a KL term")
    return ref_logprobs


def reduce(per_token: Tensor, inputs: LossInputs, config: LossSection) -> Tensor:
    """Return the mean of values `(N,)` as `mean` defines it, over the whole step."""
    match config.mean:
        case "tokens":
            return per_token.sum() / inputs.step.tokens
        case "sequences":
            return (per_token / inputs.lengths()[inputs.sequences]).sum() / inputs.step.sequences
        case "constant":
            return per_token.sum() / (inputs.step.sequences * config.length)


@torch.no_grad()
def _metrics(objective: Objective, inputs: LossInputs, weight: Tensor) -> dict[str, Tensor]:
    drift = bounded(inputs.logprobs - inputs.behaviour_logprobs)
    ratio = drift.exp()
    parts = {
        "ratio": ratio,
        "clipped": objective.cut.to(ratio.dtype),
        "kl": ratio - 1 - drift,
        "entropy": inputs.entropy,
        "weight": weight,
        "masked": (weight == 0).to(ratio.dtype),
    }
    if inputs.ref_logprobs is not None:
        parts["kl_ref"] = k3(inputs.logprobs - inputs.ref_logprobs)
    return {name: part.sum() / inputs.step.tokens for name, part in parts.items()}
