"""A client that waits for its broker says so, and where it looked."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from tests.bus.consumer.test_round_trip import config, stamped

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.encoding import codec
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport import discovery, sockets
from rolloutmq.bus.transport.discovery import Search, reach, serve_address
from rolloutmq.bus.transport.request_client import RESEND_MAX_S, BrokerClient
from rolloutmq.bus.transport.sockets import make_context
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.errors import BrokerUnavailableError, ClosedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import InfoReply, RunInfo
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.services.broker.server import running_broker

LIMIT_S = 60.0
INFO = InfoReply(
    epoch=9, info=RunInfo(), ingest="", events="", publish="", ports=(1, 2, 3), max_group_bytes=1
)


async def said(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """Wait for a warning with a text, and return it."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            for record in caplog.records:
                if record.levelname == "WARNING" and text in record.getMessage():
                    return record.getMessage()
            await asyncio.sleep(0.02)


async def lacking(search: Search, text: str) -> None:
    """Wait until a search names a problem with a text."""
    async with asyncio.timeout(LIMIT_S):
        while text not in search.problem:  # noqa: ASYNC110 - it polls
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "opening",
    [
        lambda where: Producer.open(where, env="e"),
        lambda where: Consumer.open(where, sequences=2),
    ],
    ids=["producer", "consumer"],
)
async def test_without_a_broker_it_is_said_where_one_was_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opening: Callable[[Path], object]
) -> None:
    async def enter() -> None:
        async with opening(tmp_path / "typo"):  # type: ignore[attr-defined]
            raise AssertionError("there is no broker")

    waiting = asyncio.create_task(enter())
    message = await said(caplog, "waiting for the broker")
    waiting.cancel()
    await asyncio.wait({waiting})
    assert f"{RunLayout(tmp_path / 'typo').endpoints} does not exist" in message
    assert f"rolloutmq broker --run-dir {tmp_path / 'typo'}" in message


async def test_a_run_that_has_ended_is_told(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The advice was to start a broker there."""
    layout = RunLayout(run_dir)
    write_json(layout.lives, [Life(1.0, 2.0)])
    write_json(layout.summary, {"ended": "the trainer is done"})
    search = Search(run_dir)
    search.begin()
    waiting = asyncio.create_task(serve_address(run_dir, search))
    message = await said(caplog, "waiting for the broker")
    assert f"the run in {run_dir} has ended: the trainer is done; continue it with" in message
    layout.summary.write_bytes(b"{")
    await lacking(search, f"the run in {run_dir} has ended; continue it with")
    write_json(layout.lives, [Life(1.0, 2.0), Life(3.0)])  # it is resumed: its broker comes
    await lacking(search, "rolloutmq broker")
    write_json(layout.lives, [Life(1.0, 2.0)])
    await lacking(search, "has ended")
    layout.lives.write_bytes(b"[")
    await lacking(search, "rolloutmq broker")
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_a_broker_that_does_not_answer_is_named(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{run_dir}/nobody"
    context = make_context()
    waiting = asyncio.create_task(reach(address, context))
    message = await said(caplog, "waiting for the broker")
    waiting.cancel()
    await asyncio.wait({waiting})
    context.term()
    assert f"no answer from {address}" in message


async def test_a_handshake_that_lasts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that gave its handshakes up and began others would keep a broker at work for ever, and never get in."""
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.02)
    context = make_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        attempts = Attempts(address)
        waiting = asyncio.create_task(reach(address, context, attempts))
        busy, _ = await asyncio.to_thread(listener.accept)  # it never says a word
        async with asyncio.timeout(LIMIT_S):
            while attempts.count < 20:  # noqa: ASYNC110 - it polls
                await asyncio.sleep(0.01)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        waiting.cancel()
        await asyncio.wait({waiting})
        busy.close()
    context.term()


