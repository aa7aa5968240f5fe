"""Files of a model in a directory: its description, its tokenizer, and its weights in whole.

A trainer of the run loads the weights, and it alone; every process reads the description. Only the contents of the
small files are read, and no weights.
"""

import json
import os
from pathlib import Path
from typing import Final

from rolloutmq.bus.tokenizer_fingerprint import FILE, MODEL_FILE, fingerprint, vocabulary
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.printable import error_text

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
    if not (weights and config.trainer.enabled) or _is_pickled(directory):
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


def _is_pickled(directory: Path) -> bool:
    """Return whether transformers reads weights in PyTorch's format: it does if there is no other format."""
    return not any((directory / name).is_file() for name in (SINGLE, INDEX)) and any(
        (directory / name).is_file() for name in PICKLED
    )


def missing_weights(key: str, directory: Path, name: str) -> str:
    """Return the first file that the weights of a model lack in the format safetensors; empty if they are whole.

    As for transformers, a file with all weights is enough, whatever an index beside it names.

    Args:
        key: Key of the model, for errors.
        directory: Its directory.
        name: Its name, for errors.

    Raises:
        ConfigError: The index of the files is damaged.
    """
    if (directory / SINGLE).is_file():
        return ""
    if not (directory / INDEX).is_file():
        return SINGLE
    try:
        needed = _indexed(directory / INDEX)
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(
            key, f"{name}: {INDEX} is damaged: {error_text(error)}; save the weights there again"
        ) from None
    return next((one for one in sorted(needed) if not os.path.isfile(directory / one)), "")  # noqa: PTH113 - never raises


def _indexed(index: Path) -> set[str]:
    """Return the files that an index of weights names.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no index.
        RecursionError: It is nested too deep.
    """
    content = json.loads(index.read_bytes())
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError("weight_map must name the file of each weight")
    for weight, file in files.items():
        if not isinstance(file, str) or not file:
            raise ValueError(f"weight_map.{weight} must be the name of a file (got {file!r:.80})")
    return set(files.values())
