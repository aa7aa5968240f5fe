"""Files of a model in a directory: its description, its tokenizer, and its weights in whole.

A trainer of the run loads the weights, and it alone; every process reads the description. Only the contents of the
small files are read, and no weights.
"""

import json
from pathlib import Path
from typing import Final

from rolloutmq.bus.tokenizer_fingerprint import FILE, MODEL_FILE, fingerprint, vocabulary
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights of a directory that transformers also reads. None is fetched from a hub."""


def check_model(config: RunConfig, *, weights: bool) -> None:
    """Check the directory that `model.path` names.

    Args:
        config: The configuration; a model of a hub is a directory by now.
        weights: Whether the directory must have the weights, too: those of a hub are fetched later.

    Raises:
        ConfigError: It is no directory with a model: `config.json`, a tokenizer or, if the run has a trainer, the
            weights are missing or damaged.
    """
    model = config.model
    directory = Path(model.path)
    if not (directory / MODEL_FILE).is_file():
        raise ConfigError(
            "model.path",
            f"must be a directory with a {MODEL_FILE}, or a model of a hub as organization/name (got {model.path}); "
            "correct it; model.revision names a branch, a tag or a commit of a hub",
        )
    try:
        vocabulary(directory)
    except ConfigError as error:
        raise ConfigError("model.path", f"{error}; save the model there again") from None
    _check_tokenizer(config)
    if not (weights and config.trainer.enabled) or any((directory / name).is_file() for name in PICKLED):
        return
    if missing := missing_weights("model.path", directory, model.path):
        raise ConfigError(
            "model.path", f"{model.path} has no {missing}; save the weights there, or name another model"
        )


def _check_tokenizer(config: RunConfig) -> None:
    """Require a tokenizer that the processes of the run can read; a server of another kind may need other files."""
    key = "model.tokenizer" if config.model.tokenizer else "model.path"
    directory = Path(config.model.tokenizer or config.model.path)
    if not directory.is_dir():
        raise ConfigError(key, f"must be a directory with a {FILE} (got {directory}); correct it")
    if config.inference.kind != "tiny" and not (directory / FILE).exists():
        return
    try:
        fingerprint(directory)
    except ConfigError as error:
        raise ConfigError(key, str(error)) from None


def missing_weights(key: str, directory: Path, name: str) -> str:
    """Return the first file that the weights of a model lack in the format safetensors; empty if they are whole.

    Args:
        key: Key of the model, for errors.
        directory: Its directory.
        name: Its name, for errors.

    Raises:
        ConfigError: The index of the files is damaged.
    """
    needed = {SINGLE}
    if (index := directory / INDEX).is_file():
        try:
            needed = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(key, f"{name}: {INDEX} is damaged: {error!r}") from None
    return next((one for one in sorted(needed) if not (directory / one).is_file()), "")
