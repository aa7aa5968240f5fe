"""Requests and responses of OpenAI's interface, and the endpoint for clients of others."""

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.services.worker.openai.test_client import among, at, until

from rolloutmq.schemas.errors import PolicyRefusedError, PolicyUnavailableError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.openai import wire
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import Policy

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer


async def asked(endpoint: Endpoint) -> bytes:
    """Ask as a client of OpenAI does, which sends what is beyond OpenAI's own with the rest."""
    request = dict(endpoint.request)
    body = {"messages": [], "n": 1, **request.pop("extra_body"), **request}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{endpoint.base_url}/chat/completions", json=body) as response,
    ):
        return await response.read()


@pytest.mark.parametrize("written", ["", "/", "/v1", "/v1/"])
async def test_another_client_gets_what_training_needs(server: "FakeServer", written: str) -> None:
    async with OpenAIPolicy.opened(at(lambda: server.url + written)) as opened:
        policy: Policy = opened
        async with policy.endpoint() as endpoint:
            assert (endpoint.base_url, endpoint.model) == (f"{server.url}/v1", "tiny")
            answer = await asked(endpoint)
            (completion,) = endpoint.completions(answer)
            assert completion.temperature == 1
            assert endpoint.completions(answer, 0.5)[0].temperature == 0.5
    assert (completion.prompt_token_ids, completion.token_ids) == ([1, 2, 3], [4, 5])
    assert completion.logprobs == [-0.25, -0.25]
    assert server.asked[0].items() >= {"model": "tiny", "logprobs": True, "return_token_ids": True}.items()


async def test_answers_without_stamps_may_be_of_any_version_since_the_beginning(server: "FakeServer") -> None:
    server.step = None
    known = [PolicyVersion(0, 3)]
    async with OpenAIPolicy.opened(at(lambda: server.url), known=lambda: known[0]) as policy:
        async with policy.endpoint() as endpoint:
            known[0] = PolicyVersion(0, 5)
            (first,) = endpoint.completions(await asked(endpoint))
            known[0] = PolicyVersion(0, 6)
            (second,) = endpoint.completions(await asked(endpoint))
        async with policy.endpoint() as endpoint:
            (third,) = endpoint.completions(await asked(endpoint))
    spans = [(one.oldest.step, one.newest.step) for one in (first, second, third)]
    assert spans == [(3, 5), (3, 6), (6, 6)]


async def test_the_stamps_of_a_server_count(server: "FakeServer") -> None:
    server.step = 17
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy, policy.endpoint() as endpoint:
        (completion,) = endpoint.completions(await asked(endpoint))
    assert completion.oldest == completion.newest == PolicyVersion(0, 17)


async def test_a_server_that_is_away_is_waited_for(server: "FakeServer", other_server: "FakeServer") -> None:
    await server.stop()
    place = [server.url]
    async with OpenAIPolicy.opened(at(lambda: place[0])) as policy:
        opening = asyncio.create_task(base_url(policy))
        await until(lambda: policy.retries >= 2)
        place[0] = other_server.url
        assert await opening == f"{other_server.url}/v1"


async def test_a_server_that_stays_away_is_given_up(server: "FakeServer") -> None:
    await server.stop()
    async with OpenAIPolicy.opened(at(lambda: server.url), patience_s=0.2) as policy:
        with pytest.raises(PolicyUnavailableError):
            await base_url(policy)


async def test_a_dead_engine_gets_no_conversation(server: "FakeServer", other_server: "FakeServer") -> None:
    async with OpenAIPolicy.opened(among(server, other_server)) as policy:
        for _ in range(8):  # both have answered by now
            await policy.complete("q")
        await server.stop()
        assert {await base_url(policy) for _ in range(8)} == {f"{other_server.url}/v1"}


async def test_conversations_are_spread_over_the_engines(
    server: "FakeServer", other_server: "FakeServer"
) -> None:
    async with OpenAIPolicy.opened(among(server, other_server)) as policy:
        async with policy.endpoint() as first, policy.endpoint() as second:
            assert {first.base_url, second.base_url} == {f"{server.url}/v1", f"{other_server.url}/v1"}
            await asyncio.gather(*(policy.complete("q") for _ in range(4)))
        assert len(server.asked) == len(other_server.asked) == 2


