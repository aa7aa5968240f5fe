"""A client whose key is refused says so, and comes back once it may enter."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from rolloutmq.bus.transport import discovery, sockets
from rolloutmq.bus.transport.discovery import Search, reach
from rolloutmq.bus.transport.keys import handshakes
from rolloutmq.bus.transport.keys.bundle import CurveKeys
from rolloutmq.bus.transport.keys.directory import key_pair
from rolloutmq.bus.transport.keys.handshakes import Handshakes
from rolloutmq.bus.transport.remote import Remote
from rolloutmq.bus.transport.request_client import BlockingClient, BrokerClient
from rolloutmq.schemas.errors import BrokerUnavailableError, KeyRefusedError
from rolloutmq.schemas.wire.requests import GetInfo

LIMIT_S = 20.0


class Gate:
    """A broker's door that answers as it is told, and serves nobody."""

    def __init__(self, context: sockets.Context) -> None:
        self.status = b"400"
        self.tries = 0
        self.public, self._secret = key_pair()
        self._ended = threading.Event()
        self._questions = sockets.zap_router(context)
        self.router = sockets.serve_router(context, 1 << 10)
        self.address = sockets.bind_remote(self.router, ["tcp://127.0.0.1:*"], self._secret)
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def client(self) -> CurveKeys:
        """Return keys of a client."""
        return CurveKeys("w-7", *key_pair(), self.public)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.router.close(0)
        self._questions.close(0)

    def _answer(self) -> None:
        while not self._ended.is_set():
            if self._questions.poll(20):
                asked = self._questions.recv_multipart()
                self.tries += 1
                name = b"w-7" if self.status == b"200" else b""
                self._questions.send_multipart([asked[0], b"", b"1.0", asked[3], self.status, b"", name, b""])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(handshakes, "FIRST_S", 0.05)
    with context() as shared:
        found = Gate(shared)
        yield found
        found.close()


@contextmanager
def context() -> Iterator[sockets.Context]:
    made = sockets.make_context(2)
    yield made
    made.term()


@pytest.mark.parametrize("status", [b"400", b"500"])
def test_a_refused_socket_comes_back(gate: Gate, status: bytes) -> None:
    """libzmq alone would never try again."""
    gate.status, keys = status, gate.client()
    with context() as own:
        push = sockets.client_dealer(own, gate.address, keys)
        watch = Handshakes(push, gate.address, keys)
        wait_for(watch, lambda: watch.problem != "")
        assert watch.problem == (
            f"key w-7 was refused by {gate.address}: revoked or unknown; get a new one, made with "
            "`rolloutmq keys new`"
        )
        gate.status = b"200"
        wait_for(watch, lambda: bool(push.poll(0, zmq.POLLOUT)) and not watch.problem)
        watch.close()
        push.close(0)


def test_a_fleet_of_refused_clients_asks_ever_more_seldom(gate: Gate) -> None:
    keys, now = gate.client(), 0.0
    with context() as own:
        push = sockets.client_dealer(own, gate.address, keys)
        watch = Handshakes(push, gate.address, keys)
        pauses = []
        for _ in range(12):
            until = time.monotonic() + LIMIT_S
            while watch.due == float("inf") and time.monotonic() < until:
                watch.look(now)
            pauses.append(watch.due - now)
            now = watch.due
            watch.look(now)
        assert pauses[0] <= handshakes.FIRST_S
        assert max(pauses) <= handshakes.LONGEST_S
        assert min(pauses[-2:]) >= handshakes.LONGEST_S / 2
        watch.close()
        push.close(0)


def test_a_request_tells_why_there_is_no_answer(gate: Gate) -> None:
    with (
        BlockingClient(gate.address, keys=gate.client()) as client,
        pytest.raises(KeyRefusedError, match=r"broker: key w-7 was refused by tcp://") as caught,
    ):
        client.request(GetInfo(), 1.0)
    assert isinstance(caught.value, BrokerUnavailableError)


async def test_a_client_of_an_event_loop_comes_back(gate: Gate) -> None:
    async with BrokerClient(gate.address, keys=gate.client()) as client:
        with pytest.raises(KeyRefusedError, match="key w-7 was refused"):
            await client.request(GetInfo(), 1.0)
        gate.status = b"200"
        asking = asyncio.create_task(client.request(GetInfo(), LIMIT_S))
        assert await asyncio.to_thread(gate.router.poll, int(LIMIT_S * 1e3))
        asking.cancel()
        await asyncio.wait({asking})


@pytest.mark.parametrize("wrong", ["no key", "another run"])
def test_a_key_of_another_run_and_none_are_told_apart(gate: Gate, wrong: str) -> None:
    keys = None if wrong == "no key" else CurveKeys("w-7", *key_pair(), key_pair()[0])
    told = (
        "it asks for a key" if keys is None else "with key w-7: it is the broker of other keys, or no broker"
    )
    until = time.monotonic() + LIMIT_S
    with BlockingClient(gate.address, keys=keys) as client:
        problem = ""
        while told not in problem and time.monotonic() < until:
            with pytest.raises(
                BrokerUnavailableError
            ) as caught:  # the first refusal may be a broker that just died
                client.request(GetInfo(), 0.5)
            problem = str(caught.value)
    assert isinstance(caught.value, KeyRefusedError)
    assert told in problem


async def test_a_search_tells_and_asks_seldom(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = gate.client()
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.2)
    monkeypatch.setattr(discovery, "keys_for", lambda _: keys)
    search = Search(Remote(gate.address, tmp_path / "w-7.key"))
    with context() as own:
        looking = asyncio.create_task(reach(search.where, own, search))
        async with asyncio.timeout(LIMIT_S):
            while "key w-7 was refused" not in search.problem:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        looking.cancel()
        await asyncio.wait({looking})


def wait_for(watch: Handshakes, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < until
        watch.look(time.monotonic())
