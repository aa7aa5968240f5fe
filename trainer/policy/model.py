"""The policy: a causal language model, built from `[model]` or loaded from a local directory.

Nothing is downloaded: directories are read with `local_files_only`. The trainer leaves the configuration and the
tokenizer in `model/` of the run directory, so that others can build the same policy. The weights are shared separately
(`trainer.weights`).
"""

import copy
import logging
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from rolloutmq.bus.files import PRIVATE_DIRECTORY, copy_private
from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.trainer.policy.tokenizer import (
    BEGIN,
    END,
    PAD,
    SPECIAL,
    copy_tokenizer,
    replace,
    write_tokenizer,
)
from rolloutmq.trainer.weights.model.binding import derived, place_derived

logger = logging.getLogger(__name__)

ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}
_GENERATION: Final = "generation_config.json"

Policy = torch.nn.Module
"""A transformers causal language model: `policy(input_ids=(B, T)).logits` is `(B, T, V)`."""


def build_policy(config: ModelConfig, seed: int) -> Policy:
    """Build the policy in the dtype of the shared weights, on the CPU, without dropout.

    The same configuration and seed give the same weights, bit for bit.

    Raises:
        ConfigError: `model.path` holds no model for transformers.
    """
    torch.manual_seed(seed)
    policy = _loaded(config) if config.path else _built(config)
    # Dropout would make the ratio to the sampling policy random, so it stays off.
    return policy.eval()


def _built(config: ModelConfig) -> Policy:
    # Built in its dtype, not converted: `to` would also round the RoPE table, which stays in float32.
    policy: Policy = AutoModelForCausalLM.from_config(_llama(config), dtype=_dtype(config))
    return policy


def _dtype(config: ModelConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _llama(config: ModelConfig) -> Any:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters=ROPE,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(BEGIN),
        eos_token_id=SPECIAL.index(END),
        architectures=["LlamaForCausalLM"],
        dtype=config.dtype,
    )


def _loaded(config: ModelConfig) -> Policy:
    path = Path(config.path)
    if not (path / "config.json").is_file():
        raise ConfigError("model.path", f"{path} is not a directory with a config.json")
    disable_progress_bar()  # it would start a thread and write into the log
    try:
        policy: Policy = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=_dtype(config)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model.path", f"{path}: {error}".splitlines()[0]) from error
    return policy


def twin(policy: Policy) -> Policy:
    """Return a second policy with the same tensors, whose modules may be rebuilt without changing the first."""
    tensors = {id(tensor): tensor for tensor in (*policy.parameters(), *policy.buffers())}
    return copy.deepcopy(policy, tensors)


def skeleton(config: Any, dtype: torch.dtype) -> Policy:
    """Return a policy of a transformers configuration whose parameters are on meta, and take no memory.

    It describes the weights of a trainer whose own modules are sharded or wrapped; see `weights.share.Source`.
    """
    with torch.device("meta"):
        policy: Policy = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    place_derived(derived(policy))
    return policy.eval()


def policy_vocabulary(policy: Policy) -> int:
    """Return the size of the policy's vocabulary."""
    return int(policy.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]


def policy_positions(policy: Policy) -> int:
    """Return the longest sequence of the policy, in tokens."""
    return int(policy.config.get_text_config().max_position_embeddings)  # type: ignore[union-attr,operator]


def write_identity(policy: Policy, config: ModelConfig, directory: Path) -> None:
    """Write the configuration and the tokenizer of the policy to `directory`.

    The configuration is written last, so a directory that has one is complete.
    """
    directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    if config.path:
        copy_tokenizer(Path(config.tokenizer or config.path), directory)
        if (generation := Path(config.path) / _GENERATION).is_file():
            copy_private(generation, directory / _GENERATION)
    else:
        write_tokenizer(config, directory)
    replace(directory / "config.json", policy.config.to_json_string(use_diff=False))  # type: ignore[union-attr,operator]
