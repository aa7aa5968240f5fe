from dataclasses import replace
from math import exp

import pytest
import torch
from tests.trainer.losses.tokens import compute, gradients, inputs_of, some_inputs

from rolloutmq.schemas.config.losses import CorrectionConfig, DapoConfig, ReinforceConfig
from rolloutmq.trainer.losses.ratio import log_ratios, weights

LOGS = [-0.7, -0.1, 0.2, 0.9]
TOKEN = CorrectionConfig(level="token", high=2.0)


def test_truncated_weights_are_cut_from_above_only() -> None:
    found = weights(inputs_of(LOGS, 1.0), TOKEN)
    assert found.tolist() == pytest.approx([exp(-0.7), exp(-0.1), exp(0.2), 2.0])
    assert not found.requires_grad


def test_masked_weights_are_kept_whole_or_not_at_all() -> None:
    found = weights(inputs_of(LOGS, 1.0), CorrectionConfig(level="token", how="mask", low=0.6, high=2.0))
    assert found.tolist() == pytest.approx([0, exp(-0.1), exp(0.2), 0])


def test_the_weight_of_a_sequence_is_the_product_of_its_tokens() -> None:
    two = torch.tensor([0, 0, 1, 1])
    given = inputs_of(LOGS, 1.0, sequences=two, sequence_count=2)
    found = weights(given, CorrectionConfig(level="sequence", high=2.0))
    assert found.tolist() == pytest.approx([exp(-0.8)] * 2 + [2.0] * 2)
    masked = weights(given, CorrectionConfig(level="sequence", how="mask", low=0.5, high=2.0))
    assert masked.tolist() == [0] * 4


def test_with_weights_the_ratio_is_to_the_policy_before_the_step() -> None:
    given = some_inputs([3, 4], seed=5)
    assert given.proximal_logprobs is not None
    none = CorrectionConfig()
    assert torch.equal(log_ratios(given, none), given.logprobs - given.behaviour_logprobs)
    assert torch.equal(log_ratios(given, TOKEN), given.logprobs - given.proximal_logprobs)
    alone = replace(given, proximal_logprobs=None)
    assert log_ratios(alone, TOKEN).tolist() == [0.0] * 7
    assert gradients(alone, DapoConfig(entropy=0, correction=TOKEN)).abs().min() > 0


def test_only_what_is_stale_is_weighed() -> None:
    stale = torch.tensor([0, 1, 2, 3])
    given = inputs_of(LOGS, 1.0, staleness=stale)
    late = CorrectionConfig(level="token", high=2.0, from_staleness=2)
    assert weights(given, late).tolist() == pytest.approx([1, 1, exp(0.2), 2.0])
    assert log_ratios(given, late).tolist() == pytest.approx([-0.7, -0.1, 0, 0])


def test_reinforce_with_weights_is_the_gradient_of_the_importance_sampled_objective() -> None:
    given = inputs_of(LOGS, 1.5)
    found = gradients(
        given, ReinforceConfig(entropy=0, correction=CorrectionConfig(level="token", high=99.0))
    )
    objective = ((given.logprobs - given.behaviour_logprobs).exp() * given.advantages).mean()
    (true,) = torch.autograd.grad(-objective, given.logprobs)
    assert torch.allclose(found, true, rtol=1e-12)


def test_an_absurd_weight_stays_finite() -> None:
    given = inputs_of([-900.0, 900.0], 1.0)
    for level in ("token", "sequence"):
        for how in ("truncate", "mask"):
            correction = CorrectionConfig.model_validate({"level": level, "how": how})
            assert torch.isfinite(gradients(given, ReinforceConfig(correction=correction))).all()


def test_entropy_and_kl_are_not_weighed() -> None:
    """They are of the policy that learns, wherever it stands: no other policy sampled them."""
    given = some_inputs([3, 4], seed=6)
    assert given.ref_logprobs is not None
    nothing = CorrectionConfig(level="token", how="mask", low=50, high=60)
    config = DapoConfig(entropy=0.3, kl=0.2, correction=nothing)
    assert weights(given, nothing).tolist() == [0] * 7
    d = given.logprobs - given.ref_logprobs
    expected = (0.2 * d**2 / 2 - 0.3 * given.entropy).mean().item()
    assert compute(given, config).loss.item() == pytest.approx(expected, rel=1e-12)
