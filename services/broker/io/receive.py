"""Receiving messages from the broker's sockets, within limits checked before decoding."""

import time
from typing import Final, NamedTuple

import msgspec
import zmq

from rolloutmq.bus.transport.sockets import Socket
from rolloutmq.schemas.errors import LimitExceededError
from rolloutmq.schemas.wire.control import WorkerBeat
from rolloutmq.schemas.wire.envelope import ENVELOPE_LIMIT_BYTES, FRAMES_LIMIT
from rolloutmq.schemas.wire.joining import JoiningRequest
from rolloutmq.schemas.wire.requests import DeclareTables, Goodbye, RegisterProducer, Request, Sync
from rolloutmq.schemas.wire.tasks import HandBack, TakeTasks
from rolloutmq.services.broker.actions import Route

COPY_BELOW_BYTES: Final = 64 << 10
"""A smaller frame is copied, since it would keep the library's whole receive buffer alive."""
ROUTE_LIMIT_FRAMES: Final = 8
"""Most frames of a return address, including the peer's correlation frames."""
ROUTE_LIMIT_BYTES: Final = 1024


class Asked(NamedTuple):
    """A request that was read and not answered yet."""

    route: Route
    request: Request
    sender: str | None
    """As of `Door.sender_of`; None without a door."""
    nbytes: int


IN_LINE: Final = (
    RegisterProducer, DeclareTables, Sync, Goodbye, WorkerBeat, TakeTasks, HandBack, JoiningRequest,
)  # fmt: skip
"""Requests that a thousand producers and workers send at once when a broker comes back. A trainer's wait behind them
would hold up the groups of all. So these wait in line, and all others are answered as they are read: they are few, or
keep their sender from asking again."""


class Arrival(msgspec.Struct):
    """One message of a producer, within its limits; `head` is the frame of `first`."""

    head: zmq.Frame
    first: bytes
    frames: list[bytes | zmq.Frame]
    nbytes: int


def receive(socket: Socket, limit_bytes: int) -> Arrival:
    """Receive one message of a producer; LimitExceededError, and the whole message dropped, above a limit."""
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    more = frame.more
    if len(frame) > ENVELOPE_LIMIT_BYTES:
        _skip(socket, more)
        raise LimitExceededError("size of the envelope", len(frame), ENVELOPE_LIMIT_BYTES)
    message = Arrival(frame, frame.bytes, [], 0)
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        more = frame.more
        message.nbytes += len(frame)
        if len(message.frames) + 2 > FRAMES_LIMIT:
            _skip(socket, more)
            raise LimitExceededError("frames of a message", FRAMES_LIMIT + 1, FRAMES_LIMIT)
        if message.nbytes > limit_bytes:
            _skip(socket, more)
            raise LimitExceededError("bytes of a message", message.nbytes, limit_bytes)
        message.frames.append(frame if len(frame) >= COPY_BELOW_BYTES else frame.bytes)
    return message


def receive_small(socket: Socket, limit_bytes: int) -> list[bytes]:
    """Receive one control message; empty if it is above a limit."""
    frames: list[bytes] = []
    nbytes = 0
    more = True
    while more:
        frame = socket.recv(zmq.NOBLOCK)
        more = bool(socket.getsockopt(zmq.RCVMORE))
        nbytes += len(frame)
        if len(frames) > ROUTE_LIMIT_FRAMES or nbytes > limit_bytes:
            _skip(socket, more)
            return []
        frames.append(frame)
    return frames


def receive_small_frames(socket: Socket, limit_bytes: int) -> list[zmq.Frame]:
    """Receive one control message as frames, which tell their sender; empty if it is above a limit."""
    frames: list[zmq.Frame] = []
    nbytes = 0
    more = True
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        more = frame.more
        nbytes += len(frame)
        if len(frames) > ROUTE_LIMIT_FRAMES or nbytes > limit_bytes:
            _skip(socket, more)
            return []
        frames.append(frame)
    return frames


def route_of(frames: list[bytes]) -> Route | None:
    """Return the frames up to and including the first empty one; the first frame is the peer's identity."""
    if b"" not in frames[1:]:
        return None
    route = tuple(frames[: frames.index(b"", 1) + 1])
    return route if sum(map(len, route)) <= ROUTE_LIMIT_BYTES else None


def discard(socket: Socket, until: float) -> None:
    """Discard every whole message, but begin none after `until`, in monotonic seconds."""
    try:
        while time.monotonic() < until:
            _skip(socket, more=True)
    except zmq.Again:
        return


def _skip(socket: Socket, more: bool) -> None:
    while more:
        more = socket.recv(zmq.NOBLOCK, copy=False).more
