import math

import pytest
import torch
from torch import Tensor

from rolloutmq.trainer.loss import LossConfig, LossInputs, clipped_policy_gradient

LOW, HIGH = 0.2, 0.28
CLIP = LossConfig(clip_low=LOW, clip_high=HIGH)


def inputs(log_ratios: list[float], advantage: float, normaliser: int | None = None) -> LossInputs:
    """Tokens with those log-ratios, in float64, all with the same advantage."""
    old = torch.linspace(-3, -0.1, len(log_ratios), dtype=torch.float64)
    new = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    entropy = torch.full_like(new, 0.5).detach().requires_grad_()
    advantages = torch.full_like(old, advantage)
    return LossInputs(new, entropy, old, advantages, normaliser or len(log_ratios))


def gradient(given: LossInputs, cfg: LossConfig = CLIP) -> Tensor:
    clipped_policy_gradient(given, cfg).loss.backward()  # type: ignore[no-untyped-call]
    assert given.logprobs.grad is not None
    return given.logprobs.grad


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.3, -2.5])
@pytest.mark.parametrize("log_ratio", [-2.0, -0.5, -0.1, 0.0, 0.1, 0.5, 2.0])
def test_value_is_the_closed_form(log_ratio: float, advantage: float) -> None:
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    expected = -min(ratio * advantage, clipped * advantage)
    loss = clipped_policy_gradient(inputs([log_ratio], advantage), CLIP).loss
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_negative_advantages_take_the_minimum() -> None:
    # A trainer that takes the maximum there has [.607, .905, 1.105, 0]: it goes on pushing what is suppressed already
    # and stops correcting what grew.
    found = gradient(inputs([-0.5, -0.1, 0.1, 0.5], -1.0, normaliser=1), LossConfig(0.2, 0.2))
    assert found.tolist() == pytest.approx([0.0, 0.905, 1.105, 1.649], abs=5e-4)


def test_positive_advantages_stop_at_the_upper_bound() -> None:
    found = gradient(inputs([-0.5, -0.1, 0.1, 0.24, 0.25, 0.5], 1.0, normaliser=1))
    expected = [-math.exp(r) for r in (-0.5, -0.1, 0.1, 0.24)] + [0, 0]  # ln 1.28 = .2469
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    n = 64
    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    new = old + torch.randn(n, generator=generator, dtype=torch.float64) / 3
    entropy = 2 * torch.rand(n, generator=generator, dtype=torch.float64)
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)

    def loss(logprobs: Tensor, undecided: Tensor) -> Tensor:
        given = LossInputs(logprobs, undecided, old, advantages, 50)
        return clipped_policy_gradient(given, LossConfig(LOW, HIGH, entropy=0.1)).loss

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(), entropy.requires_grad_()))


def test_on_policy_it_is_the_plain_policy_gradient() -> None:
    given = inputs([0.0] * 5, 1.0)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.25], dtype=torch.float64)
    given = LossInputs(given.logprobs, given.entropy, given.old_logprobs, advantages, 5)
    assert torch.allclose(gradient(given), -advantages / 5, rtol=1e-14)


def test_entropy_is_pushed_up() -> None:
    given = inputs([0.0, 0.1], 1.0)
    gradient(given, LossConfig(LOW, HIGH, entropy=0.04))
    assert given.entropy.grad is not None
    assert given.entropy.grad.tolist() == pytest.approx([-0.02, -0.02])


def test_parts_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(5)
    columns = [torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(4)]

    def run(start: int, end: int) -> tuple[Tensor, dict[str, Tensor]]:
        new, entropy, old, advantages = (column[start:end] for column in columns)
        part = LossInputs(new, entropy, old, advantages, normaliser=40)
        outputs = clipped_policy_gradient(part, LossConfig(LOW, HIGH, 0.01))
        return outputs.loss, outputs.metrics

    whole, metrics = run(0, 40)
    cuts = [run(0, 7), run(7, 8), run(8, 40)]
    assert sum(loss.item() for loss, _ in cuts) == pytest.approx(whole.item(), rel=1e-12)
    for name, value in metrics.items():
        assert sum(part[name].item() for _, part in cuts) == pytest.approx(value.item(), rel=1e-12)


def test_metrics_are_means_over_tokens() -> None:
    log_ratios = [0.0, 0.5, -0.5, 0.1]
    metrics = clipped_policy_gradient(inputs(log_ratios, 1.0), CLIP).metrics
    ratios = [math.exp(r) for r in log_ratios]
    assert metrics["ratio"].item() == pytest.approx(sum(ratios) / 4)
    assert metrics["clipped"].item() == 0.25
    assert metrics["kl"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    assert metrics["entropy"].item() == 0.5
    assert not any(metric.requires_grad for metric in metrics.values())


def test_an_absurd_ratio_leaves_a_finite_gradient() -> None:
    for log_ratio in (-800.0, 800.0):
        found = gradient(inputs([log_ratio, 0.0], -1.0))
        assert torch.isfinite(found).all()