async def test_a_silent_connection_is_replaced_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it may be nobody, but each further one costs the broker a handshake."""
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.02)
    monkeypatch.setattr(discovery, "LONGEST_S", 0.5)
    context = make_context(2)
    mute = sockets.serve_router(context, 1 << 10)
    address = sockets.bind_remote(mute, ["tcp://127.0.0.1:*"], "")
    attempts = Attempts(address)
    waiting = asyncio.create_task(reach(address, context, attempts))
    clients: dict[bytes, int] = {}
    async with asyncio.timeout(LIMIT_S):
        while len(clients) < 4:
            if mute.poll(0):
                clients.setdefault(mute.recv_multipart()[0], attempts.count)
            await asyncio.sleep(0.001)
    waiting.cancel()
    await asyncio.wait({waiting})
    first, second, third, fourth = clients.values()
    assert second - first >= discovery.ATTEMPTS_BY_TCP - 1
    assert fourth - third > second - first
    mute.close(0)
    context.term()


async def test_a_loop_that_was_held_up_keeps_its_connection() -> None:
    """An attempt that a busy loop notices late says nothing about the broker, and another handshake costs it much."""
    context = make_context(2)
    mute = sockets.serve_router(context, 1 << 10)
    address = sockets.bind_remote(mute, ["tcp://127.0.0.1:*"], "")
    way = discovery._Way(context, None)
    client = await way.client_of(address, None)
    asking = asyncio.create_task(client.request(GetInfo(), LIMIT_S))
    async with asyncio.timeout(LIMIT_S):
        while not mute.poll(0):  # noqa: ASYNC110 - it polls
            await asyncio.sleep(0.001)
    for _ in range(discovery.ATTEMPTS_BY_TCP - 1):
        await way.silent(1000.0)
        assert await way.client_of(address, None) is client
    await way.silent(1000.0)
    assert await way.client_of(address, None) is not client
    asking.cancel()
    await asyncio.wait({asking})
    await way.leave()
    mute.close(0)
    context.term()


async def test_an_answer_counts_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that a whole fleet asks at once needs longer than an attempt, and would never be reached."""
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.05)
    context = make_context(2)
    slow = sockets.serve_router(context, 1 << 10)
    address = sockets.bind_remote(slow, ["tcp://127.0.0.1:*"], "")
    attempts = Attempts(address)
    waiting = asyncio.create_task(reach(address, context, attempts))
    async with asyncio.timeout(LIMIT_S):
        while not slow.poll(0):  # noqa: ASYNC110 - it polls
            await asyncio.sleep(0.001)
        asked = slow.recv_multipart()
        seen = attempts.count
        while attempts.count < seen + discovery.ATTEMPTS_BY_TCP - 2:  # noqa: ASYNC110 - it polls
            await asyncio.sleep(0.001)
        slow.send_multipart([*asked[:3], codec.encode(INFO)])
        client, reply = await waiting
    assert reply.epoch == INFO.epoch
    await client.close()
    slow.close(0)
    context.term()


class Attempts(Search):
    """A search that counts how often there was no answer."""

    count = 0

    def lacks(self, kind: str, problem: str) -> None:
        self.count += kind == "no answer"
        super().lacks(kind, problem)


async def test_a_pull_and_a_send_that_wait_say_why(
    run_dir: Path, group: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    with running_broker(config(pacing=True, max_staleness=0), RunLayout(run_dir)):
        async with (
            Producer.open(run_dir, env="e", producer="p", group_size=2) as producer,
            Consumer.open(run_dir, sequences=8) as consumer,
        ):
            pulling = asyncio.create_task(consumer.pull(1, PolicyVersion()))
            message = await said(caplog, "waiting for a batch")
            assert "step=1 reason=no_batch queued_sequences=0 of=8" in message

            async def send_on() -> None:
                for number in range(1000):
                    await producer.send(stamped(group(f"g-{number}"), PolicyVersion()))

            sending = asyncio.create_task(send_on())
            message = await said(caplog, "waiting for credit")
            assert "producer=p reason=stale_guard" in message
            sending.cancel()
            batch = await pulling
            await batch.ack()
            await asyncio.wait({sending})


async def test_a_patient_client_repeats_within_the_silence_of_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the broker would take the sender of a request that lasts for dead."""
    pauses: list[float] = []

    class Slow(BrokerClient):
        async def request_frames(self, *_: object) -> NoReturn:
            pauses.append(float(_[2]))  # type: ignore[arg-type]
            if len(pauses) == 4:
                raise ClosedError
            raise BrokerUnavailableError("ipc://b", 1.0)

    async def alive(*_: object) -> bool:
        return True

    monkeypatch.setattr(discovery, "lives", alive)
    client = Slow("ipc://b")
    client.patience_s = 30.0
    with pytest.raises(ClosedError):
        await discovery.insist(client, GetInfo(), 1, 3.0, 0.5)
    assert pauses[0] == 0.5
    assert max(pauses) <= discovery.SLOWEST_S < BrokerConfig().silence_s
    assert BrokerConfig().silence_s > RESEND_MAX_S
