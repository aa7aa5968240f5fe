"""What a tokenizer is, told in one line: two with the same fingerprint mean the same by every token id.

It is read from `tokenizer.json` alone, so that who asks needs neither torch nor a tokenizer library. What only changes
how text is cut (merges, scores of pieces) has no part in it, nor has a chat template: ids travel here, not texts.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout

FILE: Final = "tokenizer.json"


def student_directory(run: RunConfig, layout: RunLayout) -> Path:
    """Return where the tokenizer of a run's policy is: its trainer writes it, or a trainer of one's own names it."""
    return layout.model if run.trainer.enabled else Path(run.model.tokenizer or run.model.path)


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
