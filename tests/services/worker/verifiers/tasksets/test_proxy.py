"""The proxy without verifiers: requests of their client, failures of an engine, and what is kept."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.services.worker.verifiers.support import DEADLINE_S, policy_of
from yarl import URL

from rolloutmq import Completion, PolicyVersion
from rolloutmq.services.worker.policy import GreedyPolicy, Policy
from rolloutmq.services.worker.verifiers.tasksets import proxy as proxy_module
from rolloutmq.services.worker.verifiers.tasksets.proxy import GroupCalls, Proxy

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer

ASKED = {"model": "x", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "stop_token_ids": [2]}}


class Client:
    """Asks the proxy as theirs does."""

    def __init__(self, proxy: Proxy, calls: GroupCalls, session: aiohttp.ClientSession) -> None:
        self.proxy = proxy
        self.calls = calls
        self._session = session

    async def ask(self, trace: str = "t", body: Any = ASKED) -> tuple[int, Any]:
        url = self.proxy.base_url.removesuffix("/v1") + "/inference/v1/generate"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(url, data=data, headers={"X-Session-ID": trace}) as response:
            return response.status, json.loads(await response.read())

    async def models(self) -> tuple[int, Any]:
        async with self._session.get(self.proxy.base_url + "/models") as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def asking(policy: Policy, patience_s: float = DEADLINE_S) -> AsyncIterator[Client]:
    async with (
        Proxy.listening() as proxy,
        aiohttp.ClientSession() as session,
        proxy.opened(policy, patience_s) as calls,
    ):
        proxy.expect(calls, "t")
        yield Client(proxy, calls, session)


async def test_an_answer_is_passed_on_and_kept_with_its_version(server: "FakeServer") -> None:
    server.step = 17
    async with policy_of(server.url) as policy, asking(policy) as client:
        status, answer = await client.ask()
        kept = client.calls.sampled["t"]
        assert await client.models() == (200, {"object": "list", "data": [server.model]})
    content = [{"token": f"token_id:{token}", "logprob": -0.25} for token in (4, 5)]
    choice = {"index": 0, "token_ids": [4, 5], "logprobs": {"content": content}, "finish_reason": "stop"}
    assert (status, answer) == (200, {"request_id": "t-1", "choices": [choice]})
    version = PolicyVersion(0, 17)
    assert kept == [Completion("", [1, 2, 3], [4, 5], [-0.25, -0.25], version, version, tokens=["", ""])]
    (asked,) = server.asked
    assert asked == {**ASKED, "model": "tiny", "return_token_ids": True}


async def test_the_most_likely_tokens_are_asked_for_a_greedy_task(server: "FakeServer") -> None:
    async with policy_of(server.url) as policy, asking(GreedyPolicy(policy)) as client:
        await client.ask(body={**ASKED, "sampling_params": {"temperature": 0.7}})
        assert [one.temperature for one in client.calls.sampled["t"]] == [1.0]
    assert server.asked[0]["sampling_params"] == {"temperature": 0.0}


async def test_the_temperature_is_kept(server: "FakeServer") -> None:
    async with policy_of(server.url) as policy, asking(policy) as client:
        await client.ask(body={**ASKED, "sampling_params": {"temperature": 0.7}})
        assert [one.temperature for one in client.calls.sampled["t"]] == [0.7]


@pytest.mark.parametrize("failures", [[503, 503], [None, None], [429, None, 502]])
async def test_a_server_that_is_away_costs_a_pause(server: "FakeServer", failures: list[int | None]) -> None:
    server.failures = failures
    async with policy_of(server.url) as policy, asking(policy) as client:
        assert (await client.ask())[0] == 200
        assert len(client.calls.sampled["t"]) == 1
    assert not server.failures


async def test_a_call_moves_to_another_engine(server: "FakeServer", other_server: "FakeServer") -> None:
    async with policy_of(server.url, other_server.url) as policy, asking(policy) as client:
        assert (await client.ask())[0] == 200
        first, second = (server, other_server) if server.asked else (other_server, server)
        await first.stop()
        assert (await client.ask())[0] == 200
    assert len(second.asked) == 1


async def test_a_refused_request_is_final_and_told(server: "FakeServer") -> None:
    server.failures = [400]
    async with policy_of(server.url) as policy, asking(policy) as client:
        status, answer = await client.ask()
        assert (status, answer["error"]["message"]) == (400, "says 400")
        assert client.calls.refusal == "status 400, says 400"
        assert client.calls.sampled == {"t": []}
    assert len(server.asked) == 1


async def test_patience_is_that_of_the_group(server: "FakeServer") -> None:
    server.failures = [503] * 1000
    async with policy_of(server.url) as policy, asking(policy, patience_s=0.5) as client:
        assert (await client.ask())[0] == 503
        attempts = len(server.asked)
        assert attempts > 1
        async with asyncio.timeout(DEADLINE_S):
            while attempts > 1:  # a program of theirs asks again, until the patience is over
                before = len(server.asked)
                assert (await client.ask())[0] == 503
                attempts = len(server.asked) - before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"x":"\xff"}', b"[" * 10_000])
async def test_what_is_no_request_is_refused(server: "FakeServer", body: bytes) -> None:
    async with policy_of(server.url) as policy, asking(policy) as client:
        assert (await client.ask(body=body))[0] == 400
    assert not server.asked


async def test_an_answer_without_what_training_needs_is_refused(server: "FakeServer") -> None:
    server.logprobs = 1
    async with policy_of(server.url) as policy, asking(policy) as client:
        status, answer = await client.ask()
    assert status == 400
    assert "log-probabilities for 2 tokens" in answer["error"]["message"]


async def test_an_unknown_trace_and_one_that_is_over_are_refused(server: "FakeServer") -> None:
    async with (
        policy_of(server.url) as policy,
        Proxy.listening() as proxy,
        aiohttp.ClientSession() as session,
    ):
        async with proxy.opened(policy, DEADLINE_S) as calls:
            client = Client(proxy, calls, session)
            assert (await client.models())[0] == 409
            proxy.expect(calls, "t")
            assert (await client.ask("stranger"))[0] == 409
            assert (await client.ask())[0] == 200
        status, answer = await client.ask()
        assert (status, answer["error"]["message"]) == (
            409,
            "the rollout is over: nothing is sampled for it any more",
        )
        async with session.get(proxy.base_url.replace("/v1", "x/v1/models")) as response:
            assert response.status == 404  # another path
    assert len(server.asked) == 1


async def test_a_body_that_stops_is_not_waited_for(
    server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "BODY_S", 0.1)
    async with policy_of(server.url) as policy, asking(policy) as client, asyncio.timeout(DEADLINE_S):
        url = URL(client.proxy.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        path = url.path.removesuffix("/v1") + "/inference/v1/generate"
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Session-ID: t\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
    assert not server.asked


async def test_connections_that_ask_nothing_make_room(
    server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that an agent started holds them; the group goes on."""
    monkeypatch.setattr(proxy_module, "client_limit", lambda: 3)
    async with policy_of(server.url) as policy, asking(policy) as client, asyncio.timeout(DEADLINE_S):
        url = URL(client.proxy.base_url)
        idle = [await asyncio.open_connection(url.host, url.port) for _ in range(6)]
        assert (await client.ask())[0] == 200
        assert await idle[0][0].read() == b"", "the oldest one was closed"
        for _, writer in idle:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_body_that_is_too_large_is_told(
    server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "BODY_LIMIT_BYTES", 100)
    async with policy_of(server.url) as policy, asking(policy) as client:
        status, answer = await client.ask(body=b" " * 200)
    assert (status, answer["error"]["message"]) == (413, "request body too large; at most 100 bytes")


async def test_a_cancelled_request_cancels_that_of_the_engine(server: "FakeServer") -> None:
    server.gate.clear()
    async with policy_of(server.url) as policy, asking(policy) as client:
        asked = asyncio.create_task(client.ask())
        async with asyncio.timeout(DEADLINE_S):
            while server.waiting < 1:  # noqa: ASYNC110 - the server counts them
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait([asked])
            while server.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        server.gate.set()
        assert client.calls.sampled == {"t": []}