def test_what_a_client_decoded_is_taken_as_it_is() -> None:
    choice: dict[str, Any] = {
        "token_ids": [4, 5],
        "finish_reason": "tool_calls",
        "message": {"content": None},
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
    }
    answer = {"prompt_token_ids": [1], "choices": [choice]}
    objects = json.loads(json.dumps(answer), object_hook=lambda found: SimpleNamespace(**found))
    endpoint = Endpoint("http://127.0.0.1:9/v1", "tiny")
    (completion,) = endpoint.completions(answer)
    assert (completion.token_ids, completion.logprobs) == ([4, 5], [-0.5, -0.25])
    assert [completion] == endpoint.completions(objects) == endpoint.completions(json.dumps(answer).encode())


@pytest.mark.parametrize("answer", [{}, {"choices": [{}]}, None, "text", SimpleNamespace(choices=3), b"{"])
def test_an_answer_without_what_training_needs_is_refused(answer: object) -> None:
    with pytest.raises(PolicyRefusedError):
        Endpoint("http://127.0.0.1:9/v1", "tiny").completions(answer)


def test_an_answer_of_tokens_alone_is_taken_too() -> None:
    """As of `/inference/v1/generate`."""
    content = [{"token_id": 4, "logprob": -0.5}, {"token_id": 5, "logprob": -0.25}]
    choice = {"token_ids": [4, 5], "finish_reason": "stop", "logprobs": {"content": content}}
    choice["weight_versions"] = [{"start": 0, "end": 2, "version": {"incarnation": 1, "step": 7}}]
    (completion,) = Endpoint("http://127.0.0.1:9/v1", "tiny").completions(
        json.dumps({"request_id": "r", "prompt_token_ids": [1, 2], "choices": [choice]}).encode()
    )
    assert (completion.prompt_token_ids, completion.token_ids) == ([1, 2], [4, 5])
    assert completion.logprobs == [-0.5, -0.25]
    assert completion.oldest == completion.newest == PolicyVersion(1, 7)


async def test_the_directory_of_the_model_is_told(server: "FakeServer") -> None:
    server.root = "/run/model"
    async with OpenAIPolicy.opened(among(server)) as policy, policy.endpoint() as endpoint:
        assert endpoint.root == "/run/model"


async def base_url(policy: OpenAIPolicy) -> str:
    async with policy.endpoint() as endpoint:
        return endpoint.base_url


KNOWN = (PolicyVersion(0, 8), PolicyVersion(0, 9))


def text_answer(**changes: Any) -> bytes:
    choice = {
        "index": 0,
        "text": "37",
        "token_ids": [4, 5],
        "prompt_token_ids": [1, 2],
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["3", "7"], "top_logprobs": None},
    }
    return json.dumps({"id": "x", "object": "text_completion", "choices": [choice | changes]}).encode()


def span(start: int, end: int, version: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "version": version}


def one(body: bytes) -> Completion:
    (completion,) = wire.text_completions(body, KNOWN)
    return completion


def test_a_completion_is_read() -> None:
    version = {"incarnation": 2, "step": 17}
    completion = one(text_answer(weight_versions=[span(0, 2, version)]))
    stamp = PolicyVersion(2, 17)
    assert completion == Completion("37", [1, 2], [4, 5], [-0.5, -0.25], stamp, stamp, "stop", ["3", "7"])


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (None, KNOWN),
        ([], KNOWN),
        ([span(0, 1, {"step": 3}), span(1, 2, {"step": 4})], (PolicyVersion(0, 3), PolicyVersion(0, 4))),
        ([span(0, 2, 12)], (PolicyVersion(0, 12), PolicyVersion(0, 12))),
        ([span(0, 2, "12")], (PolicyVersion(0, 12), PolicyVersion(0, 12))),
        ([span(0, 2, "weights-of-monday")], KNOWN),
        (
            [span(0, 1, {"incarnation": 1, "step": 2}), span(1, 2, {"incarnation": 0, "step": 5})],
            (PolicyVersion(0, 5), PolicyVersion(1, 2)),
        ),
    ],
)
def test_versions_are_the_oldest_and_newest_told_or_else_known(
    versions: Any, expected: tuple[PolicyVersion, PolicyVersion]
) -> None:
    completion = one(text_answer(weight_versions=versions))
    assert (completion.oldest, completion.newest) == expected


