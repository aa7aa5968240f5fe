"""On-policy distillation: a teacher scores the student's own sequences, token by token. Pure.

    top_k     sum over the teacher's K most likely tokens, and one bucket for all others, of p (log p - log q)
    full      the same over the whole vocabulary
    sampled   -sg(min(r, 2)) sg(log q - log p) log p, of the sampled token

p is the student, q the teacher, both at temperature 1, r the student's ratio to the policy that sampled, sg stops the
gradient. Each loss is a mean over the trained tokens of the optimizer batch.

Sources: Gu et al. 2023, MiniLLM (arXiv:2306.08543), eq. 1 for the reverse KL; Agarwal et al. 2023, "On-Policy
Distillation of Language Models" (arXiv:2306.13649) for the sum over tokens of the student's samples.

Why the bucket: the sum over K tokens alone is not a divergence. It is unbounded below: the student would lower it by
moving probability away from them, and so unlearn the tokens its teacher prefers. With the bucket both sides add up to
1. The sum is then a divergence (at least 0, and 0 only if all K + 1 categories agree) and never exceeds that over the
whole vocabulary.

The reverse KL is mode-seeking. Its gradient goes through the student's distribution at each position, not through the
earlier samples. `sampled` estimates the same gradient from one token: more noise, and one number per token to send.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.schemas.wire.distillation import TeacherLogprobs
from rolloutmq.trainer.losses.inputs import LossOutputs
from rolloutmq.trainer.losses.ratio import bounded

TAIL_FLOOR: Final = 1e-6
"""Lowest probability of the bucket. Below it the value is float32 rounding of 1 minus a sum, and its logarithm
would dominate the loss.
"""
RATIO_MAX: Final = 2.0
"""Bound of the ratio of a sampled token; a larger one would add variance only."""


@dataclass(frozen=True, slots=True)
class TeacherInputs:
    """The `N` trained tokens of one micro-batch, with `K` teacher entries each.

    Attributes:
        student: `(N, K)` log-probabilities of these entries under the learner, with gradient.
        teacher: `(N, K)` the same under the teacher.
        behaviour_logprobs: `(N,)` of the sampled token under the policy that sampled; for `sampled`.
        normaliser: Trained tokens of the whole optimizer batch.
    """

    student: Tensor
    teacher: Tensor
    behaviour_logprobs: Tensor
    normaliser: int


def distillation(inputs: TeacherInputs, cfg: DistillationConfig) -> LossOutputs:
    """Return the unweighted loss of one micro-batch.

    Metrics, each a mean over the tokens of the optimizer batch once the parts are added up: `distill_kl` (divergence of
    the student from the teacher; for `sampled` an estimate that may be negative), and for `top_k` `distill_tail` and
    `distill_teacher_tail`, the probability of the bucket under either.
    """
    student, teacher = inputs.student, inputs.teacher
    parts: dict[str, Tensor] = {}
    match cfg.teacher_logprobs:
        case TeacherLogprobs.FULL:
            per_token = parts["distill_kl"] = reverse_divergence(student, teacher)
        case TeacherLogprobs.TOP_K:
            per_token = parts["distill_kl"] = bucketed_reverse_divergence(student, teacher)
            parts |= {"distill_tail": tail(student), "distill_teacher_tail": tail(teacher)}
        case TeacherLogprobs.SAMPLED:
            per_token = sampled_token_loss(student[:, 0], teacher[:, 0], inputs.behaviour_logprobs)
            parts["distill_kl"] = student[:, 0] - teacher[:, 0]
        case TeacherLogprobs.NONE:
            raise ValueError("distillation.teacher_logprobs: must not be 'none' in a distillation loss")
    metrics = {name: part.detach().sum() / inputs.normaliser for name, part in parts.items()}
    return LossOutputs(per_token.sum() / inputs.normaliser, metrics)


def combined(rl: LossOutputs, distilled: LossOutputs, cfg: DistillationConfig) -> LossOutputs:
    """Return the weighted sum of the two losses of one micro-batch; the metric `loss` is the sum."""
    loss = cfg.rl_weight * rl.loss + cfg.weight * distilled.loss
    return LossOutputs(loss, {**rl.metrics, **distilled.metrics, "loss": loss.detach()})


def reverse_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return `(N,)` sums of p (log p - log q) over all categories `(N, K)`."""
    return (student.exp() * (student - teacher)).sum(-1)


def bucketed_reverse_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return `(N,)` divergences over `K + 1` categories: the given `(N, K)` and the bucket."""
    ours, theirs = tail(student), tail(teacher)
    return reverse_divergence(student, teacher) + ours * (ours.log() - theirs.log())


def tail(logprobs: Tensor) -> Tensor:
    """Return the probability `(N,)` of the bucket, at least `TAIL_FLOOR`."""
    return (-torch.expm1(logprobs.logsumexp(-1))).clamp_min(TAIL_FLOOR)


def sampled_token_loss(student: Tensor, teacher: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return `(N,)` policy-gradient losses of the sampled tokens; the advantage is log q - log p."""
    with torch.no_grad():
        weight = bounded(student - behaviour_logprobs).exp().clamp_max(RATIO_MAX)
        advantages = teacher - student
    return -weight * advantages * student
