"""Logits in float32 of coarser weights, against the same product in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from rolloutmq.trainer.policy import head
from rolloutmq.trainer.policy.head import float32_head, wide_logits

WORDS, WIDTH = 301, 64


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_float64(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    exact = hidden.double() @ weight.double().T
    return exact if bias is None else exact + bias.double()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(7,), (2, 5), (0,)])
@pytest.mark.parametrize("rows_at_once", [1, 100, 1000])
def test_logits_are_those_of_float64(
    rows_at_once: int, shape: tuple[int, ...], biased: bool, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "TILE_BYTES", rows_at_once * 4 * WIDTH)
    hidden, weight = drawn(*shape, WIDTH), drawn(WORDS, WIDTH, seed=1)
    bias = drawn(WORDS, seed=2) if biased else None
    with torch.set_grad_enabled(grad):
        found = wide_logits(hidden, weight, bias)
    assert found.dtype == torch.float32
    assert found.shape == (*shape, WORDS)
    torch.testing.assert_close(found.double(), in_float64(hidden, weight, bias), rtol=0, atol=1e-4)


def test_in_bfloat16_they_are_not() -> None:
    hidden, weight = drawn(7, WIDTH), drawn(WORDS, WIDTH, seed=1)
    rounded = nn.functional.linear(hidden, weight).double()
    assert (rounded - in_float64(hidden, weight, None)).abs().max() > 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finer_types_stay_as_they_are(dtype: torch.dtype) -> None:
    hidden, weight = drawn(3, WIDTH, dtype=dtype), drawn(WORDS, WIDTH, seed=1, dtype=dtype)
    assert wide_logits(hidden, weight).dtype == dtype


def policy_of(kind: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = kind(
        vocab_size=53,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])
def test_a_policy_gives_logits_in_float32_meanwhile(kind: Any) -> None:
    policy = policy_of(kind, torch.bfloat16)
    tokens = torch.tensor([[1, 5, 9]])
    before = policy(input_ids=tokens).logits
    with float32_head(policy):
        found = policy(input_ids=tokens).logits
    hidden = policy.base_model(input_ids=tokens).last_hidden_state
    exact = in_float64(hidden, policy.lm_head.weight, None)
    if cap := getattr(policy.config, "final_logit_softcapping", None):
        exact = cap * (exact / cap).tanh()
    assert (before.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert torch.equal(policy(input_ids=tokens).logits, before)


@torch.no_grad()
def test_a_float32_policy_is_left_alone() -> None:
    policy = policy_of(LlamaConfig, torch.float32)
    with float32_head(policy):
        assert "forward" not in vars(policy.lm_head)


def test_an_error_meanwhile_gives_the_head_back() -> None:
    policy = policy_of(LlamaConfig, torch.bfloat16)
    with pytest.raises(RuntimeError, match="meanwhile"), float32_head(policy):
        raise RuntimeError("meanwhile")
    assert "forward" not in vars(policy.lm_head)
