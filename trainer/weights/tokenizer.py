"""The fingerprint of the tokenizers that trainer and server hold in memory; see `bus.tokenizer` for what is in it."""

import json
from pathlib import Path
from typing import Any

from rolloutmq.bus.tokenizer import FILE, fingerprint_of
from rolloutmq.bus.tokenizer import fingerprint as in_directory
from rolloutmq.schemas.sharing import WeightsMismatchError


def directory_fingerprint(directory: Path) -> str:
    """Return the fingerprint of the tokenizer in a model's directory, or an empty text where there is none."""
    return in_directory(directory) if (directory / FILE).is_file() else ""


def fingerprint(tokenizer: Any) -> str:
    """Return the fingerprint of a `tokenizers.Tokenizer`, or of a tokenizer of transformers that is built on one.

    Raises:
        WeightsMismatchError: It is built on something else and cannot be compared.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "get_vocab") or not hasattr(backend, "to_str"):
        raise WeightsMismatchError("tokenizer", f"a {type(tokenizer).__name__} has no {FILE} to compare")
    return fingerprint_of(json.loads(backend.to_str()))


def require_same_tokenizer(shared: str, mine: str) -> None:
    """Prove that both sides read the same tokens, or that neither reads any.

    A side without a tokenizer is as good as one with another: nothing says what it means by a token id.

    Raises:
        WeightsMismatchError: They do not; names the fingerprint of each, or that it has none.
    """
    if shared != mine:
        theirs, own = (told[:12] or "none" for told in (shared, mine))
        raise WeightsMismatchError("tokenizer", f"{theirs} in the segment, {own} here")
