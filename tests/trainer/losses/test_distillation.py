"""Divergences against sums written out, gradients against finite differences, and why there is a tail."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.trainer.losses.distillation import (
    RATIO_MAX,
    TAIL_FLOOR,
    TeacherInputs,
    bucketed_reverse_divergence,
    combined,
    distillation,
    reverse_divergence,
    sampled_token_loss,
    tail,
)
from rolloutmq.trainer.losses.inputs import LossOutputs

N, V, K = 5, 11, 4


def spread(seed: int, *shape: int, sharp: float = 1.0) -> Tensor:
    """Log-probabilities in float64."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharp * drawn).log_softmax(-1)


@pytest.fixture
def student() -> Tensor:
    return spread(1, N, V)


@pytest.fixture
def teacher() -> Tensor:
    return spread(2, N, V, sharp=2.0)


def best(teacher: Tensor, k: int = K) -> Tensor:
    return teacher.topk(k, -1).indices


def inputs(student: Tensor, teacher: Tensor, ids: Tensor, normaliser: int = N) -> TeacherInputs:
    old = torch.zeros(len(student), dtype=student.dtype)
    return TeacherInputs(student.gather(-1, ids), teacher.gather(-1, ids), old, normaliser)


def test_the_full_divergence_is_the_sum_written_out(student: Tensor, teacher: Tensor) -> None:
    p, q = student.exp().tolist(), teacher.exp().tolist()
    written = [
        sum(a * (torch.tensor(a).log() - torch.tensor(b).log()).item() for a, b in zip(x, y, strict=True))
        for x, y in zip(p, q, strict=True)
    ]
    torch.testing.assert_close(
        reverse_divergence(student, teacher), torch.tensor(written, dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(reverse_divergence(teacher, teacher), torch.zeros(N, dtype=torch.float64))


def test_the_bucketed_divergence_is_that_of_distributions_with_one_category_for_the_others(
    student: Tensor, teacher: Tensor
) -> None:
    ids = best(teacher)

    def bucketed(logprobs: Tensor) -> Tensor:
        p = logprobs.exp()
        kept = p.gather(-1, ids)
        return torch.cat([kept, (p.sum(-1) - kept.sum(-1))[:, None]], -1).log()

    ours = bucketed_reverse_divergence(student.gather(-1, ids), teacher.gather(-1, ids))
    torch.testing.assert_close(ours, reverse_divergence(bucketed(student), bucketed(teacher)))
    full = reverse_divergence(student, teacher)
    assert (ours >= 0).all()
    assert (ours <= full + 1e-12).all()


def test_with_all_tokens_but_one_the_bucket_is_that_token(student: Tensor, teacher: Tensor) -> None:
    ids = best(teacher, V - 1)
    ours = bucketed_reverse_divergence(student.gather(-1, ids), teacher.gather(-1, ids))
    torch.testing.assert_close(ours, reverse_divergence(student, teacher))


@pytest.mark.parametrize("kind", ["top_k", "full", "sampled"])
def test_gradients_are_those_of_finite_differences(kind: str, student: Tensor, teacher: Tensor) -> None:
    config = DistillationConfig(kind=kind, top_k=K)
    ids = torch.arange(V).expand(N, V) if kind == "full" else best(teacher)

    def loss(logits: Tensor) -> Tensor:
        return distillation(inputs(logits.log_softmax(-1), teacher, ids), config).loss

    logits = student.clone().requires_grad_()
    if kind != "sampled":
        assert torch.autograd.gradcheck(loss, (logits,))
        return
    # What is held still is no function of the logits, so the difference is taken with it held still.
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    token = ids[:, 0]
    advantage = teacher.gather(-1, token[:, None]) - student.gather(-1, token[:, None])
    weight = student.gather(-1, token[:, None]).exp().clamp_max(RATIO_MAX)  # the old log-probability is 0
    one_hot = torch.nn.functional.one_hot(token, V)
    torch.testing.assert_close(gradient, -(weight * advantage) * (one_hot - student.exp()) / N)


def test_the_sampled_gradient_is_that_of_the_full_divergence_in_expectation(
    student: Tensor, teacher: Tensor
) -> None:
    logits = student.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(reverse_divergence(logits.log_softmax(-1), teacher).sum(), logits)
    own = logits.log_softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    for token in range(V):  # every token that could have been sampled, by its probability
        terms = sampled_token_loss(own[:, token], teacher[:, token], student[:, token])
        expected = expected + (student[:, token].exp() * terms).sum()
    (found,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted)


def test_a_token_that_became_likelier_is_weighted_so_far_and_no_more() -> None:
    ours = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.5, -9.0])
    sampled_token_loss(ours, torch.tensor([-3.0, -3.0, -3.0]), old).sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, 2.0 * torch.tensor([0.0, 0.5, 8.0]).exp().clamp_max(RATIO_MAX))


