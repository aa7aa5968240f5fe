"""Tokenizers with other ids have other fingerprints, and a server with another one is refused."""

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.weights.conftest import Shares
from tests.trainer.weights.models import built, config, on_meta
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.trainer.policy.tokenizer import character_tokenizer, write_tokenizer
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint, fingerprint


def changed(**parts: Any) -> Any:
    tokenizer = character_tokenizer("abc")
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def test_the_same_tokenizer_has_the_same_fingerprint_wherever_it_comes_from(tmp_path: Path) -> None:
    write_tokenizer(ModelConfig(alphabet="abc"), tmp_path)
    once = fingerprint(character_tokenizer("abc"))
    assert directory_fingerprint(tmp_path) == once
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    assert fingerprint(loaded) == once
    loaded.save_pretrained(tmp_path / "again")
    assert directory_fingerprint(tmp_path / "again") == once
    assert directory_fingerprint(tmp_path / "nothing") == ""


def test_whatever_changes_the_ids_changes_the_fingerprint() -> None:
    special = character_tokenizer("abc")
    special.add_special_tokens(["<extra>"])
    plain = character_tokenizer("abc")
    plain.add_tokens(["<extra>"])
    found = [
        fingerprint(tokenizer)
        for tokenizer in (
            character_tokenizer("abc"),
            character_tokenizer("acb"),
            character_tokenizer("abcd"),
            special,
            plain,
            changed(normalizer=normalizers.Lowercase()),
            changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        )
    ]
    assert len(set(found)) == len(found)


def test_what_is_no_fast_tokenizer_is_refused() -> None:
    with pytest.raises(WeightsMismatchError, match=r"a dict has no tokenizer\.json"):
        fingerprint({})


@pytest.mark.parametrize(
    ("shared", "read"), [("abc", "acb"), ("abc", ""), ("", "abc")], ids=["another", "none here", "none there"]
)
def test_a_reader_with_another_tokenizer_or_none_is_refused(shares: Shares, shared: str, read: str) -> None:
    there, here = (fingerprint(character_tokenizer(one)) if one else "" for one in (shared, read))
    shares.create(built(config("llama")), tokenizer=there)
    model = on_meta(config("llama"))
    said = f"tokenizer: {there[:12] or 'none'} in the segment, {here[:12] or 'none'} here"
    with pytest.raises(WeightsMismatchError, match=said):
        shares.attach(model, tokenizer=here)
    assert all(one.is_meta for one in model.parameters())
    shares.attach(model, tokenizer=there)
    assert not any(one.is_meta for one in model.parameters())


def test_models_without_a_tokenizer_share_their_weights(shares: Shares) -> None:
    shares.create(built(config("llama")))
    shares.attach(on_meta(config("llama")))
