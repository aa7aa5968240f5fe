import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.config.trainer import LoraConfig, TrainerConfig
from rolloutmq.schemas.errors import ConfigError, MissingError
from rolloutmq.trainer.policy.adapters import ADAPTERS, DESCRIPTION, Adapters
from rolloutmq.trainer.policy.model import Policy, build_policy
from rolloutmq.trainer.step.logprobs import LogprobScorer
from rolloutmq.trainer.step.optimizer import PolicyOptimizer

MODEL = ModelConfig(hidden_size=16, layers=2, mlp_size=24)
LORA = LoraConfig(rank=4, alpha=8.0)
TOKENS = torch.tensor([[1, 5, 6, 7, 2, 9], [1, 9, 2, 4, 4, 8]])
ASKED = tuple(torch.nonzero(torch.ones(2, 5), as_tuple=True))


def adapted(lora: LoraConfig = LORA, dtype: str = "float32") -> tuple[Policy, Adapters, dict[str, Tensor]]:
    """A policy with adapters, and its plain weights, which stand for the shared ones."""
    policy = build_policy(MODEL.model_copy(update={"dtype": dtype}), 0)
    shared = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    adapters = Adapters(policy, lora)
    return adapters.inject(), adapters, shared


def learn(policy: Policy, adapters: Adapters, steps: int = 3) -> None:
    optimizer = PolicyOptimizer(policy, TrainerConfig(), adapters.publish)
    scorer = LogprobScorer(policy, 1 << 20)
    for _ in range(steps):
        logprobs, entropy = scorer(TOKENS, ASKED[0], ASKED[1] + 1)
        (entropy.mean() - logprobs.mean()).backward()
        optimizer.step(1e-2, nullcontext())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_learn_and_the_shared_weights_are_base_plus_delta(dtype: str) -> None:
    policy, adapters, shared = adapted(dtype=dtype)
    before = {name: tensor.clone() for name, tensor in shared.items()}
    learning = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert learning
    assert all(".lora_" in name for name in learning)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    frozen = {name: p.detach().clone() for name, p in policy.named_parameters() if name not in learning}
    learn(policy, adapters)
    for name, p in policy.named_parameters():
        assert name in learning or torch.equal(p, frozen[name]), name
    moved = 0
    for name, tensor in shared.items():
        module, _, _ = name.rpartition(".")
        layer: Any = policy.get_submodule(module)
        if hasattr(layer, "lora_A"):
            moved += 1
            delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
            expected = (before[name].float() + delta).to(tensor.dtype)
            torch.testing.assert_close(
                tensor, expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-7
            )
            assert not torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, before[name])
    assert moved == 2 * 7


def test_before_the_first_step_the_policy_is_the_plain_one() -> None:
    plain = build_policy(MODEL, 0)
    policy, adapters, shared = adapted()
    assert torch.equal(policy(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits)
    adapters.publish()
    assert all(torch.equal(shared[name], p) for name, p in plain.named_parameters())


def test_the_plain_policy_stays_plain_and_holds_the_sum() -> None:
    plain = build_policy(MODEL, 0)
    names = [name for name, _ in plain.named_parameters()]
    adapters = Adapters(plain, LORA)
    learner = adapters.inject()
    learn(learner, adapters)
    assert [name for name, _ in plain.named_parameters()] == names
    torch.testing.assert_close(plain(input_ids=TOKENS).logits, learner(input_ids=TOKENS).logits)
    assert learner.get_input_embeddings().weight is plain.get_input_embeddings().weight  # type: ignore[operator]


def test_a_server_of_the_shared_weights_computes_what_the_trainer_does() -> None:
    policy, adapters, shared = adapted()
    learn(policy, adapters)
    server = build_policy(MODEL, 9)
    server.load_state_dict(shared)
    torch.testing.assert_close(server(input_ids=TOKENS).logits, policy(input_ids=TOKENS).logits)


def test_restored_adapters_are_in_the_plain_weights_before_anybody_shares_them(tmp_path: Path) -> None:
    policy, adapters, shared = adapted()
    learn(policy, adapters)
    adapters.save(tmp_path)
    again = build_policy(MODEL, 0)
    plain = {name: parameter.detach() for name, parameter in again.named_parameters()}
    restored = Adapters(again, LORA)
    restored.restore(load_file(tmp_path / ADAPTERS), adapters.base_digest, LORA.alpha)
    assert all(torch.equal(plain[name], tensor) for name, tensor in shared.items())
    learner = restored.inject()
    for (name, one), (_, other) in zip(policy.named_parameters(), learner.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_loads_what_is_saved(tmp_path: Path) -> None:
    policy, adapters, _ = adapted()
    learn(policy, adapters)
    adapters.save(tmp_path)
    loaded = PeftModel.from_pretrained(build_policy(MODEL, 0), tmp_path)
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, policy(input_ids=TOKENS).logits)


@pytest.mark.usefixtures("open_umask")
def test_saved_files_are_for_their_user_alone(tmp_path: Path) -> None:
    adapted()[1].save(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {ADAPTERS: 0o600, DESCRIPTION: 0o600}


def test_adapters_of_something_else_are_refused(tmp_path: Path) -> None:
    policy, adapters, _ = adapted()
    adapters.save(tmp_path)
    saved = load_file(tmp_path / ADAPTERS)
    with pytest.raises(ConfigError, match=r"trainer\.lora: the checkpoint has no adapters"):
        Adapters(build_policy(MODEL, 0), LORA).restore({}, "", LORA.alpha)
    with pytest.raises(ConfigError, match="another rank or other targets"):
        Adapters(build_policy(MODEL, 0), LoraConfig(rank=2)).restore(saved, adapters.base_digest, LORA.alpha)
    with pytest.raises(ConfigError, match="another rank or other targets"):
        Adapters(build_policy(MODEL, 0), LoraConfig(rank=4, targets=("q_proj",))).restore(
            saved, adapters.base_digest, LORA.alpha
        )
    with pytest.raises(
        ConfigError, match="differ from those that the adapters of the checkpoint were trained on"
    ):
        Adapters(build_policy(MODEL, 1), LORA).restore(saved, adapters.base_digest, LORA.alpha)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.alpha: the adapters .* were trained with"):
        Adapters(build_policy(MODEL, 0), LORA).restore(saved, adapters.base_digest, 2 * LORA.alpha)
    assert policy.training is False


def test_targets_are_chosen_by_name() -> None:
    policy, _, _ = adapted(LoraConfig(targets=("q_proj", "v_proj")))
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in names)
    with pytest.raises(
        ConfigError, match=r"trainer\.lora\.targets: no such linear layer in the policy: lm_head, z_proj"
    ):
        adapted(LoraConfig(targets=("q_proj", "z_proj", "lm_head")))


def test_without_peft_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingError, match=r"peft is missing: .*pip install 'rolloutmq\[lora\]'"):
        Adapters(build_policy(MODEL, 0), LORA)