@pytest.mark.parametrize(
    ("said", "asked", "found"), [(None, 0.5, 0.5), (None, 0.0, 1.0), (0.7, 1.0, 0.7), (1.0, 0.0, 1.0)]
)
def test_the_temperature_is_that_of_the_server_or_else_that_asked_for(
    said: float | None, asked: float, found: float
) -> None:
    (completion,) = wire.text_completions(text_answer(temperature=said), KNOWN, asked)
    assert completion.temperature == found


def test_what_came_from_a_nucleus_is_refused() -> None:
    assert one(text_answer(top_p=1.0)).temperature == 1.0
    with pytest.raises(PolicyRefusedError, match=r"top_p 0\.5: .* no trainer can compute"):
        one(text_answer(top_p=0.5))


def test_a_chat_answer_is_read() -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None},
        "token_ids": [7],
        "finish_reason": None,
        "logprobs": {"content": [{"token": "a", "logprob": -1.5, "bytes": None}]},
    }
    body = json.dumps({"choices": [choice], "prompt_token_ids": [1]}).encode()
    (completion,) = wire.chat_completions(body, KNOWN)
    assert completion == Completion("", [1], [7], [-1.5], *KNOWN, "", ["a"])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "malformed response from the inference server"),
        (b"<html>", "malformed response from the inference server"),
        (b"[]", "malformed response from the inference server"),
        (b'{"choices": [{"token_ids": ["a"]}]}', "malformed response from the inference server"),
        (text_answer(token_ids=None), "`return_token_ids`"),
        (text_answer(prompt_token_ids=None), "`return_token_ids`"),
        (text_answer(logprobs=None), "0 log-probabilities for 2 tokens"),
        (text_answer(logprobs={"token_logprobs": [-1.0]}), "1 log-probabilities for 2 tokens"),
        (
            text_answer(logprobs={"token_logprobs": [-1.0, None]}),
            "malformed response from the inference server",
        ),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(PolicyRefusedError) as caught:
        wire.text_completions(body, KNOWN)
    assert caught.value.status == 200
    assert problem in str(caught.value)


def test_a_server_may_keep_the_texts_of_tokens_to_itself() -> None:
    assert one(text_answer(logprobs={"token_logprobs": [-1.0, -2.0]})).tokens == []


def test_requests_ask_for_what_training_needs() -> None:
    asked = json.loads(wire.text_request("m", (1, 2), n=3, max_tokens=4, temperature=1.0))
    assert asked == {
        "model": "m",
        "prompt": [1, 2],
        "logprobs": 0,
        "return_token_ids": True,
        "n": 3,
        "max_tokens": 4,
        "temperature": 1.0,
    }
    chat = json.loads(wire.chat_request("m", ({"role": "user", "content": "ä"},), n=1))
    assert chat["messages"] == [{"role": "user", "content": "ä"}]
    assert chat["logprobs"] is True
    assert chat["return_token_ids"] is True


def test_errors_are_read_whatever_their_form() -> None:
    assert wire.error_text(b'{"error": {"message": "too\\n long", "code": 1}}') == "too long"
    assert wire.error_text(b"<b>no\n</b>") == "<b>no </b>"
    assert wire.error_text(b"\xff") == "\ufffd"
    assert len(wire.error_text(b"x" * 10_000)) == 200


def test_the_first_model_is_the_one() -> None:
    assert wire.first_model(b'{"data": [{"id": "a"}, {"id": "b"}]}') == wire.Model("a")
    assert wire.first_model(b'{"data": [{"id": "a", "root": "/m"}]}').root == "/m"
    for body in (b'{"data": []}', b"{}", b"no"):
        with pytest.raises(PolicyRefusedError, match="lists no model"):
            wire.first_model(body)
