"""Estimators of the KL: in exact expectation over a distribution of six tokens, and far from the reference."""

from dataclasses import replace
from math import exp

import pytest
import torch
from pydantic import ValidationError
from tests.trainer.losses.tokens import compute, gradients, inputs_of, some_inputs
from torch import Tensor

from rolloutmq.schemas.config.losses import DapoConfig, LossSection
from rolloutmq.trainer.losses.kl import ESTIMATORS, divergence

POLICY = torch.tensor([0.9, -0.4, 0.1, -1.3, 0.6, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.3, 0.8, -0.2, -0.9, 0.4], dtype=torch.float64).log_softmax(0)


def kl(logits: Tensor) -> Tensor:
    logprobs = logits.log_softmax(0)
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def reverse(logits: Tensor) -> Tensor:
    logprobs = logits.log_softmax(0)
    return (REFERENCE.exp() * (REFERENCE - logprobs)).sum()


def expected(estimator: str, logits: Tensor) -> Tensor:
    """The mean of an estimate over what the policy samples; the sampling itself has no gradient."""
    logprobs = logits.log_softmax(0)
    return (logprobs.exp().detach() * divergence(logprobs, REFERENCE, estimator)).sum()


def slope(value: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, logits)
    return found


def test_k1_and_k3_have_the_value_and_k2_has_not() -> None:
    true = kl(POLICY).item()
    assert expected("k1", POLICY).item() == pytest.approx(true, rel=1e-12)
    assert expected("k3", POLICY).item() == pytest.approx(true, rel=1e-12)
    assert abs(expected("k2", POLICY).item() - true) > 0.01


def test_as_a_loss_k2_has_the_gradient_k1_has_none_and_k3_that_of_the_other_divergence() -> None:
    logits = POLICY.clone().requires_grad_()
    true, other = slope(kl(logits), logits), slope(reverse(logits), logits)
    assert torch.allclose(slope(expected("k2", logits), logits), true, atol=1e-14)
    assert slope(expected("k1", logits), logits).abs().max() < 1e-14
    assert torch.allclose(slope(expected("k3", logits), logits), other, atol=1e-14)
    assert (other - true).norm() > 0.2 * true.norm()


def test_estimates_that_are_wrong_for_their_place_are_refused() -> None:
    for wrong in ({"kl_estimator": "k1"}, {"kl_estimator": "k2", "kl_in": "reward"}):
        with pytest.raises(ValidationError, match="kl_estimator must not be k"):
            DapoConfig.model_validate({"kl": 0.1, **wrong})
        DapoConfig.model_validate(wrong)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_absurd_difference_stays_finite(estimator: str) -> None:
    logprobs = torch.tensor([-900.0, 900.0, 0.0], requires_grad=True)
    value = divergence(logprobs, torch.zeros(3), estimator).sum()
    assert torch.isfinite(value)
    assert torch.isfinite(slope(value, logprobs)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [-88.0, -40.0, -25.0, -20.5, 20.5, 25.0, 300.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_far_from_the_reference_value_and_gradient_are_those_of_the_formula(
    estimator: str, d: float, dtype: torch.dtype
) -> None:
    """A clamp would leave the tokens that are furthest away without any gradient."""
    value, gradient = {
        "k1": (d, 1.0),
        "k2": (d**2 / 2, d),
        "k3": (exp(-d) - 1 + d, 1 - exp(-d)),
    }[estimator]
    logprobs = torch.tensor([d], dtype=dtype, requires_grad=True)
    found = divergence(logprobs, torch.zeros(1, dtype=dtype), estimator)
    precision = 1e-13 if dtype == torch.float64 else 1e-5  # exp of a float32
    assert found.item() == pytest.approx(value, rel=precision)
    assert slope(found.sum(), logprobs).item() == pytest.approx(gradient, rel=precision)


@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, -88.0), (torch.float64, -709.0)])
def test_k3_stands_still_only_where_its_exponential_overflows(dtype: torch.dtype, last: float) -> None:
    assert not torch.tensor(1.0 - last, dtype=dtype).exp().isfinite()
    logprobs = torch.tensor([last, last - 1, 10 * last], dtype=dtype, requires_grad=True)
    found = divergence(logprobs, torch.zeros(3, dtype=dtype), "k3")
    assert found.tolist() == [found[0].item()] * 3
    assert found.isfinite().all()
    near, beyond, far = slope(found[0] + found[1] + found[2], logprobs).tolist()
    assert near == pytest.approx(-exp(-last), rel=1e-5)
    assert beyond == far == 0


@pytest.mark.parametrize("d", [-25.0, 25.0])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_loss_feels_a_token_far_from_its_reference(estimator: str, d: float) -> None:
    given = inputs_of([0.0, 0.0], 1.0)
    given = replace(given, ref_logprobs=given.logprobs.detach() - d)
    config = DapoConfig.model_validate({"entropy": 0, "kl": 0.5, "kl_estimator": estimator})
    found = gradients(given, config) - gradients(given, DapoConfig(entropy=0))
    expected = 0.5 * {"k2": d, "k3": 1 - exp(-d)}[estimator] / 2
    assert found.tolist() == pytest.approx([expected] * 2, rel=1e-12)
    assert compute(given, config).metrics["kl_ref"].item() == pytest.approx(exp(-d) - 1 + d, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_it_is_added_to_the_loss_with_its_weight(estimator: str) -> None:
    given = some_inputs([3, 2, 5])
    assert given.ref_logprobs is not None

    def with_weight(weight: float) -> LossSection:
        return DapoConfig.model_validate({"kl": weight, "kl_estimator": estimator})

    d = (given.logprobs - given.ref_logprobs).detach()
    value, derivative = {"k2": (d**2 / 2, d), "k3": ((-d).exp() - 1 + d, 1 - (-d).exp())}[estimator]
    more = compute(given, with_weight(0.5)).loss - compute(given, with_weight(0)).loss
    assert more.item() == pytest.approx(0.5 * value.mean().item(), rel=1e-10)
    found = gradients(given, with_weight(0.5)) - gradients(given, with_weight(0))
    assert torch.allclose(found, 0.5 * derivative / 10, atol=1e-14)


def test_in_the_reward_it_is_no_part_of_the_loss() -> None:
    given = some_inputs([3, 2, 5])
    rewarded = DapoConfig(kl=0.5, kl_in="reward", kl_estimator="k1")
    assert torch.equal(compute(given, rewarded).loss, compute(given, DapoConfig()).loss)
    assert compute(given, rewarded).metrics["kl_ref"].item() > 0
