"""Events: listening to the broker's `events`, and publishing to its `publish`.

A SUB matches prefixes, so that `ack.w-1` would also bring `ack.w-10`. A topic is therefore asked for in one of two
forms, and what does not match as a whole is dropped here: a family ends in `.` (or is empty, which is everything); any
other topic stands for itself alone. Events may be lost; see the loss arguments in `bus.sockets`.
"""

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import zmq

from rolloutmq.bus import codec, sockets
from rolloutmq.bus.sockets import Channel, Context, Scope
from rolloutmq.schemas.errors import ClosedError
from rolloutmq.schemas.message import Message

Published = tuple[bytes, bytes]
"""Topic and payload of one event, as they came."""


def matches(topic: bytes, wanted: Iterable[bytes]) -> bool:
    """Whether a topic is one of those wanted, whole topics compared whole and families by prefix."""
    return any(
        topic.startswith(want) if not want or want.endswith(b".") else topic == want for want in wanted
    )


def _published(frames: list[bytes], wanted: tuple[bytes, ...]) -> Published | None:
    if len(frames) == 2 and matches(frames[0], wanted):
        return frames[0], frames[1]
    return None


class Subscriber:
    """Listens from an event loop: `async with Subscriber(address, topics) as s: async for topic, payload in s`.

    The address is that of the broker's `events`. A cancelled wait takes nothing.
    """

    def __init__(self, address: str, topics: Iterable[bytes], context: Context | None = None) -> None:
        self.address = address
        self.topics = tuple(topics)
        self._lent = context
        self._open: tuple[Scope, Channel] | None = None

    async def __aenter__(self) -> Self:
        scope = Scope(self._lent)
        self._open = scope, Channel(scope.connect(sockets.subscriber, self.address, self.topics))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._open is not None:
            scope, channel = self._open
            self._open = None
            channel.close()
            scope.end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Published:
        while True:
            if self._open is None:
                raise StopAsyncIteration
            try:
                event = _published(await self._open[1].receive(), self.topics)
            except ClosedError:
                raise StopAsyncIteration from None
            if event is not None:
                return event

    def try_next(self) -> Published | None:
        """Take the next event that has arrived, or None; never waits."""
        while self._open is not None:
            frames = self._open[1].try_receive()
            if frames is None:
                return None
            if (event := _published(frames, self.topics)) is not None:
                return event
        return None


class BlockingSubscriber:
    """Listens from a thread without an event loop."""

    def __init__(self, address: str, topics: Iterable[bytes], context: Context | None = None) -> None:
        self.topics = tuple(topics)
        self._scope = Scope(context)
        self._socket = self._scope.connect(sockets.subscriber, address, self.topics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def poll(self, timeout_s: float) -> Published | None:
        """Wait for the next event; None if there was none in time."""
        if self._socket.closed:
            raise ClosedError
        until = time.monotonic() + timeout_s
        while True:
            left_ms = max(0, round((until - time.monotonic()) * 1e3))
            if not self._socket.poll(left_ms):
                return None
            event = _published(self._socket.recv_multipart(zmq.NOBLOCK), self.topics)
            if event is not None:
                return event

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._socket.close()
        self._scope.end()


class Publisher:
    """Publishes to the broker, which forwards `telemetry.*`, `policy` and `step`. Never blocks; drops instead.

    The address is that of the broker's `publish`. For one thread at a time.
    """

    def __init__(self, address: str, context: Context | None = None) -> None:
        self._scope = Scope(context)
        self._socket = self._scope.connect(sockets.publisher, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, topic: bytes, message: Message) -> None:
        """Send one event to whoever listens now."""
        if self._socket.closed:
            raise ClosedError
        self._socket.send_multipart([topic, codec.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket, giving the last events half a second to leave. May be called twice."""
        self._socket.close()
        self._scope.end()
