import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.support.toy import some_group
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rolloutmq.trainer.step import logprobs as scoring
from rolloutmq.trainer.step.collate import Example, collate
from rolloutmq.trainer.step.logprobs import LogprobScorer, score_hidden, score_tokens

VOCABULARY = 53
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROW_BYTES = 4 * VOCABULARY
FAMILIES = [LlamaConfig, Qwen2Config, Qwen3Config]


def model(
    kind: type[PretrainedConfig] = LlamaConfig, dtype: torch.dtype = torch.float32, **changed: Any
) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**(SMALL | changed))).to(dtype).eval()


def asked() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of five rows, and the later half of each asked for."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (5, 9), generator=generator)
    rows, positions = torch.nonzero(torch.ones(5, 5, dtype=torch.bool), as_tuple=True)
    return tokens, rows, positions + 4


def gradients(policy: nn.Module, scores: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Gradients of a sum of both outputs in which no two tokens count the same."""
    logprobs, entropy = scores
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    policy.zero_grad()
    ((logprobs * weights).sum() + (entropy * weights.flip(0)).sum()).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows_at_once", [1, 7, 25, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_chunks_give_the_values_and_gradients_of_the_plain_way(
    rows_at_once: int, dtype: torch.dtype, tolerance: float, tied: bool
) -> None:
    policy = model(dtype=dtype, tie_word_embeddings=tied)
    plain = score_tokens(policy, *asked())
    expected = gradients(policy, plain)
    row_bytes = max(ROW_BYTES, VOCABULARY * torch.finfo(dtype).bits // 8)
    chunked = LogprobScorer(policy, rows_at_once * row_bytes)(*asked())
    found = gradients(policy, chunked)
    for ours, theirs in zip(chunked, plain, strict=True):
        assert ours.dtype == theirs.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    assert found.keys() == expected.keys()
    for name in found:
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance * scale, msg=name)


def in_float64(policy: Any) -> tuple[Tensor, Tensor]:
    """Scores from the hidden states of the policy on, in float64."""
    tokens, rows, positions = asked()
    hidden = policy.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    logits = hidden[rows, positions - 1].double() @ policy.lm_head.weight.double().T
    if cap := getattr(policy.config, "final_logit_softcapping", None):
        logits = cap * (logits / cap).tanh()
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[rows, positions, None]).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("rows_at_once", [7, 1000])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Gemma2Config])
def test_with_a_float32_head_a_bfloat16_policy_is_scored_as_in_float64(
    kind: type[PretrainedConfig], rows_at_once: int
) -> None:
    """Gemma2 caps its logits after the head; there the whole head of the policy is float32."""
    policy = model(kind, dtype=torch.bfloat16)
    exact = in_float64(policy)
    expected = gradients(policy, exact)
    exact = in_float64(policy)
    scores = LogprobScorer(policy, rows_at_once * ROW_BYTES, fp32_head=True)(*asked())
    for found, known in zip(scores, exact, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), known, rtol=0, atol=1e-5)
    found = gradients(policy, scores)
    for name in expected:
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0.05 * scale, msg=name)
    coarse = LogprobScorer(policy, rows_at_once * ROW_BYTES)(*asked())
    assert max((c.double() - k).abs().max().item() for c, k in zip(coarse, exact, strict=True)) > 1e-3


@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("beside", [0, 3])
def test_each_token_is_scored_at_its_own_temperature(rows_at_once: int, bias: bool, beside: int) -> None:
    torch.manual_seed(3)
    head = nn.Linear(6, VOCABULARY, bias=bias).double()
    hidden = torch.randn(25, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(VOCABULARY, (25, 1 + beside) if beside else (25,))
    temperatures = torch.linspace(0.3, 2.5, 25)

    def gradients_of(scores: tuple[Tensor, Tensor]) -> list[Tensor]:
        chosen, entropy = scores
        total = (chosen * torch.linspace(-1, 2, chosen.numel()).view_as(chosen)).sum() + (entropy**2).sum()
        return list(torch.autograd.grad(total, [hidden, *head.parameters()], retain_graph=True))

    logprobs = (head(hidden) / temperatures.double()[:, None]).log_softmax(-1)
    expected = (
        logprobs.gather(-1, tokens.view(25, -1)).view(tokens.shape),
        -(logprobs.exp() * logprobs).sum(-1),
    )
    found = score_hidden(hidden, head, tokens, rows_at_once * 2 * ROW_BYTES, temperatures)
    whole = scoring.score_logits(head(hidden), tokens, temperatures)
    for scores in (found, whole):
        for ours, plain in zip(scores, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
        for ours, plain in zip(gradients_of(scores), gradients_of(expected), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])
@pytest.mark.parametrize("others", [0, 2])
def test_scores_are_no_views(kind: type[PretrainedConfig], others: int) -> None:
    """What wraps the scorer for several ranks could not guard the backward pass of one."""
    tokens, rows, positions = asked()
    also = torch.ones(len(rows), others, dtype=torch.long) if others else None
    scores = LogprobScorer(model(kind), 1 << 20)(tokens, rows, positions, also=also)
    assert not any(one._is_view() for one in scores)


def test_gradients_agree_with_finite_differences() -> None:
    torch.manual_seed(2)
    head = nn.Linear(4, 11).double()
    hidden = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    tokens, temperatures = torch.randint(11, (6,)), torch.linspace(0.5, 1.5, 6, dtype=torch.float64)

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return scoring._ChunkedScores.apply(hidden, weight, bias, tokens, temperatures, 4, False)  # type: ignore[no-untyped-call]

    assert torch.autograd.gradcheck(scores, (hidden, head.weight, head.bias))


def test_logits_far_from_zero_stay_numbers() -> None:
    head = nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.arange(10.0).view(5, 2) * 1e3)
    hidden = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], requires_grad=True)
    logprobs, entropy = score_hidden(hidden, head, torch.tensor([0, 4]), 1 << 20)
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_no_more_logits_exist_at_once_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = model()
    scorer = LogprobScorer(policy, 7 * ROW_BYTES + ROW_BYTES // 2)
    made = rows_of_logits(monkeypatch)
    gradients(policy, scorer(*asked()))
    assert made == [7, 7, 7, 4] * 2


def rows_of_logits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note of how many places logits are computed at once."""
    made: list[int] = []
    linear = torch.nn.functional.linear

    def noted(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == VOCABULARY:
            made.append(hidden.shape[:-1].numel())
        return linear(hidden, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    return made


def test_padding_changes_nothing() -> None:
    policy = model(dtype=torch.float64)
    scorer = LogprobScorer(policy, 1 << 20)
    tokens = torch.tensor([[1, 5, 6, 7, 2], [1, 9, 2, 0, 0]])
    rows, positions = torch.tensor([0, 0, 1]), torch.tensor([1, 4, 2])
    logprobs, entropy = scorer(tokens, rows, positions)
    for n, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        alone = policy(input_ids=tokens[row : row + 1, :position]).logits[0, -1].softmax(-1)
        assert logprobs[n].item() == pytest.approx(alone[tokens[row, position]].log().item(), abs=1e-12)
        assert entropy[n].item() == pytest.approx(-(alone * alone.log()).sum().item(), abs=1e-12)


@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_a_head_that_is_more_than_linear_is_not_taken_apart(
    cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap that small logits hardly feel, too: they grow. No logits are made but those that are asked for."""
    policy = model(Gemma2Config, final_logit_softcapping=cap, initializer_range=0.02)
    scorer = LogprobScorer(policy, ROW_BYTES)
    assert not scorer._takes_head_apart
    plain = score_tokens(policy, *asked())
    expected = gradients(policy, plain)
    made = rows_of_logits(monkeypatch)
    scores = scorer(*asked())
    assert made == [25]
    torch.testing.assert_close(scores, plain)
    found = gradients(policy, scores)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert policy(input_ids=asked()[0]).logits.shape == (5, 9, VOCABULARY)


@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_that_are_computed_again_give_the_same_gradients(kind: type[PretrainedConfig]) -> None:
    policy = model(kind, dtype=torch.float64)
    again = copy.deepcopy(policy)
    expected = gradients(policy, LogprobScorer(policy, 1 << 20)(*asked()))
    calls: list[str] = []
    for name, module in again.named_modules():
        if name.endswith("mlp"):
            module.register_forward_pre_hook(lambda *_given, name=name: calls.append(name))
    scorer = LogprobScorer(again, 1 << 20, recompute_blocks=True)
    calls.clear()
    found = gradients(again, scorer(*asked()))
    assert sorted(calls) == sorted(2 * ["model.layers.0.mlp", "model.layers.1.mlp"])
    assert again.training is False
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-14, msg=name)


def test_what_is_frozen_gets_no_gradient() -> None:
    policy = model()
    policy.get_output_embeddings().requires_grad_(False)
    found = gradients(policy, LogprobScorer(policy, 1 << 20)(*asked()))
    assert "lm_head.weight" not in found
    assert "model.norm.weight" in found


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", [*FAMILIES, Gemma2Config])
def test_sequences_that_share_a_row_do_not_see_each_other(kind: type[PretrainedConfig], pack: bool) -> None:
    policy = model(kind, dtype=torch.float64)
    scorer = LogprobScorer(policy, 1 << 20)
    assert scorer.packs
    rng = np.random.default_rng(3)
    tokens = [rng.integers(3, VOCABULARY, n) for n in (12, 3, 2, 7, 4, 5, 1)]
    group = some_group(
        "g",
        [0.0] * len(tokens),
        tokens=tokens,
        mask=[np.ones(len(row)) for row in tokens],
        inference_logprobs=[np.zeros(len(row)) for row in tokens],
    )
    (one,) = collate([Example(group, np.zeros(group.tokens, np.float32))], 1000, pack=pack)
    assert (one.position_ids is not None) == pack
    assert one.tokens.shape == ((3, 12) if pack else (6, 12))
    logprobs, entropy = scorer(one.tokens, one.rows, one.positions, one.position_ids)
    for number in range(one.sequence_count):
        mine = one.sequences == number
        row, first = int(one.rows[mine][0]), int(one.positions[mine][0]) - 1
        alone = one.tokens[row : row + 1, first : first + int(mine.sum()) + 1]
        places = torch.arange(1, alone.shape[1])
        expected = scorer(alone, torch.zeros_like(places), places)
        # Gemma2 computes its softmax in float32, whatever the model's type; how it is rounded depends on the CPU.
        bound = 2e-6 if kind is Gemma2Config else 1e-9
        torch.testing.assert_close(logprobs[mine], expected[0], rtol=0, atol=bound)
        torch.testing.assert_close(entropy[mine], expected[1], rtol=0, atol=bound)


def test_a_policy_that_mixes_what_shares_a_row_is_found_out() -> None:
    policy = model()
    forward = policy.model.forward

    def blind(**given: Any) -> Any:
        return forward(**(given | {"position_ids": None}))

    policy.model.forward = blind
    assert not LogprobScorer(policy, 1 << 20).packs


@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])
def test_other_tokens_are_asked_for_beside_those_that_are_there(kind: type[PretrainedConfig]) -> None:
    policy = model(kind, dtype=torch.float64)
    tokens, rows, positions = asked()
    also = torch.randint(VOCABULARY, (len(rows), 3), generator=torch.Generator().manual_seed(3))
    also[0] = tokens[rows[0], positions[0]]  # the very token that is there, three times
    scorer = LogprobScorer(policy, 4 * ROW_BYTES)
    logprobs, entropy = scorer(tokens, rows, positions, also=also)
    plain = policy(input_ids=tokens[:, :-1]).logits[rows, positions - 1].log_softmax(-1)
    wanted = plain.gather(-1, torch.cat([tokens[rows, positions, None], also], -1))
    torch.testing.assert_close(logprobs, wanted)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    own = -(plain.exp() * plain).sum(-1)
    expected = torch.autograd.grad((wanted * weights).sum() + own.square().sum(), policy.lm_head.weight)
    found = torch.autograd.grad((logprobs * weights).sum() + entropy.square().sum(), policy.lm_head.weight)
    torch.testing.assert_close(found, expected)
