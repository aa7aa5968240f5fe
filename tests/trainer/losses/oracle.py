"""A second oracle: a step computed from the formulas of the papers, in float64, one sequence after the other.

It shares no code with the trainer: no masks, no flat tensors, no passes and no ranks. Of the configuration it reads the
values. The names are those of the papers: pi learns, mu sampled, `old` is the policy before the step.

    GRPO, k3                arXiv:2402.03300, eq. 3, 4 and section 4.1.2
    Dr. GRPO                arXiv:2503.20783, section 3.2
    DAPO                    arXiv:2503.14476, eq. 9, 10 and 12
    decoupled PPO           arXiv:2110.00641
    GSPO                    arXiv:2507.18071, eq. 5 to 7
    CISPO                   arXiv:2506.13585, eq. 4 and 5
    REINFORCE, RLOO         Williams 1992; arXiv:2402.14740
    k1, k2, k3              joschu.net/blog/kl-approx.html
    distillation            arXiv:2306.08543, eq. 1
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Answer:
    """The trained tokens of one sequence, `n` of them, all in float64.

    Attributes:
        pi: `(n,)` log-probabilities under the policy that learns, with gradient.
        entropy: `(n,)` of that policy, with gradient.
        mu: `(n,)` log-probabilities under the policy that sampled.
        old: `(n,)` the same under the policy before the step.
        ref: `(n,)` the same under the reference.
        advantages: `(n,)`.
        staleness: Steps since it was sampled.
    """

    pi: Tensor
    entropy: Tensor
    mu: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    staleness: int = 0


def step_loss(answers: Sequence[Answer], loss: Any) -> Tensor:
    """Return the loss of a step of all these sequences; `loss` is a section of `[trainer.loss]`."""
    answers = [one for one in answers if len(one.pi)]
    sums = [token_losses(one, loss) for one in answers]
    if loss.mean == "tokens":
        return sum_of(sums) / float(sum(map(len, sums)))
    if loss.mean == "sequences":
        return torch.stack([one.mean() for one in sums]).mean()
    return sum_of(sums) / float(len(sums) * loss.length)


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).sum()


def token_losses(one: Answer, loss: Any) -> Tensor:
    """Return what each token adds: the weighted objective, KL and entropy."""
    own = weight(one, loss.correction) * objective(one, loss)
    if loss.kl and loss.kl_in == "loss":
        own = own + float(loss.kl) * estimate(one.pi - one.ref, loss.kl_estimator)
    return own - float(loss.entropy) * one.entropy


def objective(one: Answer, loss: Any) -> Tensor:
    ratio = torch.exp(one.pi - (one.old if is_corrected(one, loss.correction) else one.mu))
    match loss.name:
        case "grpo" | "dr_grpo" | "dapo" | "decoupled_ppo":
            return clipped(ratio, one.advantages, loss)
        case "gspo":
            whole = torch.exp(torch.log(ratio).mean())  # the geometric mean
            return clipped(whole * torch.ones_like(ratio), one.advantages, loss)
        case "cispo":
            bound = torch.tensor(loss.ratio_max, dtype=torch.float64)
            return -torch.minimum(ratio.detach(), bound) * one.advantages * one.pi
        case "reinforce" | "rloo":
            return -one.advantages * one.pi
        case name:
            raise ValueError(name)


def clipped(ratio: Tensor, advantages: Tensor, loss: Any) -> Tensor:
    """PPO's pessimistic bound, by cases: nothing is gained by going further than the clip."""
    high, low = 1 + loss.clip_high, 1 - loss.clip_low
    gained = torch.where(advantages > 0, ratio > high, ratio < low)
    held = torch.where(advantages > 0, torch.full_like(ratio, high), torch.full_like(ratio, low))
    return -torch.where(gained, held, ratio) * advantages


def is_corrected(one: Answer, correction: Any) -> bool:
    return bool(correction.level != "none" and one.staleness >= correction.from_staleness)


def weight(one: Answer, correction: Any) -> Tensor:
    """Return the importance weight of each token, truncated or masked."""
    if not is_corrected(one, correction):
        return torch.ones_like(one.mu)
    found = torch.exp(one.old - one.mu)
    if correction.level == "sequence":
        found = torch.prod(found) * torch.ones_like(found)
    if correction.how == "truncate":
        return torch.minimum(found, torch.full_like(found, correction.high))
    kept: Tensor = (found >= correction.low) & (found <= correction.high)
    return found * kept


def estimate(distance: Tensor, name: str) -> Tensor:
    """Return an estimator of the KL by log(pi / ref)."""
    match name:
        case "k1":
            return distance
        case "k2":
            return 0.5 * distance**2
        case "k3":
            inverse = torch.exp(-distance)
            return (inverse - 1) - torch.log(inverse)
        case _:
            raise ValueError(name)


def advantages(rewards: Sequence[float], penalties: Sequence[float], loss: Any) -> list[float] | None:
    """Return the advantage of each sequence of a group; None if its rewards do not differ.

    Penalties are what the KL takes off each reward; they are compared like rewards, and never divided.
    """
    if max(rewards) - min(rewards) <= 1e-6 * max(map(abs, rewards)):
        return None
    count, mean = len(rewards), sum(rewards) / len(rewards)
    match loss.advantage:
        case "dr_grpo":
            found = [one - mean for one in rewards]
        case "grpo":
            variance = sum((one - mean) ** 2 for one in rewards) / (count - loss.std_ddof)
            found = [(one - mean) / max(variance**0.5, loss.std_floor) for one in rewards]
        case "rloo":
            found = without_own(rewards)
        case _:
            raise ValueError(loss.advantage)
    off = (
        without_own(penalties)
        if loss.advantage == "rloo"
        else [x - sum(penalties) / count for x in penalties]
    )
    return [float(np.float32(one - less)) for one, less in zip(found, off, strict=True)]


def without_own(rewards: Sequence[float]) -> list[float]:
    """Subtract from each the mean of the others."""
    return [
        own - sum(other for k, other in enumerate(rewards) if k != n) / (len(rewards) - 1)
        for n, own in enumerate(rewards)
    ]


def distilled(kind: str, student: Tensor, teacher: Tensor, ids: Tensor, token: int, mu: float) -> Tensor:
    """Return the loss of one position from the distributions `(V,)` of student and teacher, in nats.

    Args:
        kind: Of `[trainer.distillation]`.
        student: With gradient.
        teacher: Without.
        ids: The teacher's likeliest tokens.
        token: The sampled one.
        mu: Its log-probability under the policy that sampled.
    """
    match kind:
        case "full":
            return (student.exp() * (student - teacher)).sum()
        case "top_k":
            p, q = (torch.cat([one[ids].exp(), 1 - one[ids].exp().sum()[None]]) for one in (student, teacher))
            return (p * torch.log(p / q)).sum()
        case "sampled":
            own = student[token].item()
            return -min(math.exp(own - mu), 2.0) * (teacher[token].item() - own) * student[token]
        case _:
            raise ValueError(kind)
