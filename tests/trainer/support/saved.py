"""Models in directories, as in a checkpoint."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.trainer.policy.model import build_policy, write_identity


def save_model(directory: Path, seed: int, **config: Any) -> Path:
    """Write a model of random weights with its tokenizer."""
    described = ModelConfig.model_validate(config)
    policy = build_policy(described, seed)
    write_identity(policy, described, directory)
    save_file(policy.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
