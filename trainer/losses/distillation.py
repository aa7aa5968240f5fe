"""On-policy distillation: the student's own sequences, judged token by token by a teacher. Pure.

    top_k     sum over the teacher's likeliest K tokens and one category T for all others of p (log p - log q)
    full      the same over the whole vocabulary
    sampled   -sg(min(ratio, 2)) sg(log q - log p) log p, of the sampled token

p is the student, q the teacher, both at temperature 1; each is a mean over the trained tokens of the optimizer batch.

Why there is a category for the others: a sum over the K tokens alone is no divergence. It falls below zero, without
bound, where the student moves its probability away from them, so that a student which minimises it unlearns the very
tokens that its teacher prefers. With the others as one category more both sides add up to 1, the sum is a divergence
(at least 0, and 0 only where all K + 1 agree), and it never exceeds that over the whole vocabulary.

The reverse divergence is that of the student from the teacher, under the student's samples: mode-seeking, and defined
where the student is. Its gradient goes through the student's distribution in each place, not through what it sampled
before; `sampled` estimates the same gradient from one token, with more noise and no more to transport than one number.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rolloutmq.schemas.teaching import DistillationConfig, Lore
from rolloutmq.trainer.losses.inputs import LossOutputs
from rolloutmq.trainer.losses.ratio import bounded

TAIL_FLOOR: Final = 1e-6
"""Least probability of the tokens that the teacher does not tell of. Below it, what is left of 1 is rounding of float32
sums, and the logarithm of nothing would be an infinite reason to keep away from them."""
RATIO_MAX: Final = 2.0
"""Weight of a sampled token that the student has made likelier since: more would be variance."""


@dataclass(frozen=True, slots=True)
class TaughtInputs:
    """Trained tokens of one micro-batch, `N` of them, with `K` tokens of the teacher's in the place of each.

    Attributes:
        student: `(N, K)` log-probabilities of these under the policy that learns, with gradient.
        teacher: `(N, K)` the same under the teacher.
        behaviour_logprobs: `(N,)` of the sampled token under the policy that sampled; for `sampled`.
        normaliser: Trained tokens of the whole optimizer batch.
    """

    student: Tensor
    teacher: Tensor
    behaviour_logprobs: Tensor
    normaliser: int


def distillation(inputs: TaughtInputs, cfg: DistillationConfig) -> LossOutputs:
    """Return the unweighted loss of one micro-batch.

    Metrics, each a mean over the tokens of the optimizer batch once the parts are added: `distill_kl` (the divergence
    of the student from the teacher, as the kind tells it: `sampled` knows an estimate, which may be negative), and for
    `top_k` `distill_tail` and `distill_teacher_tail`, the probability that either gives to all other tokens.
    """
    student, teacher = inputs.student, inputs.teacher
    parts: dict[str, Tensor] = {}
    match cfg.lore:
        case Lore.FULL:
            per_token = parts["distill_kl"] = reverse_divergence(student, teacher)
        case Lore.TOP_K:
            per_token = parts["distill_kl"] = bucketed_reverse_divergence(student, teacher)
            parts |= {"distill_tail": tail(student), "distill_teacher_tail": tail(teacher)}
        case Lore.SAMPLED:
            per_token = sampled_token_loss(student[:, 0], teacher[:, 0], inputs.behaviour_logprobs)
            parts["distill_kl"] = student[:, 0] - teacher[:, 0]
        case Lore.NONE:
            raise ValueError("nothing was asked of a teacher")
    metrics = {name: part.detach().sum() / inputs.normaliser for name, part in parts.items()}
    return LossOutputs(per_token.sum() / inputs.normaliser, metrics)


def combined(rl: LossOutputs, taught: LossOutputs, cfg: DistillationConfig) -> LossOutputs:
    """Add up the two losses of one micro-batch by their weights; the metric `loss` is that of the sum."""
    loss = cfg.rl_weight * rl.loss + cfg.weight * taught.loss
    return LossOutputs(loss, {**rl.metrics, **taught.metrics, "loss": loss.detach()})


def reverse_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return `(N,)` sums of p (log p - log q) over categories `(N, K)` that are all there are."""
    return (student.exp() * (student - teacher)).sum(-1)


def bucketed_reverse_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return `(N,)` divergences over `K + 1` categories: the given ones `(N, K)`, and one for all others."""
    ours, theirs = tail(student), tail(teacher)
    return reverse_divergence(student, teacher) + ours * (ours.log() - theirs.log())


def tail(logprobs: Tensor) -> Tensor:
    """Return `(N,)` what the probabilities `(N, K)` leave of 1, at least `TAIL_FLOOR`."""
    return (-torch.expm1(logprobs.logsumexp(-1))).clamp_min(TAIL_FLOOR)


def sampled_token_loss(student: Tensor, teacher: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return `(N,)` losses of the sampled tokens; as a policy gradient, whose advantage is by how much they pleased."""
    with torch.no_grad():
        weight = bounded(student - behaviour_logprobs).exp().clamp_max(RATIO_MAX)
        advantages = teacher - student
    return -weight * advantages * student
