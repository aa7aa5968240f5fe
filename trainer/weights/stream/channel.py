"""Connection of a sender and a receiver of weights: handshake, frames, encryption. Blocks; for one thread at a time.

    receiver  magic, ticket, its nonce
    sender    magic, sealed?, its nonce, proof
    receiver  proof                                   then frames, see `messages`

A proof is a keyed hash of all bytes before, under the key of the ticket: each side knows then that the other has the
key, and that nobody has turned encryption off. In a sealed connection each frame's body and data are encrypted by
AES-256-GCM with a key for each direction of this connection and a counter as nonce; the header is authenticated with
them. So a frame that was changed, repeated, moved or left out is refused.

The kernel's time limits apply to each call; a frame has `FRAME_S` in all, so a peer that trickles bytes is cut off.
"""

import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np

from rolloutmq.bus.transport.keys.ticket import TICKET_BYTES, Pass
from rolloutmq.schemas.errors import (
    LimitExceededError,
    MalformedError,
    PackageMissingError,
    WeightsDamagedError,
    WeightsNotSentError,
    install_remedy,
)
from rolloutmq.trainer.weights.stream.chunks import CHUNK_BYTES, Bytes
from rolloutmq.trainer.weights.stream.messages import HEADER, SMALL_BYTES, Kind

MAGIC: Final = b"RMQ-WEIGHTS-3\n"
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
TAG_BYTES: Final = 16
HANDSHAKE_S: Final = 5.0
STALL_S: Final = 15.0
"""Seconds without a byte after which a peer counts as gone; a sender without news sends a frame more often."""
FRAME_S: Final = 30.0
"""Longest time of one frame: a chunk at 35 kB/s."""

LOADED: Final = 1
"""Frames that may be loaded while one is sent; with four, transfers took longer on two busy cores."""


class Frame(NamedTuple):
    """A received frame; `data` bytes follow, for `Channel.data_into`."""

    kind: Kind
    body: bytes
    data: int
    head: bytes


class Loaded(NamedTuple):
    """A frame to be sent: everything before its data, and the data."""

    start: bytes
    data: Any


class Cipher(Protocol):
    """Encryption of one direction; each call uses the next nonce."""

    def seal(self, data: Any, authenticated: bytes, into: Any) -> None:
        """Encrypt into a buffer of the size of the data and the tag."""
        ...

    def open(self, data: Any, authenticated: bytes, into: Any) -> None:
        """Decrypt into a buffer of the size of the data. ValueError: The tag is wrong."""
        ...


