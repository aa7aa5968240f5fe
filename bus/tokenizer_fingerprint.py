"""The fingerprint of a tokenizer: tokenizers with the same fingerprint mean the same token by every id.

It is computed from `tokenizer.json` alone, without torch or a tokenizer library. Merges, scores of pieces and the chat
template do not count: they affect only text, and groups contain ids.

The vocabulary size of a model is a separate number: its embedding may have more rows than the tokenizer has tokens.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.files import read_regular
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.distillation import TeacherLogprobs

FILE: Final = "tokenizer.json"
MODEL_FILE: Final = "config.json"


def student_directory(run: RunConfig, layout: RunLayout) -> Path:
    """Return the directory of the policy's tokenizer: the trainer writes it, or `[model]` names it."""
    return layout.model if run.trainer.enabled else Path(run.model.tokenizer or run.model.path)


def student_model(run: RunConfig, layout: RunLayout) -> Path:
    """Return the directory of the policy's `config.json`: the trainer writes it, or `[model]` names it."""
    return layout.model if run.trainer.enabled else Path(run.model.path)


def student_files(run: RunConfig, layout: RunLayout) -> tuple[Path, ...]:
    """Return the files of a run's policy description; its trainer may write them only after its start."""
    files = (student_directory(run, layout) / FILE,)
    # Only `full` needs the size of the student's vocabulary, and your own trainer may not provide it.
    whole = run.trainer.enabled and run.trainer.distillation.teacher_logprobs is TeacherLogprobs.FULL
    return (*files, layout.model / MODEL_FILE) if whole else files


def vocabulary(directory: Path) -> int:
    """Return the vocabulary size of the model in a directory; 0 if `config.json` is missing or has none.

    Raises:
        ConfigError: `config.json` cannot be read, or is not a JSON object.
    """
    path = directory / MODEL_FILE
    try:
        model = json.loads(read_regular(path))
        size = {**model, **(model.get("text_config") or {})}.get("vocab_size", 0)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(str(path), f"is not a model configuration: {error!r}") from None
    return size if isinstance(size, int) and size > 0 else 0


def fingerprint(directory: Path) -> str:
    """Return the fingerprint of the tokenizer in a directory, 64 hexadecimal digits.

    Raises:
        ConfigError: `tokenizer.json` is missing, cannot be read, or is malformed.
    """
    path = directory / FILE
    try:
        return fingerprint_of(json.loads(read_regular(path)))
    except FileNotFoundError:
        raise ConfigError(str(path), "there is no such file; save a fast tokenizer there") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(str(path), f"is not a tokenizer: {error!r}") from None


def fingerprint_of(tokenizer: Any) -> str:
    """Return the fingerprint of a parsed `tokenizer.json`: vocabulary, special ids, normaliser and pre-tokenizer."""
    added = tokenizer.get("added_tokens") or []
    known = dict(_vocabulary(tokenizer["model"]))
    known.update({token["content"]: token["id"] for token in added})
    relevant = {
        "vocabulary": sorted(known.items()),
        "special": sorted(token["id"] for token in added if token.get("special")),
        "normalizer": tokenizer.get("normalizer"),
        "pre_tokenizer": tokenizer.get("pre_tokenizer"),
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _vocabulary(model: Any) -> dict[str, int]:
    """Return the id of each token; a Unigram model lists its tokens with scores in the order of the ids."""
    known = model["vocab"]
    if isinstance(known, list):
        return {piece: number for number, (piece, _score) in enumerate(known)}
    return dict(known.items())
