"""Tiny models of several families, with random weights, built or on meta."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

TOKENS = torch.tensor([[1, 5, 9, 3, 13], [1, 4, 4, 8, 13]])
SIZES: dict[str, Any] = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


def config(family: str, **changes: Any) -> Any:
    """A configuration of a family; Qwen2 and Gemma3 are tied, as their small models are."""
    tie = {"tie_word_embeddings": family in {"qwen2", "gemma3"}}
    return FAMILIES[family](**(SIZES | tie | changes))


def built(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model with values of its own for every tensor, biases and norms too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def on_meta(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found
