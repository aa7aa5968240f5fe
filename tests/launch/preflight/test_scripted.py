"""The script answers with the characters and the token ids of a built model."""

import asyncio
from typing import Any

import pytest

from rolloutmq.launch.preflight.scripted import CharacterPolicy, is_built, scripted_policy
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.errors import PolicyRefusedError, UsageError
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.trajectory import Trajectory


def asked(prompt: Any, **sampling: Any) -> list[Completion]:
    return asyncio.run(CharacterPolicy("01=").complete(prompt, **sampling))


def test_token_ids_are_those_of_the_built_model() -> None:
    found = asked("<bos>1=", n=20, max_tokens=8)
    assert {tuple(one.prompt_token_ids) for one in found} == {(1, 1, 4, 5)}
    for one in found:
        assert one.text == "".join(token for token in one.tokens if token != "<eos>")
        assert set(one.token_ids) <= {2, 3, 4, 5}
        assert (one.token_ids[-1] == 2) == (one.finish_reason == "stop")
        assert len(one.tokens) == len(one.logprobs) == len(one.token_ids)
    assert {one.finish_reason for one in found} == {"stop", "length"}


def test_turns_go_on_by_token_ids_and_messages_are_joined() -> None:
    first = Trajectory.of(asked("1=", max_tokens=2)[0])
    assert list(first.then(asked([*first.token_ids, 3])[0]).mask[:3]) == [False] * 3
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "1"}]},
        {"role": "user", "content": "0="},
    ]
    (found,) = asyncio.run(CharacterPolicy("01=").chat(messages))
    assert found.prompt_token_ids == [1, 4, 3, 5]


async def test_turns_go_on_behind_the_tokens_of_those_before() -> None:
    policy = CharacterPolicy("01=")
    first = Trajectory.of((await policy.complete("1=", max_tokens=2))[0])
    (text,) = await policy.complete("0=", after=first)
    assert text.prompt_token_ids == [*first.token_ids, 3, 5]
    (message,) = await policy.chat([{"role": "tool", "content": "0="}], after=first)
    assert message.prompt_token_ids == text.prompt_token_ids
    assert await policy.detokenize([1, 3, 2]) == "<bos>0<eos>"
    assert await policy.tokenize("1<eos>") == [4, 2]


def test_what_the_model_cannot_read_is_refused() -> None:
    with pytest.raises(PolicyRefusedError, match=r"not in the vocabulary \('\+'\)"):
        asked("1+1")
    with pytest.raises(PolicyRefusedError, match="token ids must be from 0 to 5"):
        asked([6])


def test_a_text_is_no_conversation() -> None:
    text: Any = "0"
    with pytest.raises(UsageError, match=r"^messages: must be a list of messages \(got '0'\)"):
        asyncio.run(CharacterPolicy("01=").chat(text))


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": [{"type": "image_url"}]}])
def test_a_message_is_refused_as_the_tiny_server_does(message: dict[str, Any]) -> None:
    said = [{"role": "user", **message}]
    with pytest.raises(PolicyRefusedError, match="content must be a string, or a list of parts of type text"):
        asyncio.run(CharacterPolicy("01=").chat(said))


def test_another_model_answers_texts() -> None:
    external = validate({"inference": {"kind": "external", "url": "http://127.0.0.1:9/v1"}})
    assert not is_built(external)
    assert asyncio.run(scripted_policy(external).complete("?"))[0].text == "42"
    assert is_built(validate({}))
