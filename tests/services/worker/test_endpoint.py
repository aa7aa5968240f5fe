"""A server of the policy as a client of somebody else sees it."""

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.services.worker.test_openai import among, at, until

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import PolicyRefusedError, PolicyUnavailableError
from rolloutmq.services.worker.endpoint import Endpoint
from rolloutmq.services.worker.openai import OpenAIPolicy
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


async def base_url(policy: OpenAIPolicy) -> str:
    async with policy.endpoint() as endpoint:
        return endpoint.base_url
