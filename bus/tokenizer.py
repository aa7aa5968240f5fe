"""What a tokenizer is, told in one line: two with the same fingerprint mean the same by every token id.

It is read from `tokenizer.json` alone, so that who asks needs neither torch nor a tokenizer library. What only changes
how text is cut (merges, scores of pieces) has no part in it, nor has a chat template: ids travel here, not texts.

How many ids a model knows is another thing: its embedding may have more rows than its tokenizer has tokens.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.teaching import Lore

FILE: Final = "tokenizer.json"
MODEL_FILE: Final = "config.json"


def student_directory(run: RunConfig, layout: RunLayout) -> Path:
    """Return where the tokenizer of a run's policy is: its trainer writes it, or a trainer of one's own names it."""
    return layout.model if run.trainer.enabled else Path(run.model.tokenizer or run.model.path)


def student_model(run: RunConfig, layout: RunLayout) -> Path:
    """Return where the policy of a run says what it is: its trainer writes it, or a trainer of one's own names it."""
    return layout.model if run.trainer.enabled else Path(run.model.path)


def student_files(run: RunConfig, layout: RunLayout) -> tuple[Path, ...]:
    """Return the files that must be there before it is known what a run's policy is; a trainer writes them."""
    files = (student_directory(run, layout) / FILE,)
    # Only who compares whole vocabularies must know how large the student's is, and a trainer of one's own may not say.
    whole = run.trainer.enabled and run.trainer.distillation.lore is Lore.FULL
    return (*files, layout.model / MODEL_FILE) if whole else files


def vocabulary(directory: Path) -> int:
    """Return how many token ids the model in a directory knows; 0 if its `config.json` is not there or does not say.

    Raises:
        ConfigError: It is no JSON object.
    """
    path = directory / MODEL_FILE
    try:
        told = json.loads(path.read_bytes())
        size = {**told, **(told.get("text_config") or {})}.get("vocab_size", 0)
    except FileNotFoundError:
        return 0
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), f"describes no model: {error!r}") from None
    return size if isinstance(size, int) and size > 0 else 0


def fingerprint(directory: Path) -> str:
    """Return the fingerprint of the tokenizer in a directory, 64 hexadecimal digits.

    Raises:
        ConfigError: There is no `tokenizer.json`, or it is none.
    """
    path = directory / FILE
    try:
        return fingerprint_of(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise ConfigError(str(path), "there is no such file; a fast tokenizer has one") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(str(path), f"is no tokenizer: {error!r}") from None


def fingerprint_of(tokenizer: Any) -> str:
    """Return the fingerprint of what a `tokenizer.json` holds: vocabulary, special ids, normaliser, pre-tokenizer."""
    added = tokenizer.get("added_tokens") or []
    known = dict(_vocabulary(tokenizer["model"]))
    known.update({token["content"]: token["id"] for token in added})
    told = {
        "vocabulary": sorted(known.items()),
        "special": sorted(token["id"] for token in added if token.get("special")),
        "normalizer": tokenizer.get("normalizer"),
        "pre_tokenizer": tokenizer.get("pre_tokenizer"),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _vocabulary(model: Any) -> dict[str, int]:
    """Return the ids of a model's tokens; a Unigram model lists them in the order of their ids, with scores."""
    known = model["vocab"]
    if isinstance(known, list):
        return {piece: number for number, (piece, _score) in enumerate(known)}
    return dict(known.items())
