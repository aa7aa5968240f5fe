"""Their client on the servers of a run: failures of a server, and answers that theirs would refuse."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.services.worker.verifiers.support import DEADLINE_S, load, missing, policy_of, rolled_out

from rolloutmq import PolicyVersion
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.verifiers.trajectories import RolloutFailedError

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.filterwarnings("ignore"),  # those of other software
]


@pytest.fixture
def environment() -> Any:
    return load(
        "mishaps", sampling={"max_tokens": 2, "extra": {"user": "five"}}, rollout_timeout_s=DEADLINE_S
    )


async def test_the_request_is_ours_and_the_answer_exact(environment: Any, server: "FakeServer") -> None:
    server.step = 17
    async with policy_of(server.url) as policy, environment:
        group = await rolled_out(environment, policy, size=1)
    (asked,) = server.asked
    wanted = {
        "model": "tiny",
        "n": 1,
        "max_completion_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "user": "five",
    }
    assert asked.items() >= (wanted | {"logprobs": True, "return_token_ids": True}).items()
    assert [list(row) for row in group["tokens"]] == [[1, 2, 3, 4, 5]]
    assert [list(row) for row in group["mask"]] == [[False] * 3 + [True] * 2]
    assert [list(row) for row in group["inference_logprobs"]] == [[0, 0, 0, -0.25, -0.25]]
    assert group.oldest == group.newest == PolicyVersion(0, 17)


async def test_no_proxy_of_the_machine_is_asked(
    environment: Any, server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with policy_of(server.url) as policy, environment:
        await rolled_out(environment, policy, size=1)
    assert len(server.asked) == 1


@pytest.mark.parametrize("failures", [[503, 503], [None, None], [429, None, 502]])
async def test_a_server_that_is_away_costs_a_pause(
    environment: Any, server: "FakeServer", failures: list[int | None]
) -> None:
    server.failures = failures
    async with policy_of(server.url) as policy, environment:
        group = await rolled_out(environment, policy, size=2)
    assert len(group.scores) == 2
    assert not server.failures


async def test_a_call_moves_to_another_engine(
    environment: Any, server: "FakeServer", other_server: "FakeServer"
) -> None:
    async with policy_of(server.url, other_server.url) as policy, environment:
        await rolled_out(environment, policy, size=1)
        first, second = (server, other_server) if server.asked else (other_server, server)
        await first.stop()
        for _ in range(3):
            assert len((await rolled_out(environment, policy, size=2)).scores) == 2
    assert len(second.asked) >= 6


@pytest.fixture
def deaf() -> Iterator[str]:
    """Yield the address of a server that answers no attempt to connect: its backlog is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as peers:
        host, port = listening.getsockname()
        while True:
            peer = peers.enter_context(socket.socket())
            peer.settimeout(0.5)
            try:
                peer.connect((host, port))
            except TimeoutError:
                break
        yield f"http://{host}:{port}"


@pytest.mark.usefixtures("environment")
async def test_a_call_moves_on_from_a_host_that_does_not_answer(
    server: "FakeServer", deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead host refuses no connection. The call waits for it a short time only, and for an answer without limit."""
    from rolloutmq.services.worker.verifiers import client as module

    class Policy:
        def __init__(self, sound: Any) -> None:
            self.sound, self.asked = sound, 0

        @asynccontextmanager
        async def endpoint(self) -> AsyncIterator[Endpoint]:
            async with self.sound.endpoint() as found:
                self.asked += 1
                yield replace(found, base_url=f"{deaf}/v1") if self.asked == 1 else found

    monkeypatch.setattr(module, "CONNECT_S", 0.3)
    async with policy_of(server.url) as sound, module.openai_client() as openai, asyncio.timeout(DEADLINE_S):
        policy: Any = Policy(sound)
        async with module.PolicyClient.opened(openai, policy, DEADLINE_S) as client:
            assert await client.get_native_response([], "", {"n": 1})
    assert policy.asked == 2
    assert openai.timeout.read is None


async def test_patience_ends(server: "FakeServer") -> None:
    environment = load("mishaps", rollout_timeout_s=1.0)
    server.failures = [503] * 1000
    async with policy_of(server.url) as policy, environment:
        with pytest.raises(RolloutFailedError, match="says 503"):
            await rolled_out(environment, policy, size=1)


async def test_a_refused_request_is_final(environment: Any, server: "FakeServer") -> None:
    server.failures = [400]
    async with policy_of(server.url) as policy, environment:
        with pytest.raises(RolloutFailedError, match="says 400"):
            await rolled_out(environment, policy, size=1)
    assert len(server.asked) == 1


@pytest.mark.parametrize("missing", [1, -1])
async def test_an_answer_without_exactly_one_choice_is_refused(
    environment: Any, server: "FakeServer", missing: int
) -> None:
    server.missing = missing
    async with policy_of(server.url) as policy, environment:
        with pytest.raises(RolloutFailedError, match=f"one choice was asked for \\(got {1 - missing}\\)"):
            await rolled_out(environment, policy, size=1)


async def test_a_field_that_a_rollout_sets_is_refused(server: "FakeServer") -> None:
    environment = load("mishaps", sampling={"max_tokens": 2})
    async with policy_of(server.url) as policy, environment:
        with pytest.raises(RolloutFailedError, match="top_p must not change the distribution"):
            await rolled_out(environment, policy, 8, size=1)
    assert not server.asked


async def test_a_prompt_that_is_too_long_ends_the_rollout_with_what_there_is(server: "FakeServer") -> None:
    environment = load("dialogue", options={"turns": 3})
    server.code = "context_length_exceeded"
    server.failures = [400]
    async with policy_of(server.url) as policy, environment:
        with pytest.raises(RolloutFailedError, match=r"no turn \(prompt_too_long: .*says 400"):
            await rolled_out(environment, policy, size=1)


async def test_an_empty_answer_is_an_answer(environment: Any, server: "FakeServer") -> None:
    server.text, server.sampled = "", [2]
    async with policy_of(server.url) as policy, environment:
        group = await rolled_out(environment, policy, size=1)
    assert [list(row) for row in group["tokens"]] == [[1, 2, 3, 2]]
    assert group["messages"][0][-1] == {"role": "assistant", "content": ""}


@pytest.mark.usefixtures("environment")
async def test_nothing_is_sampled_after_the_end_of_a_rollout(server: "FakeServer") -> None:
    from rolloutmq.services.worker.verifiers.client import PolicyClient, openai_client

    async with policy_of(server.url) as policy, openai_client() as openai:
        async with PolicyClient.opened(openai, policy, DEADLINE_S) as client:
            assert await client.get_native_response([], "", {"n": 1})
        with pytest.raises(RuntimeError, match="the rollout is over"):
            await client.get_native_response([], "", {"n": 1})
    assert len(server.asked) == 1


async def test_a_cancelled_rollout_cancels_its_calls(environment: Any, server: "FakeServer") -> None:
    server.gate.clear()
    async with policy_of(server.url) as policy, environment:
        rolling = asyncio.create_task(rolled_out(environment, policy, size=4))
        async with asyncio.timeout(DEADLINE_S):
            while server.waiting < 4:  # noqa: ASYNC110 - the server counts them
                await asyncio.sleep(0.01)
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        server.gate.set()
        assert len((await rolled_out(environment, policy, size=2)).scores) == 2
