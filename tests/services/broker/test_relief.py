"""Connections that are cut, and those that are not; what the process holds; what a cut leaves on `ingest`."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tests.services.broker.bench import Bench

from rolloutmq.bus import sockets
from rolloutmq.schemas.control import SetValues, ValuesSet
from rolloutmq.services.broker import relief
from rolloutmq.services.broker.listening import address_of
from rolloutmq.services.broker.receiving import discard
from rolloutmq.services.broker.relief import Accounts, Relief, cut, held_bytes, trim

MIB = 1 << 20
LIMIT_MS = 5000


@pytest.fixture
def context() -> Iterator[sockets.Context]:
    made = sockets.make_context()
    yield made
    made.term()


def _pair(context: sockets.Context, address: str) -> tuple[sockets.Socket, sockets.Socket]:
    pull = sockets.ingest_pull(context, MIB)
    pull.bind(address)
    return pull, sockets.producer_push(context, address_of(pull))


def _sent(push: sockets.Socket, pull: sockets.Socket, *frames: bytes) -> list[bytes]:
    """Send a message until it arrives; what was on its way when the connection ended is lost."""
    until = time.monotonic() + LIMIT_MS / 1e3
    while time.monotonic() < until:
        if push.poll(50, zmq.POLLOUT):
            push.send_multipart(frames, zmq.NOBLOCK)
        if pull.poll(50):
            return pull.recv_multipart()
    raise AssertionError("it did not arrive")


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_whoever_came_by_the_address_is_cut_and_comes_back(
    context: sockets.Context, tmp_path: Path, kind: str
) -> None:
    address, other = (
        (f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b") if kind == "ipc" else 2 * ("tcp://127.0.0.1:*",)
    )
    pull, push = _pair(context, address)
    pull_2, push_2 = _pair(context, other)
    with pull, push, pull_2, push_2:
        assert _sent(push, pull, b"1") == _sent(push_2, pull_2, b"1") == [b"1"]
        assert cut([address_of(pull)]) == 1
        assert cut(["inproc://nobody"]) == 0
        assert _sent(push, pull, b"2") == _sent(push_2, pull_2, b"2") == [b"2"]


def test_only_what_is_beyond_is_looked_into(
    context: sockets.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [0]
    trims: list[int] = []
    monkeypatch.setattr(relief, "held_bytes", lambda: held[0])
    monkeypatch.setattr(relief, "trim", lambda: trims.append(held[0]))
    pull, push = _pair(context, f"ipc://{tmp_path}/a")
    with pull, push:
        it = Relief([pull], 100, lambda: 1000)
        assert not it.check(0.0)
        held[0] = 1101
        assert not it.check(it.due - 0.001)
        assert not trims
        assert it.check(it.due)
        assert trims == [1101]


def test_what_waits_is_dropped_whole(context: sockets.Context, tmp_path: Path) -> None:
    pull, push = _pair(context, f"ipc://{tmp_path}/a")
    with pull, push:
        assert push.poll(LIMIT_MS, zmq.POLLOUT)
        for _ in range(10):
            push.send_multipart([b"envelope", b"body", b"more"])
        assert pull.poll(LIMIT_MS)
        discard(pull, time.monotonic())
        assert pull.recv() == b"envelope"
        assert pull.recv_multipart() == [b"body", b"more"]
        while pull.poll(100):
            discard(pull, time.monotonic() + LIMIT_MS / 1e3)
        assert _sent(push, pull, b"new") == [b"new"]


def test_what_this_process_holds_is_seen() -> None:
    before = held_bytes()
    block = b"x" * (64 * MIB)
    assert held_bytes() - before > 60 * MIB
    del block
    trim()
    assert held_bytes() - before < 16 * MIB


def test_a_mark_that_was_raised_is_in_the_accounts() -> None:
    bench = Bench()
    accounts = Accounts(bench.core, None, None)
    before = accounts()
    bench.ask(SetValues(values={"broker.high_bytes": 1 << 32}), ValuesSet)
    assert accounts() - before > 1 << 32