class Channel:
    """One connection after its handshake. Make it by `dial` or `accept`."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = sock
        self._out: Cipher | None = None
        self._in: Cipher | None = None
        self._buffer = bytearray()
        self._buffers: list[Bytes] = [np.empty(0, np.uint8)] * (LOADED + 1)
        self._loading = 0

    @classmethod
    def dial(cls, host: str, port: int, ticket: Pass, *, sealed: bool) -> Self:
        """Connect to a sender and prove the ticket. Blocks for up to two time limits of the handshake.

        Args:
            sealed: Refuse a sender that does not encrypt.

        Raises:
            WeightsNotSentError: There is no sender, it refuses the ticket, or it does not encrypt.
            PackageMissingError: The sender encrypts, and the package for it is not installed.
        """
        peer = f"{host}:{port}"
        try:
            sock = socket.create_connection((host, port), HANDSHAKE_S)
        except OSError as error:
            raise lost(peer, str(error)) from None
        return cls._opened(sock, peer, lambda one: one._introduce(ticket, sealed=sealed))

    def _introduce(self, ticket: Pass, *, sealed: bool) -> None:
        mine = secrets.token_bytes(NONCE_BYTES)
        hello = MAGIC + struct.pack("<H", len(ticket.shown)) + ticket.shown + mine
        self._send(hello)
        try:
            answer = self.exactly(len(MAGIC) + 1 + NONCE_BYTES)
            proof = self.exactly(PROOF_BYTES)
        except WeightsNotSentError as error:
            raise lost(
                self.peer, f"no answer to the ticket, which it may have refused ({error.why})"
            ) from None
        if not answer.startswith(MAGIC):
            raise MalformedError(f"weights: {self.peer} is no sender of this version")
        keys = Keys(ticket.key, hello + answer)
        if not hmac.compare_digest(proof, keys.proof(b"sender")):
            raise lost(self.peer, "it does not have the secret of the ticket")
        if sealed and not answer[len(MAGIC)]:
            raise lost(self.peer, "it does not encrypt, and this receiver asks for it")
        self._send(keys.proof(b"receiver"))
        if answer[len(MAGIC)]:
            self._out, self._in = keys.ciphers(b"receiver", b"sender")

    @classmethod
    def accept(cls, sock: socket.socket, peer: str, key_of: Any, *, sealed: bool) -> Self:
        """Let a receiver prove its ticket.

        Args:
            sock: Owned by the channel from here on.
            key_of: Returns the key of a shown ticket, or raises MalformedError.
            sealed: Encrypt.

        Raises:
            MalformedError: It is no receiver of this version, or its ticket is not valid.
            WeightsNotSentError: It is gone.
        """
        return cls._opened(sock, peer, lambda one: one._examine(key_of, sealed=sealed))

    @classmethod
    def _opened(cls, sock: socket.socket, peer: str, shake_hands: Callable[[Self], None]) -> Self:
        """Return the channel after its handshake, which has a time limit of its own; close it if that fails."""
        channel = cls(sock, peer)
        try:
            set_limits(sock, HANDSHAKE_S)
            shake_hands(channel)
            set_limits(sock, STALL_S)
        except BaseException:
            channel.close()
            raise
        return channel

    def _examine(self, key_of: Any, *, sealed: bool) -> None:
        start = self.exactly(len(MAGIC) + 2)
        size = struct.unpack_from("<H", start, len(MAGIC))[0]
        if not start.startswith(MAGIC) or size > TICKET_BYTES:
            raise MalformedError(f"weights: {self.peer} is no receiver of this version")
        rest = self.exactly(size + NONCE_BYTES)
        answer = MAGIC + bytes((sealed,)) + secrets.token_bytes(NONCE_BYTES)
        keys = Keys(key_of(rest[:size]), start + rest + answer)
        self._send(answer + keys.proof(b"sender"))
        if not hmac.compare_digest(self.exactly(PROOF_BYTES), keys.proof(b"receiver")):
            raise MalformedError(f"weights: {self.peer} does not have the key of its ticket")
        if sealed:
            self._out, self._in = keys.ciphers(b"sender", b"receiver")

    @property
    def sealed(self) -> bool:
        """Whether the frames are encrypted."""
        return self._out is not None

    def send(self, kind: Kind, body: bytes = b"", data: Any = b"") -> None:
        """Send a frame. Blocks while the peer does not read.

        Raises:
            WeightsNotSentError: The peer is gone, or has not read for `STALL_S`.
        """
        into = np.empty(len(data) + TAG_BYTES, np.uint8) if self.sealed and len(data) else None
        self._transmit(self._packed(kind, body, data, into))

    def load(self, kind: Kind, body: bytes, data: Bytes) -> "Loaded":
        """Take over the next frame to be sent, for `unload`; its data may change afterwards. Never waits for the peer.

        Another thread may unload frames loaded before. A loaded frame is valid until `LOADED` further ones are loaded.
        """
        into = self._next_buffer(len(data) + TAG_BYTES)
        if self._out is not None:
            return self._packed(kind, body, data, into)
        np.copyto(into[: len(data)], data)
        return self._packed(kind, body, into[: len(data)])

    def load_record(self, data: Bytes) -> "Loaded":
        """Encrypt bytes that follow a frame, for `unload`; as `load` without a header. For a sealed connection."""
        assert self._out is not None
        into = self._next_buffer(len(data) + TAG_BYTES)
        self._out.seal(data, b"", into)
        return Loaded(b"", into)

    def push(self, *parts: Any) -> int:
        """Send as much of clear bytes that follow a frame as the network takes at once; return how many. Never waits.

        If that is not all, call `wait` and try again.

        Raises:
            WeightsNotSentError: The peer is gone.
        """
        assert self._out is None
        try:
            return self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost(self.peer, _why(error)) from None

    def _next_buffer(self, size: int) -> Bytes:
        """Return a buffer that is used again after `LOADED` others."""
        self._loading = (self._loading + 1) % len(self._buffers)
        if self._buffers[self._loading].size < size:
            self._buffers[self._loading] = np.empty(CHUNK_BYTES + TAG_BYTES, np.uint8)
        return self._buffers[self._loading][:size]

    def wait(self) -> None:
        """Wait until the network takes more.

        Raises:
            WeightsNotSentError: The peer has not read for `STALL_S`.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(1e3 * STALL_S):
            raise lost(self.peer, "no progress in time")

    def unload(self, loaded: "Loaded") -> None:
        """Send a loaded frame. Blocks and raises as `send`."""
        self._transmit(loaded)

    def _packed(self, kind: Kind, body: bytes, data: Any, into: Any = None) -> "Loaded":
        """Return a frame as it is sent; sealed data are put into the buffer."""
        head = HEADER.pack(kind, len(body), len(data))
        if self._out is None:
            return Loaded(head + body, data)
        sealed = np.empty(len(body) + TAG_BYTES, np.uint8)
        self._out.seal(body, head, sealed)
        if len(data):
            self._out.seal(data, head, into)
        return Loaded(head + sealed.tobytes(), into if len(data) else b"")

    def _transmit(self, loaded: "Loaded") -> None:
        if loaded.start:
            self._send(loaded.start, more=len(loaded.data) > 0)
        if len(loaded.data):
            self._send(loaded.data)

    def receive(self, limit: int = SMALL_BYTES) -> Frame:
        """Receive a frame without its data. Blocks.

        Raises:
            WeightsNotSentError: The peer is gone, or silent for `STALL_S`.
            LimitExceededError, MalformedError, WeightsDamagedError: The frame is too large, unknown, or was changed.
        """
        head = self.exactly(HEADER.size)
        number, size, data = HEADER.unpack(head)
        if size > limit:
            raise LimitExceededError("body of a frame of weights", size, limit)
        if data > CHUNK_BYTES:
            raise LimitExceededError("data of a frame of weights", data, CHUNK_BYTES)
        try:
            kind = Kind(number)
        except ValueError:
            raise MalformedError(f"weights: unknown frame {number} of {self.peer}") from None
        body = self.exactly(size + (TAG_BYTES if self._in else 0))
        if self._in is not None:
            opened = bytearray(size)
            self._open(body, head, opened)
            body = bytes(opened)
        return Frame(kind, body, data, head)

    def data_into(self, frame: Frame, into: memoryview) -> None:
        """Receive the data of a frame into a buffer of its size. If that fails, the buffer holds anything.

        Raises:
            WeightsNotSentError, WeightsDamagedError: As for `receive`.
        """
        if self._in is None or not frame.data:
            self.fill(into)
            return
        size = frame.data + TAG_BYTES
        if len(self._buffer) < size:
            self._buffer = bytearray(CHUNK_BYTES + TAG_BYTES)
        with memoryview(self._buffer)[:size] as sealed:
            self.fill(sealed)
            self._open(sealed, frame.head, into)

    def records(self, sizes: Iterable[int]) -> Iterator[Bytes]:
        """Receive encrypted bytes that follow a frame, as many as are asked for; for `open_record`.

        Another thread may open those before. One is valid until `LOADED` further ones are received.
        """
        for size in sizes:
            record = self._next_buffer(size + TAG_BYTES)
            self.fill(record)
            yield record

    def open_record(self, record: Bytes, into: Any) -> None:
        """Decrypt a record into a buffer of the size of its data. If that fails, the buffer holds anything.

        Raises:
            WeightsDamagedError: It was changed, or comes in another order.
        """
        self._open(record, b"", into)

    def _open(self, data: Any, head: bytes, into: Any) -> None:
        assert self._in is not None
        try:
            self._in.open(data, head, into)
        except ValueError:
            raise WeightsDamagedError(self.peer, "a frame was changed on its way") from None

    def exactly(self, count: int) -> bytes:
        """Receive clear bytes that follow a frame. Blocks; raises as `receive`."""
        data = bytearray(count)
        with memoryview(data) as view:
            self.fill(view)
        return bytes(data)

    def fill(self, view: Any, until: float | None = None) -> None:
        """Receive clear bytes that follow a frame into a buffer. Blocks; raises as `receive`.

        Args:
            view: A buffer of bytes.
            until: Time of the clock `monotonic` at which the peer counts as too slow; None is `FRAME_S` from now.
        """
        done, until = 0, time.monotonic() + FRAME_S if until is None else until
        while done < len(view):
            try:
                got = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise lost(self.peer, _why(error)) from None
            if not got:
                raise lost(self.peer, "the connection was closed")
            done += got
            if done < len(view) and time.monotonic() > until:
                raise lost(self.peer, f"a frame took more than {FRAME_S:.0f} s")

    def _send(self, data: Any, *, more: bool = False) -> None:
        try:
            self._socket.sendall(data, socket.MSG_MORE if more else 0)
        except OSError as error:
            raise lost(self.peer, _why(error)) from None

    def interrupt(self) -> None:
        """Let the thread that uses the connection find it closed; for any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._socket.close()


class Keys:
    """Proofs and ciphers of one connection.

    Args:
        key: That of the ticket.
        said: Everything that both sides sent before the proofs.
    """

    def __init__(self, key: bytes, said: bytes) -> None:
        self._key = key
        self._said = hashlib.sha256(said).digest()

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + self._said, hashlib.sha256)

    def proof(self, side: bytes) -> bytes:
        """Return the proof of one side."""
        return self._derived(b"proof of the " + side)

    def ciphers(self, mine: bytes, theirs: bytes) -> tuple[Cipher, Cipher]:
        """Return the cipher of what this side sends, and that of what it receives.

        Raises:
            PackageMissingError: The package is not installed.
        """
        return AesGcm(self._derived(b"data of the " + mine)), AesGcm(self._derived(b"data of the " + theirs))


def require_cipher() -> None:
    """Check that transfers can be encrypted.

    Raises:
        PackageMissingError: The package is not installed.
    """
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PackageMissingError(
            "the package cryptography",
            f"{install_remedy('cluster')}; the stream of weights is encrypted with it",
        ) from None


class AesGcm:
    """AES-256-GCM with a counter as nonce."""

    def __init__(self, key: bytes) -> None:
        require_cipher()
        from cryptography.exceptions import InvalidTag  # pyright: ignore[reportMissingImports]
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # pyright: ignore[reportMissingImports]

        self._aead: Any = AESGCM(key)
        self._wrong_tag: type[Exception] = InvalidTag
        self._count = 0

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "little")

    def seal(self, data: Any, authenticated: bytes, into: Any) -> None:
        """See `Cipher.seal`."""
        self._aead.encrypt_into(self._nonce(), data, authenticated, into)

    def open(self, data: Any, authenticated: bytes, into: Any) -> None:
        """See `Cipher.open`."""
        try:
            self._aead.decrypt_into(self._nonce(), data, authenticated, into)
        except self._wrong_tag:
            raise ValueError("tag") from None


def set_limits(sock: socket.socket, seconds: float) -> None:
    """Let each call on a blocking socket fail after so many seconds without progress.

    Python's own time limit makes the socket non-blocking, and a chunk would take a system call for each packet.
    """
    sock.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def lost(peer: str, why: str) -> WeightsNotSentError:
    """Return the error of a transfer that its peer or the network ended."""
    return WeightsNotSentError(f"or by {peer}", why, away=True)


def _why(error: OSError) -> str:
    return "no progress in time" if isinstance(error, BlockingIOError) else str(error)
