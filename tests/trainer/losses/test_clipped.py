import math

import pytest
import torch
from tests.trainer.losses.tokens import compute, gradients, inputs_of

from rolloutmq.schemas.config.losses import DapoConfig, GrpoConfig
from rolloutmq.trainer.losses.inputs import StepSize

LOW, HIGH = 0.2, 0.28
CLIP = DapoConfig(clip_low=LOW, clip_high=HIGH, entropy=0)
ALONE = StepSize(1, 1)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.3, -2.5])
@pytest.mark.parametrize("log_ratio", [-2.0, -0.5, -0.1, 0.0, 0.1, 0.5, 2.0])
def test_value_is_the_closed_form(log_ratio: float, advantage: float) -> None:
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    expected = -min(ratio * advantage, clipped * advantage)
    assert compute(inputs_of([log_ratio], advantage), CLIP).loss.item() == pytest.approx(expected, rel=1e-12)


def test_negative_advantages_take_the_minimum() -> None:
    # A trainer that takes the maximum there has [.607, .905, 1.105, 0]: it goes on pushing what is suppressed already
    # and stops correcting what grew.
    found = gradients(
        inputs_of([-0.5, -0.1, 0.1, 0.5], -1.0, step=ALONE), GrpoConfig(entropy=0, mean="tokens")
    )
    assert found.tolist() == pytest.approx([0.0, 0.905, 1.105, 1.649], abs=5e-4)


def test_positive_advantages_stop_at_the_upper_bound() -> None:
    found = gradients(inputs_of([-0.5, -0.1, 0.1, 0.24, 0.25, 0.5], 1.0, step=ALONE), CLIP)
    expected = [-math.exp(r) for r in (-0.5, -0.1, 0.1, 0.24)] + [0, 0]  # ln 1.28 = .2469
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_on_policy_it_is_the_plain_policy_gradient() -> None:
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.25], dtype=torch.float64)
    found = gradients(inputs_of([0.0] * 5, 1.0, advantages=advantages), CLIP)
    assert torch.allclose(found, -advantages / 5, rtol=1e-14)


def test_entropy_is_pushed_up() -> None:
    given = inputs_of([0.0, 0.1], 1.0)
    (found,) = torch.autograd.grad(compute(given, DapoConfig(entropy=0.04)).loss, given.entropy)
    assert found.tolist() == pytest.approx([-0.02, -0.02])


def test_metrics_are_means_over_tokens() -> None:
    log_ratios = [
        0.5,
        0.6,
        -0.5,
        0.1,
    ]  # what fell below the band is left free where the advantage is positive
    metrics = compute(inputs_of(log_ratios, 1.0), CLIP).metrics
    ratios = [math.exp(r) for r in log_ratios]
    assert metrics["ratio"].item() == pytest.approx(sum(ratios) / 4)
    assert metrics["clipped"].item() == 0.5
    assert metrics["kl"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    assert metrics["entropy"].item() == 0.5
    assert metrics["weight"].item() == 1
    assert metrics["masked"].item() == 0
    assert not any(metric.requires_grad for metric in metrics.values())


def test_an_absurd_ratio_leaves_a_finite_gradient() -> None:
    for log_ratio in (-800.0, 800.0):
        assert torch.isfinite(gradients(inputs_of([log_ratio, 0.0], -1.0), CLIP)).all()
