"""Text, conversations and token ids into each other, as vLLM does."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.services.inference.openai import tokenize
from rolloutmq.services.inference.openai.requests import ApiError, Limits
from rolloutmq.services.inference.tokenizer import TextTokenizer
from rolloutmq.trainer.policy.tokenizer import write_tokenizer

LIMITS = Limits("policy", 128, 8, 4)
MESSAGES = [{"role": "user", "content": "01"}, {"role": "tool", "content": [{"type": "text", "text": "="}]}]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}1{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def codec(tmp_path: Path) -> TextTokenizer:
    """A tokenizer of the characters 0, 1 and =, with ids 3 to 5."""
    write_tokenizer(ModelConfig(alphabet="01="), tmp_path)
    return TextTokenizer(tmp_path)


def with_template(codec: TextTokenizer, template: str | None) -> TextTokenizer:
    path = codec.directory / "tokenizer_config.json"
    about = {**json.loads(path.read_text()), "chat_template": template}
    path.write_text(json.dumps({key: value for key, value in about.items() if value is not None}))
    return TextTokenizer(codec.directory)


def tokens(codec: TextTokenizer, **asked: Any) -> list[int]:
    answer = msgspec.json.decode(tokenize.tokenize_response(msgspec.json.encode(asked), codec, LIMITS))
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
    found: list[int] = answer["tokens"]
    return found


def test_a_text_has_special_tokens_unless_they_are_refused(codec: TextTokenizer) -> None:
    assert tokens(codec, prompt="01=", model="policy") == [1, 3, 4, 5]
    assert tokens(codec, prompt="01=", add_special_tokens=False) == [3, 4, 5]
    assert tokens(codec, prompt="", add_special_tokens=False) == []
    assert tokens(codec, prompt="1<eos>", add_special_tokens=False) == [4, 2]


def test_only_characters_that_somebody_wrote_are_unknown(codec: TextTokenizer) -> None:
    with pytest.raises(
        ApiError, match=r"prompt '<bos>0\+1<b=': not in the vocabulary \('\+', '<', 'b'\); add"
    ):
        tokens(with_template(codec, TEMPLATE), messages=[{"role": "user", "content": "0+1<b"}])


def test_texts_of_the_tokens_come_on_request(codec: TextTokenizer) -> None:
    for asked, strings in ((True, ["<bos>", "0"]), (False, None)):
        body = msgspec.json.encode({"prompt": "0", "return_token_strs": asked})
        assert msgspec.json.decode(tokenize.tokenize_response(body, codec, LIMITS))["token_strs"] == strings


def test_messages_are_rendered_by_the_template(codec: TextTokenizer) -> None:
    assert tokens(codec, messages=MESSAGES) == [1, 3, 4, 5]
    codec = with_template(codec, TEMPLATE)
    assert tokens(codec, messages=MESSAGES) == [1, 3, 4, 5, 5]
    assert tokens(codec, messages=MESSAGES, add_generation_prompt=False) == [1, 3, 4, 5]
    assert tokens(codec, messages=MESSAGES, tools=[{"type": "function"}]) == [1, 4, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({}, "one of them must be given"),
        ({"prompt": "0", "messages": MESSAGES}, "one of them must be given"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens: must be false"),
        (
            {"prompt": "02"},
            r"prompt '02': not in the vocabulary \('2'\); add the characters of the prompt to model.alphabet",
        ),
        ({"prompt": "0", "truncate": 3}, "truncate"),
        ({"prompt": 3}, "invalid request"),
        ({"prompt": "0", "model": "other"}, "`other` does not exist"),
        ({"messages": [{"role": "user"}]}, "content must be a string"),
    ],
)
def test_a_bad_request_is_refused_by_its_field(
    codec: TextTokenizer, asked: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ApiError, match=problem):
        tokens(codec, **asked)


def test_a_tokenizer_without_a_template_says_so(codec: TextTokenizer) -> None:
    with pytest.raises(
        ApiError, match="no chat template to render them by; add `chat_template` to"
    ) as caught:
        tokens(with_template(codec, None), messages=MESSAGES)
    assert caught.value.status == 400


def test_a_template_that_fails_says_why(codec: TextTokenizer) -> None:
    codec = with_template(codec, "{{ raise_exception('no tools here') }}")
    with pytest.raises(ApiError, match="the chat template failed: no tools here"):
        tokens(codec, messages=MESSAGES)


def text(codec: TextTokenizer, ids: Any) -> str:
    body = msgspec.json.encode({"tokens": ids})
    found: str = msgspec.json.decode(tokenize.detokenize_response(body, codec, LIMITS))["prompt"]
    return found


def test_tokens_become_text_with_special_tokens(codec: TextTokenizer) -> None:
    assert text(codec, [1, 3, 4, 2]) == "<bos>01<eos>"
    assert text(codec, []) == ""
    for ids in ([8], [-1], ["a"]):
        with pytest.raises(ApiError):
            text(codec, ids)