def test_a_tail_of_nothing_is_neither_infinite_nor_without_a_number() -> None:
    sure = torch.tensor([[0.0, -60.0]])  # nothing is left for others
    other = torch.tensor([[-30.0, -40.0]], requires_grad=True)  # everything is
    assert tail(sure).item() == pytest.approx(TAIL_FLOOR)
    loss = bucketed_reverse_divergence(other, sure).sum() + bucketed_reverse_divergence(sure, other).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert other.grad is not None
    assert torch.isfinite(other.grad).all()
    assert loss.item() < 60.0


def learned(
    divergence: Callable[[Tensor, Tensor], Tensor], steps: int = 200
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow a divergence over a teacher's top 8 of 64 tokens; return student, teacher, and the last value."""
    teacher = spread(3, 32, 64)
    ids = best(teacher, 8)
    logits = spread(4, 32, 64).clone().requires_grad_()
    adam = torch.optim.Adam([logits], 0.05)
    for _ in range(steps):
        adam.zero_grad()
        own = logits.log_softmax(-1)
        value = divergence(own.gather(-1, ids), teacher.gather(-1, ids)).mean()
        value.backward()  # type: ignore[no-untyped-call]
        adam.step()
    return logits.detach().log_softmax(-1), teacher, value.detach()


def mass(logprobs: Tensor, teacher: Tensor) -> float:
    """Return what a student gives on average to the teacher's top 8."""
    return logprobs.gather(-1, best(teacher, 8)).exp().sum(-1).mean().item()


def test_without_the_tail_the_student_unlearns_what_its_teacher_prefers() -> None:
    """This is why there is one: the truncated sum rewards a student for leaving the teacher's tokens."""
    begun = spread(4, 32, 64)
    truncated, teacher, value = learned(reverse_divergence)
    bucketed, _, least = learned(bucketed_reverse_divergence)
    at_first, wanted = mass(begun, teacher), mass(teacher, teacher)
    assert value < 0  # no divergence is
    assert mass(truncated, teacher) < 0.75 * wanted
    assert mass(bucketed, teacher) == pytest.approx(wanted, abs=0.01)
    assert 0 <= least < 1e-3
    full = [reverse_divergence(one, teacher).mean().item() for one in (begun, truncated, bucketed)]
    assert full[2] < 0.8 * full[0]
    assert full[2] < full[1]
    assert at_first < wanted


def test_parts_of_micro_batches_add_up(student: Tensor, teacher: Tensor) -> None:
    config, ids = DistillationConfig(kind="top_k", top_k=K), best(teacher)
    whole = distillation(inputs(student, teacher, ids), config)
    parts = [distillation(inputs(student[c], teacher[c], ids[c], N), config) for c in (slice(2), slice(2, N))]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), value)
    torch.testing.assert_close(whole.metrics["distill_kl"], whole.loss)
    assert whole.metrics["distill_teacher_tail"] < whole.metrics["distill_tail"]


def test_the_losses_are_weighted() -> None:
    rl = LossOutputs(torch.tensor(2.0), {"loss": torch.tensor(2.0), "entropy": torch.tensor(1.0)})
    taught = LossOutputs(torch.tensor(3.0), {"distill_kl": torch.tensor(3.0)})
    config = DistillationConfig(kind="full", weight=0.5, rl_weight=0.1)
    both = combined(rl, taught, config)
    assert both.loss.item() == pytest.approx(1.7)
    assert {name: round(value.item(), 4) for name, value in both.metrics.items()} == {
        "loss": 1.7,
        "entropy": 1.0,
        "distill_kl": 3.0,
    }
