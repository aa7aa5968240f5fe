"""The policy client against a server with every failure."""

import asyncio
import itertools
import logging
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rolloutmq.schemas.errors import PolicyRefusedError, PolicyUnavailableError, UsageError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.openai import client, engine_choice
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.policy import GreedyPolicy, Policy
from rolloutmq.services.worker.trajectory import Trajectory

LIMIT_S = 60.0

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer


def at(place: Callable[[], str | None]) -> Engines:
    """The one engine that is at this place, once it is known."""
    return Engines(lambda: [InferenceAddress(url=url, pid=0)] if (url := place()) else [], random.Random(0))


async def test_an_answer_has_everything(server: "FakeServer") -> None:
    server.step = 17
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        typed: Policy = policy
        completions = await typed.complete("473=", n=3, max_tokens=4, stop=("a", "b"))
    assert len(completions) == 3
    first = completions[0]
    assert (first.text, first.prompt_token_ids, first.token_ids) == ("answer", [1, 2, 3], [4, 5])
    assert first.oldest == first.newest == PolicyVersion(0, 17)
    (asked,) = server.asked
    assert (asked["model"], asked["prompt"], asked["n"], asked["stop"]) == ("tiny", "473=", 3, ["a", "b"])


async def test_a_conversation_is_asked_the_same_way(server: "FakeServer") -> None:
    async with OpenAIPolicy.opened(at(lambda: server.url + "/v1/")) as policy:
        (answer,) = await policy.chat([{"role": "user", "content": "hi"}])
    assert answer.text == "answer"
    assert answer.logprobs == [-0.25, -0.25]
    assert "stop" not in server.asked[0]
    assert (server.asked[0]["temperature"], server.asked[0]["top_p"]) == (1.0, 1.0), (
        "whatever its defaults are"
    )


async def test_a_server_without_stamps_gets_the_known_versions(server: "FakeServer") -> None:
    server.step = None
    known = [PolicyVersion(0, 3)]
    async with OpenAIPolicy.opened(at(lambda: server.url), known=lambda: known[0]) as policy:
        server.gate.clear()
        asking = asyncio.create_task(policy.complete("q"))
        await until(lambda: server.waiting == 1)
        known[0] = PolicyVersion(0, 5)
        server.gate.set()
        (answer,) = await asking
    assert (answer.oldest, answer.newest) == (PolicyVersion(0, 3), PolicyVersion(0, 5))


@pytest.mark.parametrize("failure", [503, 502, 429, None])
async def test_a_failure_that_passes_is_tried_again(server: "FakeServer", failure: int | None) -> None:
    server.failures = [failure, failure]
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        (answer,) = await policy.complete("q")
        assert policy.retries >= 2 if failure else policy.retries >= 1
    assert answer.text == "answer"
    assert server.failures == []


@pytest.mark.parametrize("status", [400, 404, 413, 500])
async def test_a_refusal_is_final(server: "FakeServer", status: int) -> None:
    server.failures = [status]
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        with pytest.raises(PolicyRefusedError, match=f"says {status}") as caught:
            await policy.complete("q")
    assert caught.value.status == status
    assert len(server.asked) == 1


async def test_a_wrong_number_of_choices_is_refused(server: "FakeServer") -> None:
    server.missing = 1
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        with pytest.raises(PolicyRefusedError, match="1 choices in the response, 2 were requested"):
            await policy.complete("q", n=2)


