import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.trainer.policy.model import (
    build_policy,
    policy_positions,
    policy_vocabulary,
    twin,
    write_identity,
)
from rolloutmq.trainer.policy.tokenizer import character_tokenizer, write_tokenizer

SMALL = ModelConfig(hidden_size=16, layers=1, mlp_size=16)


def test_the_defaults_are_the_quickstarts_policy() -> None:
    policy = build_policy(ModelConfig(), seed=0)
    assert sum(p.numel() for p in policy.parameters()) == 86_336
    assert policy_vocabulary(policy) == 32
    assert policy_positions(policy) == 128


def test_the_seed_decides_the_weights() -> None:
    one, same, other = (build_policy(SMALL, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_ties_and_element_types() -> None:
    tied = build_policy(SMALL.model_copy(update={"tie_embeddings": True, "dtype": "bfloat16"}), 0)
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight  # type: ignore[operator]
    assert {p.dtype for p in tied.parameters()} == {torch.bfloat16}


def test_what_is_written_builds_the_same_policy(tmp_path: Path) -> None:
    policy = build_policy(SMALL, 3)
    write_identity(policy, SMALL, tmp_path)
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    again.load_state_dict(policy.state_dict())
    tokens = torch.tensor([[1, 5, 6, 7]])
    assert torch.equal(again.eval()(input_ids=tokens).logits, policy(input_ids=tokens).logits)
    assert not list(tmp_path.glob(".*"))


def test_the_tokenizer_reads_characters(tmp_path: Path) -> None:
    write_identity(build_policy(SMALL, 0), SMALL, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("312=").input_ids == [1, 6, 4, 5, 13]
    assert tokenizer.decode([6, 4, 5, 13, 14, 6]) == "312= 3"
    assert tokenizer.decode([1, 6, 2], skip_special_tokens=True) == "3"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    chat = [{"role": "user", "content": "3"}, {"role": "user", "content": "1="}]
    assert tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) == [1, 6, 4, 13]
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"  # what transformers 4 can load too


def test_a_character_outside_the_alphabet_is_an_error() -> None:
    with pytest.raises(Exception, match="UNK"):
        character_tokenizer("01").encode("2")


def test_a_model_from_a_directory(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    first = build_policy(SMALL, 5)
    write_identity(first, SMALL, source)
    save_file(first.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
    config = SMALL.model_copy(update={"path": str(source)})
    policy = build_policy(config, 0)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), first.parameters(), strict=True))
    write_identity(policy, config, target)
    assert AutoTokenizer.from_pretrained(target)("1").input_ids == [1, 4]
    assert AutoConfig.from_pretrained(target).hidden_size == 16


def test_a_tokenizer_from_another_directory(tmp_path: Path) -> None:
    source, words, target = tmp_path / "source", tmp_path / "words", tmp_path / "target"
    policy = build_policy(SMALL, 5)
    write_identity(policy, SMALL, source)
    (source / "generation_config.json").write_text("{}")
    words.mkdir()
    write_tokenizer(SMALL.model_copy(update={"alphabet": "ba"}), words)
    config = SMALL.model_copy(update={"path": str(source), "tokenizer": str(words)})
    write_identity(policy, config, target)
    assert (target / "tokenizer.json").read_bytes() == (words / "tokenizer.json").read_bytes()
    assert (target / "generation_config.json").is_file()
    with pytest.raises(ValueError, match="tokenizer is only allowed with model"):
        ModelConfig(tokenizer=str(words))


@pytest.mark.usefixtures("open_umask")
def test_what_is_written_is_for_its_user_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    policy = build_policy(SMALL, 5)
    write_identity(policy, SMALL, source)
    (source / "generation_config.json").write_text("{}")
    write_identity(policy, SMALL.model_copy(update={"path": str(source)}), target)
    (source / "generation_config.json").unlink()
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.*")}
    assert len(modes) == 7
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_directory_without_a_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path"):
        build_policy(SMALL.model_copy(update={"path": str(tmp_path)}), 0)


def test_bfloat16_weights_keep_their_rotations_in_float32() -> None:
    policy = build_policy(ModelConfig(dtype="bfloat16"), 0)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert policy.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_a_twin_has_the_same_tensors_in_modules_of_its_own(tied: bool) -> None:
    policy = build_policy(SMALL.model_copy(update={"tie_embeddings": tied}), 0)
    other = twin(policy)
    for (name, one), (same, two) in zip(policy.named_parameters(), other.named_parameters(), strict=True):
        assert name == same
        assert one is two
    assert not {id(module) for module in policy.modules()} & {id(module) for module in other.modules()}
    assert (other.get_input_embeddings().weight is other.get_output_embeddings().weight) is tied  # type: ignore[operator]
