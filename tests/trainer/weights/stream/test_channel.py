"""One connection: who gets in, what is refused, and what a peer that is slow, gone or hostile costs."""

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.trainer.weights.stream.channels import SECRET, door, pair

from rolloutmq.bus.transport.keys import ticket
from rolloutmq.schemas.errors import (
    LimitExceededError,
    MalformedError,
    PackageMissingError,
    WeightsDamagedError,
    WeightsNotSentError,
)
from rolloutmq.trainer.weights.stream import channel as channel_module
from rolloutmq.trainer.weights.stream.channel import LOADED, MAGIC, Channel, require_cipher
from rolloutmq.trainer.weights.stream.messages import HEADER, Kind

SEALED = [False, pytest.param(True, id="sealed")]


@pytest.mark.parametrize("sealed", SEALED)
def test_frames_arrive_as_they_were_sent(sealed: bool) -> None:
    if sealed:
        pytest.importorskip("cryptography")
    with pair(sealed=sealed) as (sender, receiver):
        assert sender.sealed == receiver.sealed == sealed
        for data in (b"", b"x", bytes(range(256)) * 4096):
            sender.send(Kind.CHUNK, b"head", data)
            frame = receiver.receive()
            into = bytearray(len(data))
            receiver.data_into(frame, memoryview(into))
            assert (frame.kind, frame.body, bytes(into)) == (Kind.CHUNK, b"head", data)
        receiver.send(Kind.FOLLOW, b"back")
        assert sender.receive().body == b"back"


@pytest.mark.parametrize("sealed", SEALED)
def test_loaded_frames_are_sent_as_they_were_when_they_were_loaded(sealed: bool) -> None:
    if sealed:
        pytest.importorskip("cryptography")
    with pair(sealed=sealed) as (sender, receiver):
        loaded, sent = [], []
        for number in range(LOADED + 1):
            data = np.full(1000 + number, number, np.uint8)
            sent.append(data.tobytes())
            loaded.append(sender.load(Kind.CHUNK, b"head", data))
            data[:] = 255
        for one, wanted in zip(loaded, sent, strict=True):
            sender.unload(one)
            frame = receiver.receive()
            into = bytearray(frame.data)
            receiver.data_into(frame, memoryview(into))
            assert (frame.kind, frame.body, bytes(into)) == (Kind.CHUNK, b"head", wanted)


def test_a_ticket_of_another_secret_is_refused() -> None:
    with door() as made:
        wrong = ticket.issue(ticket.new_secret(), "x")
        with pytest.raises(WeightsNotSentError, match="does not have the secret of the ticket"):
            Channel.dial("127.0.0.1", made.port, wrong, sealed=False)
        assert "weights: not sent to or by receiver: the connection was closed" in made.refused()


def test_a_shown_ticket_without_its_key_is_refused() -> None:
    with door() as made:
        stolen = ticket.issue(SECRET, "x")
        with socket.create_connection(("127.0.0.1", made.port)) as sock:
            sock.sendall(MAGIC + struct.pack("<H", len(stolen.shown)) + stolen.shown + bytes(16))
            sock.recv(len(MAGIC) + 17 + 32, socket.MSG_WAITALL)
            sock.sendall(bytes(32))
            assert "does not have the key of its ticket" in made.refused()


def test_a_ticket_that_is_over_is_refused() -> None:
    with door() as made:
        old = ticket.issue(SECRET, "x", now=time.time() - 1000)
        with pytest.raises(WeightsNotSentError, match="no answer to the ticket, which it may have refused"):
            Channel.dial("127.0.0.1", made.port, old, sealed=False)
        assert made.refused() == "ticket for weights: no longer valid; get a new one"


def test_encryption_cannot_be_turned_off_on_the_way() -> None:
    with door() as made, pytest.raises(WeightsNotSentError, match="it does not encrypt"):
        Channel.dial("127.0.0.1", made.port, ticket.issue(SECRET, "x"), sealed=True)


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", MAGIC + b"\xff\xff", b"\0" * 64])
def test_strangers_are_refused(hello: bytes) -> None:
    with door() as made, socket.create_connection(("127.0.0.1", made.port)) as sock:
        sock.sendall(hello)
        assert "is no receiver of this version" in made.refused()


def test_a_silent_stranger_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.05)
    with door() as made, socket.create_connection(("127.0.0.1", made.port)):
        assert "no progress in time" in made.refused()


def test_a_peer_that_trickles_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "FRAME_S", 0.1)
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.05)
    with door() as made, socket.create_connection(("127.0.0.1", made.port)) as sock:
        with suppress(OSError):
            for byte in MAGIC + bytes(100):
                sock.send(bytes((byte,)))
                if made.error:
                    break
                threading.Event().wait(0.02)
        assert "a frame took more than" in made.refused()


def raw(head: bytes, rest: bytes = b"") -> Callable[[Channel], None]:
    return lambda sender: sender._send(head + rest)


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (raw(HEADER.pack(6, 0, 1 << 30)), LimitExceededError, "data of a frame of weights: above the limit"),
        (raw(HEADER.pack(6, 1 << 31, 0)), LimitExceededError, "body of a frame of weights: above the limit"),
        (raw(HEADER.pack(99, 0, 0)), MalformedError, "unknown frame 99"),
        (lambda sender: sender.close(), WeightsNotSentError, "the connection was closed"),
        (lambda sender: (raw(b"\1\0")(sender), sender.close()), WeightsNotSentError, "was closed"),
    ],
    ids=["data", "body", "kind", "gone", "truncated"],
)
def test_impossible_frames_are_refused_before_they_are_read(
    said: Callable[[Channel], None], error: type[Exception], text: str
) -> None:
    with pair() as (sender, receiver):
        said(sender)
        with pytest.raises(error, match=text):
            receiver.receive()


def change(data: bytearray, at: int) -> bytes:
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize("at", [9, -1], ids=["body", "tag"])
def test_a_sealed_frame_that_was_changed_is_refused(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    with pair(sealed=True) as (sender, receiver):
        send: Any = sender._send
        monkeypatch.setattr(
            sender, "_send", lambda data, **how: send(change(bytearray(data), at), **how), raising=False
        )
        sender.send(Kind.DONE, b"body")
        with pytest.raises(WeightsDamagedError, match="a frame was changed on its way"):
            receiver.receive()


def test_a_sealed_frame_cannot_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    with pair(sealed=True) as (sender, receiver):
        send: Any = sender._send
        monkeypatch.setattr(sender, "_send", lambda data, **_: send(bytes(data) * 2), raising=False)
        sender.send(Kind.DONE, b"body")
        assert receiver.receive().body == b"body"
        with pytest.raises(WeightsDamagedError):
            receiver.receive()


def test_a_missing_cipher_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(
        PackageMissingError, match=r"cryptography is missing: run pip install 'rolloutmq\[cluster\]'"
    ):
        require_cipher()


def test_another_thread_can_end_a_wait() -> None:
    with pair() as (sender, receiver):
        timer = threading.Timer(0.05, receiver.interrupt)
        timer.start()
        with pytest.raises(WeightsNotSentError, match="the connection was closed"):
            receiver.receive()
        timer.join()
        assert sender.peer == "receiver"