async def test_a_restart_on_another_port_is_only_a_pause(
    server: "FakeServer", other_server: "FakeServer", caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    place = [server.url]
    async with OpenAIPolicy.opened(at(lambda: place[0])) as policy:
        await policy.complete("q")
        server.gate.clear()
        asking = [asyncio.create_task(policy.complete("q")) for _ in range(8)]
        await until(lambda: server.waiting == 8)
        await server.stop()
        await until(lambda: policy.retries >= 8)
        assert not any(task.done() for task in asking)
        place[0] = other_server.url
        for answers in await asyncio.gather(*asking):
            assert answers[0].text == "answer"
    assert len(other_server.asked) == 8
    assert "policy unavailable" in caplog.text
    assert len(caplog.records) < 4


async def test_the_address_is_waited_for(server: "FakeServer") -> None:
    place: list[str | None] = [None]
    async with OpenAIPolicy.opened(at(lambda: place[0])) as policy:
        asking = asyncio.create_task(policy.complete("q"))
        await until(lambda: policy.retries >= 2)
        place[0] = server.url
        assert len(await asking) == 1


async def test_patience_ends(server: "FakeServer") -> None:
    await server.stop()
    async with OpenAIPolicy.opened(at(lambda: server.url), patience_s=0.2) as policy:
        with pytest.raises(PolicyUnavailableError) as caught:
            await policy.complete("q")
    assert caught.value.address == server.url
    assert "ClientConnectorError" in caught.value.last


async def test_a_server_that_accepts_and_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with OpenAIPolicy.opened(at(lambda: url), patience_s=0.2) as policy:
            with pytest.raises(PolicyUnavailableError, match="the request timed out"):
                await policy.complete("q")


@pytest.fixture
def closed() -> Iterator[socket.socket]:
    """A port at which nobody listens, and that nobody else gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines that were not reached, attempt after attempt; the pauses between probes are short."""
    told, real = [], Engines.missed
    monkeypatch.setattr(engine_choice, "PASS_S", 0.02)
    monkeypatch.setattr(engine_choice, "PROBE_MAX_S", 0.02)

    def noted(engines: Engines, engine: engine_choice.Engine, now: float, why: str) -> bool:
        told.append(engine.name)
        return real(engines, engine, now, why)

    monkeypatch.setattr(Engines, "missed", noted)
    return told


def both(*urls: str) -> Engines:
    found = [InferenceAddress(url=url, pid=1, name=f"inference.{n}") for n, url in enumerate(urls)]
    return Engines(lambda: found, random.Random(0))


async def test_an_engine_out_of_reach_is_probed_beside_the_calls_and_asked_again_once_it_is_found(
    server: "FakeServer",
    other_server: "FakeServer",
    closed: socket.socket,
    missed: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each second a rollout was sent to it, and the log named the good one."""
    caplog.set_level(logging.INFO)
    port = closed.getsockname()[1]
    async with OpenAIPolicy.opened(both(f"http://127.0.0.1:{port}", server.url)) as policy:
        while not policy.reach.away:
            await policy.complete("q")
        retries, why = policy.retries, policy.reach.away["inference.0"]
        assert f"ClientConnectorError Cannot connect to host 127.0.0.1:{port}" in why
        while len(missed) < 5:
            await policy.complete("q")
        assert policy.retries == retries, "probes ask it, and no rollout"
        await other_server.stop()
        closed.close()
        await other_server.start(port)
        while not other_server.asked:
            await policy.complete("q")
        assert policy.reach.away == {}
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" url=")[0] for line in told if "reach" in line] == [
        "engine out of reach engine=inference.0",
        "engine within reach again engine=inference.0",
    ]
    assert not any(f"address={server.url}" in line for line in told)


async def test_a_firewall_that_drops_is_told_as_one_and_no_request_that_timed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the patience ends in the middle of an attempt."""
    monkeypatch.setattr(client, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as fillers:
        port = full.getsockname()[1]
        for _ in range(2):  # the queue is full then, and the system drops who comes next
            one = fillers.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        async with OpenAIPolicy.opened(both(f"http://127.0.0.1:{port}"), patience_s=1.0) as policy:
            for patience_s in (1.0, 0.05):
                policy._patience_s = patience_s
                with pytest.raises(PolicyUnavailableError, match="Connection timeout to host"):
                    await policy.complete("q")
            assert "ConnectionTimeoutError" in policy.reach.away["inference.0"]


async def test_a_call_gives_up_early_once_no_living_engine_is_within_reach(
    closed: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held its permit for nine tenths of `rollout_timeout_s`, and workers of other hosts starved."""
    monkeypatch.setattr(engine_choice, "GIVEN_UP_S", 0.2)
    beats = itertools.count(1)
    url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    engines = Engines(
        lambda: [InferenceAddress(url=url, pid=1, name="inference.far", number=next(beats))], random.Random(0)
    )
    async with OpenAIPolicy.opened(engines, patience_s=1000.0) as policy, asyncio.timeout(30):
        with pytest.raises(PolicyUnavailableError, match=f"no answer from {url} within"):
            await policy.complete("q")
        assert policy.reach.is_lost


async def test_one_connection_serves_call_after_call(server: "FakeServer") -> None:
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        for _ in range(5):
            await policy.complete("q")
    assert server.models_asked == 1
    assert server.connections == 1


async def test_a_cancelled_call_leaves_the_client_usable(server: "FakeServer") -> None:
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        server.gate.clear()
        asking = asyncio.create_task(policy.complete("q"))
        await until(lambda: server.waiting == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.gate.set()
        assert len(await policy.complete("q")) == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for lies in other objects
            await asyncio.sleep(0.005)


def among(*servers: "FakeServer") -> Engines:
    """Several engines, which count no beats."""
    addresses = [InferenceAddress(url=server.url, pid=1, name=server.url) for server in servers]
    return Engines(lambda: addresses, random.Random(0))


async def test_calls_are_spread_over_the_engines(server: "FakeServer", other_server: "FakeServer") -> None:
    async with OpenAIPolicy.opened(among(server, other_server)) as policy:
        for one in (server, other_server):
            one.gate.clear()
        asking = [asyncio.create_task(policy.complete("q")) for _ in range(10)]
        await until(lambda: server.waiting == other_server.waiting == 5)
        other_server.gate.set()
        await until(lambda: other_server.waiting == 0)
        asking += [asyncio.create_task(policy.complete("q")) for _ in range(3)]
        await until(lambda: len(other_server.asked) == 8)
        server.gate.set()
        assert len(await asyncio.gather(*asking)) == 13
    assert (len(server.asked), len(other_server.asked), policy.retries) == (5, 8, 0)


async def test_an_engine_that_dies_costs_its_calls_no_pause(
    server: "FakeServer", other_server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 60.0)
    async with OpenAIPolicy.opened(among(server, other_server)) as policy:
        for one in (server, other_server):
            one.gate.clear()
        asking = [asyncio.create_task(policy.complete("q")) for _ in range(10)]
        await until(lambda: server.waiting == other_server.waiting == 5)
        await server.stop()
        await until(lambda: other_server.waiting == 10)
        other_server.gate.set()
        answers = await asyncio.gather(*asking)
    assert all(answer.text == "answer" for (answer,) in answers)


async def test_an_engine_that_drains_hands_its_calls_to_the_others(
    server: "FakeServer", other_server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 60.0)
    server.failures = [503] * 50
    async with OpenAIPolicy.opened(among(server, other_server)) as policy:
        for _ in range(20):
            assert len(await policy.complete("q")) == 1
    assert len(other_server.asked) == 20
    assert len(server.asked) < 5  # it is passed over, not asked each time


async def test_where_all_engines_fail_it_is_waited_and_not_hurried(
    server: "FakeServer", other_server: "FakeServer"
) -> None:
    await server.stop()
    await other_server.stop()
    async with OpenAIPolicy.opened(among(server, other_server), patience_s=0.5) as policy:
        with pytest.raises(PolicyUnavailableError):
            await policy.complete("q")
        assert 2 <= policy.retries < 12


async def test_a_turn_begins_with_the_tokens_of_those_before(server: "FakeServer") -> None:
    server.sampled = [*map(ord, "ab"), ord(";")]
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        (first,) = await policy.complete(await policy.render([{"role": "user", "content": "q"}]))
        sequence = Trajectory.of(first)
        assert await policy.detokenize(sequence.token_ids) == "[user]q;[assistant]ab;"
        (second,) = await policy.chat([{"role": "tool", "content": "7"}], after=sequence)
        sequence = sequence.then(second)
        assert await policy.detokenize(sequence.token_ids[-16:]) == "7;[assistant]ab;"
        (third,) = await policy.complete("and?", after=sequence, n=1)
        (fourth,) = await policy.complete([3, 4], after=sequence.then(third))
        greedy = await GreedyPolicy(policy).chat(
            [{"role": "tool", "content": "7"}], after=Trajectory.of(first)
        )
        with pytest.raises(UsageError, match="must be only those since its last answer"):
            await policy.chat([{"role": "assistant", "content": "ab"}], after=sequence)
        completion: Any = first
        for asked in (
            policy.complete("7", after=completion),
            policy.chat([{"role": "tool", "content": "7"}], after=completion),
        ):
            with pytest.raises(UsageError, match="after: must be a Trajectory"):
                await asked
        with pytest.raises(UsageError, match="tokens of `after` once more"):
            await policy.complete(second.prompt_token_ids, after=Trajectory.of(first))
    assert second.prompt_token_ids == [*map(ord, "[user]q;[assistant]ab;[tool]7;[assistant]")]
    assert third.prompt_token_ids == [*second.prompt_token_ids, *map(ord, "ab;and?")]
    assert fourth.prompt_token_ids == [*third.prompt_token_ids, *map(ord, "ab;"), 3, 4]
    assert greedy[0].prompt_token_ids == second.prompt_token_ids
    assert server.asked[-1]["temperature"] == 0
    assert all(isinstance(one["prompt"], list) for one in server.asked), "no text is tokenized by the server"


async def test_tools_are_for_the_template(server: "FakeServer") -> None:
    tools = [{"type": "function", "function": {"name": "sum"}}]
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        await policy.render([{"role": "user", "content": "q"}], tools=tools)
        await policy.render([{"role": "user", "content": "q"}])
    assert [one.get("tools") for one in server.tokenized] == [tools, None]
    assert server.tokenized[0]["add_generation_prompt"] is True


async def test_short_texts_are_tokenized_once(server: "FakeServer", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEPT", 2)
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        for text in ("a", "b", "a", "b", "c", "b", "a"):
            found = await policy.tokenize(text)
            assert found == [ord(text)]
            found.clear()
        assert [one.get("prompt") for one in server.tokenized] == ["a", "b", "c", "a"]
        assert await policy.tokenize("") == []
        assert await policy.detokenize([]) == ""
        assert await policy.detokenize(np.array([104, 105])) == "hi"
        long = "x" * client.KEPT_BYTES
        assert await policy.tokenize(long) == await policy.tokenize(long)
    assert [one["prompt"] for one in server.tokenized[-2:]] == [long, long]


async def test_equal_requests_for_tokens_at_once_are_one(server: "FakeServer") -> None:
    message = [{"role": "user", "content": "q"}]
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        server.gate.clear()
        first, *others = (asyncio.create_task(policy.render(message)) for _ in range(16))
        await until(lambda: len(server.tokenized) == 1)
        others[0].cancel()
        first.cancel()  # another one asks instead
        await until(lambda: len(server.tokenized) == 2)
        server.gate.set()
        found = await asyncio.gather(*others[1:])
        assert {"".join(map(chr, tokens)) for tokens in found} == {"[user]q;[assistant]"}
        assert len({id(tokens) for tokens in found}) == len(found), "nobody changes those of another"
        assert len(server.tokenized) == 2
        server.tokenizing = [{"detail": "Not Found"}]
        refused = await asyncio.gather(*(policy.tokenize("r") for _ in range(4)), return_exceptions=True)
        assert [type(error) for error in refused] == [PolicyRefusedError] * 4
        assert await policy.tokenize("r") == [ord("r")], "a refusal is not kept"


async def test_a_request_that_waited_for_another_has_its_own_patience(server: "FakeServer") -> None:
    """It gave up with the first one, however late it had come."""
    place: list[str] = []
    async with OpenAIPolicy.opened(at(lambda: place[0] if place else None), patience_s=0.2) as policy:
        first = asyncio.create_task(policy.tokenize("q"))
        await until(lambda: bool(policy._asking))
        policy._patience_s = LIMIT_S
        others = [asyncio.create_task(policy.tokenize("q")) for _ in range(3)]
        with pytest.raises(PolicyUnavailableError):
            await first
        place.append(server.url)
        assert await asyncio.gather(*others) == [[ord("q")]] * 3
    assert len(server.tokenized) == 1


async def test_kept_tokens_are_bounded(server: "FakeServer", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEPT_TOKENS", 5)
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        for text in ("aaa", "bb", "aaa", "c", "bb", "longer", "longer"):
            await policy.tokenize(text)
    assert [one["prompt"] for one in server.tokenized] == ["aaa", "bb", "c", "longer", "longer"]


async def test_an_unknown_model_is_no_missing_tokenizer(server: "FakeServer") -> None:
    message = "The model `tiny` does not exist."
    server.tokenizing = [
        {"error": {"message": message, "code": 404}},
        {"error": {"message": "gone", "code": "model_not_found"}},
    ]
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        with pytest.raises(PolicyRefusedError, match=message):
            await policy.tokenize("q")
        with pytest.raises(PolicyRefusedError, match="gone"):
            await policy.detokenize([1])


async def test_numpy_ids_are_ids_and_a_text_is_no_conversation(server: "FakeServer") -> None:
    given: list[Any] = [np.array([7, 8]), list(np.array([7, 8]))]
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        (answer,) = await policy.complete([7, 8])
        for ids in given:
            await policy.complete(ids)
            assert server.asked[-1]["prompt"] == [7, 8]
        with pytest.raises(
            UsageError, match=r"messages: must be a list of messages .got 'hello'.; pass a text"
        ):
            await policy.chat("hello", after=Trajectory.of(answer))  # type: ignore[arg-type]
        asked = len(server.asked)
        for ask in (policy.chat, policy.render):
            text: Any = "hello"
            with pytest.raises(UsageError, match=r"^messages: must be a list of messages .got 'hello'"):
                await ask(text)
        assert len(server.asked) == asked


async def test_a_server_without_a_tokenizer_is_named(server: "FakeServer") -> None:
    server.tokenizes = False
    async with OpenAIPolicy.opened(at(lambda: server.url)) as policy:
        with pytest.raises(
            PolicyRefusedError, match="the server has no /tokenize; use one that has it, such as vLLM"
        ):
            await policy.tokenize("q")
        with pytest.raises(PolicyRefusedError, match="the server has no /detokenize"):
            await policy.detokenize([1])
        (answer,) = await policy.complete("q")
        with pytest.raises(PolicyRefusedError, match="the server has no /tokenize"):
            await policy.chat([{"role": "user", "content": "q"}], after=Trajectory.of(answer))
        (following,) = await policy.complete([7], after=Trajectory.of(answer))
    assert following.prompt_token_ids == [1, 2, 3, 4, 5, 7]
