import json
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.tokenizer_fingerprint import fingerprint, fingerprint_of, vocabulary
from rolloutmq.schemas.errors import ConfigError


def tokenizer(**changed: Any) -> dict[str, Any]:
    return {
        "added_tokens": [{"id": 0, "content": "<pad>", "special": True}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": None,
        "model": {"type": "BPE", "vocab": {"<pad>": 0, "a": 1, "b": 2}, "merges": []},
        **changed,
    }


def model(**changed: Any) -> dict[str, Any]:
    return {"model": {**tokenizer()["model"], **changed}}


def test_the_order_of_what_is_written_means_nothing() -> None:
    other = tokenizer(**model(vocab={"b": 2, "a": 1, "<pad>": 0}))
    assert fingerprint_of(dict(reversed(other.items()))) == fingerprint_of(tokenizer())


@pytest.mark.parametrize(
    "changed",
    [
        model(vocab={"<pad>": 0, "a": 2, "b": 1}),
        model(vocab={"<pad>": 0, "a": 1}),
        {"added_tokens": [{"id": 0, "content": "<pad>", "special": False}]},
        {"added_tokens": [{"id": 0, "content": "<pad>", "special": True}, {"id": 3, "content": "<think>"}]},
        {"normalizer": {"type": "NFD"}},
        {"pre_tokenizer": {"type": "ByteLevel"}},
    ],
)
def test_what_an_id_means_is_in_it(changed: dict[str, Any]) -> None:
    assert fingerprint_of(tokenizer(**changed)) != fingerprint_of(tokenizer())


def test_a_vocabulary_may_be_a_list_of_pieces_with_scores() -> None:
    pieces = tokenizer(**model(vocab=[["<pad>", 0.0], ["a", -1.5], ["b", -2.0]]))
    scored = tokenizer(**model(vocab=[["<pad>", 0.0], ["a", -9.5], ["b", -2.0]]))
    assert fingerprint_of(pieces) == fingerprint_of(scored) == fingerprint_of(tokenizer())


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer()))
    assert fingerprint(tmp_path) == fingerprint_of(tokenizer())


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ({"vocab_size": 32}, 32),
        ({"vocab_size": 7, "text_config": {"vocab_size": 64}}, 64),
        ({"text_config": {"hidden_size": 8}, "vocab_size": 9}, 9),
        ({"hidden_size": 8}, 0),
        ({"vocab_size": None}, 0),
    ],
)
def test_how_many_ids_a_model_knows_is_in_its_configuration(
    tmp_path: Path, model: dict[str, Any], size: int
) -> None:
    assert vocabulary(tmp_path) == 0
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert vocabulary(tmp_path) == size


@pytest.mark.parametrize("text", ["{", "[1]", '{"text_config": 3}'])
def test_what_describes_no_model_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: is not a model configuration"):
        vocabulary(tmp_path)
