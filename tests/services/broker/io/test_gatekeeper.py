"""Who may enter by the listener, and what an answer survives."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.keys.watched_file import LOOK_S
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.broker.io.gatekeeper import Gatekeeper, KnownKeys


@pytest.fixture
def directory(tmp_path: Path) -> KeyDirectory:
    return KeyDirectory.create(tmp_path / "keys")


@pytest.fixture
def asker() -> Iterator[tuple[sockets.Socket, sockets.Socket]]:
    """The socket of the answers, and one that asks as libzmq does."""
    context = sockets.make_context()
    asks, answers = context.socket(zmq.DEALER), sockets.zap_router(context)
    asks.connect(sockets.ZAP_ADDRESS)
    yield asks, answers
    asks.close(0)
    answers.close(0)
    context.term()


def question(key: bytes, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"", b"1.0", b"7", sockets.ZAP_DOMAIN, b"10.0.0.7", b"", mechanism, key]


def public(key: str) -> bytes:
    found = z85.decode(key)
    assert isinstance(found, bytes)
    return found


def test_a_key_enters_under_its_name(directory: KeyDirectory) -> None:
    bundle = directory.new("w-1", Role.WORKER)
    known = KnownKeys(directory)
    assert known.verdict(public(bundle.public)) == (b"200", b"OK", b"w-1")
    assert known.verdict(bytes(32)) == (b"400", b"unknown key", b"")
    assert known.roles == {"w-1": Role.WORKER}


def test_changes_of_the_list_count(directory: KeyDirectory) -> None:
    known = KnownKeys(directory)
    bundle = directory.new("w-1", Role.WORKER)
    assert not known.look(1.0)
    assert known.verdict(public(bundle.public))[0] == b"200"
    directory.revoke("w-1")
    assert not known.look(1.0 + LOOK_S / 2)  # not looked at yet
    assert known.look(1.0 + LOOK_S) == {"w-1"}
    assert known.verdict(public(bundle.public)) == (b"400", b"key w-1 was revoked", b"")
    assert known.roles == {}
    assert not known.look(2.0)


def test_a_damaged_list_leaves_the_keys_of_before(
    directory: KeyDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = directory.new("w-1", Role.WORKER)
    known, whole = KnownKeys(directory), directory.authorized.read_bytes()
    for number, damage in enumerate((b"{", b"", b"\xff" * 100)):
        directory.authorized.write_bytes(damage)
        assert not known.look(1.0 + number)
        assert known.verdict(public(bundle.public))[0] == b"200"
    directory.authorized.unlink()
    assert not known.look(10.0)
    assert "keys not read, those of before stay error=" in caplog.text
    assert "authorized.json: is damaged" in caplog.text
    directory.authorized.write_bytes(whole)
    directory.authorized.chmod(0o600)
    directory.revoke("w-1")
    assert known.look(11.0) == {"w-1"}
    assert known.verdict(public(bundle.public))[0] == b"400"


def test_a_broker_does_not_start_with_a_damaged_list(directory: KeyDirectory) -> None:
    directory.authorized.write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"authorized\.json: is damaged"):
        KnownKeys(directory)


def test_answers_are_those_of_the_protocol(
    directory: KeyDirectory, asker: tuple[sockets.Socket, sockets.Socket]
) -> None:
    asks, answers = asker
    bundle = directory.new("w-1", Role.WORKER)
    gate, refused = Gatekeeper(answers, KnownKeys(directory)), list[str]()
    for sent, status, name in (
        (question(public(bundle.public)), b"200", b"w-1"),
        (question(bytes(32)), b"400", b""),
        (question(b""), b"400", b""),
        (question(b"", b"NULL"), b"400", b""),
        (question(public(bundle.public))[:-1], b"400", b""),
        (question(public(bundle.public))[:3], b"400", b""),
    ):
        asks.send_multipart(sent)
        assert answers.poll(5000)
        refused += gate.answer()
        assert asks.poll(5000)
        got = asks.recv_multipart()
        assert (got[:3], got[3], got[5]) == ([b"", b"1.0", b"7"], status, name)
    assert refused == ["unknown key", "unknown key", "no key", "no key", "no key"]


def test_an_error_refuses_one_and_no_other(
    directory: KeyDirectory,
    asker: tuple[sockets.Socket, sockets.Socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asks, answers = asker
    bundle = directory.new("w-1", Role.WORKER)
    known = KnownKeys(directory)
    gate, right = Gatekeeper(answers, known), known.verdict

    def verdict(key: bytes) -> tuple[bytes, bytes, bytes]:
        if key == bytes(32):
            raise RuntimeError("a defect")
        return right(key)

    monkeypatch.setattr(known, "verdict", verdict)
    for key in (bytes(32), public(bundle.public)):
        asks.send_multipart(question(key))
    asks.send_multipart([b"", b"?"])  # no question at all: it gets no answer
    asks.send_multipart(question(public(bundle.public)))
    until = time.monotonic() + 5
    got: list[bytes] = []
    while len(got) < 3 and time.monotonic() < until:
        gate.answer()
        if asks.poll(10):
            got.append(asks.recv_multipart()[3])
    assert got == [b"400", b"200", b"200"]
    assert "question who may enter not answered" in caplog.text
