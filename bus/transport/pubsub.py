"""Publish and subscribe: clients of the broker's `events` and `publish` sockets.

A SUB matches prefixes, so `ack.w-1` would also receive `ack.w-10`. A wanted topic that ends in `.`, or is empty, means
every topic with that prefix; any other means only itself, and other matches are dropped here. Events may be lost; see
the loss arguments in `bus.transport.sockets`.
"""

import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

import zmq

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.keys.bundle import CurveKeys
from rolloutmq.bus.transport.keys.handshakes import Handshakes, watched
from rolloutmq.bus.transport.sockets import Channel, Context, Scope
from rolloutmq.bus.transport.way.route import Route, is_short
from rolloutmq.schemas.errors import ClosedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import Message

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Time between two looks at the handshakes of a blocking subscriber."""

Published = tuple[bytes, bytes]
"""Topic and encoded payload of one event."""


def matches(topic: bytes, wanted: Iterable[bytes]) -> bool:
    """Return whether a topic is wanted: equal to a whole topic, or with the prefix of a family."""
    return any(
        topic.startswith(want) if not want or want.endswith(b".") else topic == want for want in wanted
    )


def _published(frames: list[bytes], wanted: tuple[bytes, ...]) -> Published | None:
    if len(frames) == 2 and matches(frames[0], wanted):
        return frames[0], frames[1]
    return None


def _close(socket: sockets.Socket, handshakes: Handshakes | None) -> None:
    if handshakes is not None and not socket.closed:
        handshakes.close()
    socket.close()


class Subscriber:
    """Subscriber for an event loop: `async with Subscriber(address, topics) as s: async for topic, payload in s`.

    The address is that of the broker's `events`. A cancelled wait loses no event.
    """

    def __init__(
        self,
        address: str,
        topics: Iterable[bytes],
        context: Context | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        self.address = address
        self.topics = tuple(topics)
        self._lent = context
        self._keys = keys
        self._open: tuple[Scope, Channel] | None = None

    async def __aenter__(self) -> Self:
        scope = Scope(self._lent)
        socket = scope.connect(sockets.subscriber, self.address, self.topics, self._keys)
        self._open = scope, Channel(socket, watched(socket, self.address, self._keys))
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
        """Return the next event that has arrived, or None; never waits."""
        while self._open is not None:
            frames = self._open[1].try_receive()
            if frames is None:
                return None
            if (event := _published(frames, self.topics)) is not None:
                return event
        return None


class BlockingSubscriber:
    """Subscriber for a thread without an event loop."""

    def __init__(
        self,
        address: str,
        topics: Iterable[bytes],
        context: Context | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        self.topics = tuple(topics)
        self._scope = Scope(context)
        self._socket = self._scope.connect(sockets.subscriber, address, self.topics, keys)
        self._handshakes = watched(self._socket, address, keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def poll(self, timeout_s: float) -> Published | None:
        """Wait for the next event; None after `timeout_s`."""
        if self._socket.closed:
            raise ClosedError
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            if self._handshakes is not None:
                self._handshakes.look(time.monotonic())
            slice_s = left_s if self._handshakes is None else min(left_s, LOOK_S)
            if not self._socket.poll(max(0, round(slice_s * 1e3))):
                if slice_s < left_s:
                    continue
                return None
            event = _published(self._socket.recv_multipart(zmq.NOBLOCK), self.topics)
            if event is not None:
                return event

    def close(self) -> None:
        """Stop listening. May be called twice."""
        _close(self._socket, self._handshakes)
        self._scope.end()


class Publisher:
    """Publishes events through the broker, which forwards `telemetry.*`, `policy` and `step`. Drops instead of
    blocking.

    The address is that of the broker's `publish`. For one thread at a time.
    """

    def __init__(self, address: str, context: Context | None = None, keys: CurveKeys | None = None) -> None:
        self._scope = Scope(context)
        self._socket = self._scope.connect(sockets.publisher, address, keys)
        self._handshakes = watched(self._socket, address, keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, topic: bytes, message: Message) -> None:
        """Send one event to the current subscribers."""
        if self._socket.closed:
            raise ClosedError
        if self._handshakes is not None:
            self._handshakes.look(time.monotonic())
        self._socket.send_multipart([topic, codec.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; the last events have half a second to leave. May be called twice."""
        _close(self._socket, self._handshakes)
        self._scope.end()


class RunPublisher:
    """Publishes events of a process through the broker of its run, by the way of now. For one thread.

    `follow`, and the first `publish`, connect. What is published before a connection stands is dropped, so call
    `follow` some time before the first event.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._route = Route(layout, lambda endpoints: endpoints.publish)
        self._publisher: Publisher | None = None
        self._throttle = LogThrottle()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, which may still be under way."""
        return self._publisher is not None

    def follow(self) -> None:
        """Connect by another way if there is one; the old connection stays until then. Does not block.

        A want of descriptors is logged, and the next call tries again.

        Raises:
            OSError: This user may not read the run directory.
            ConfigError: The broker's address is none.
        """
        try:
            self._follow()
        except (OSError, zmq.ZMQError) as error:
            if not is_short(error):
                raise
            if self._throttle.is_due(str(error), time.monotonic()):
                logger.warning("broker not looked for error=%s", error)

    def publish(self, topic: bytes, message: Message) -> None:
        """Publish an event, or drop it while there is no broker; raises what `follow` raises."""
        self.follow()
        if self._publisher is not None:
            self._publisher.publish(topic, message)

    def close(self) -> None:
        """Close the connection; the last events have half a second to leave. May be called twice."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _follow(self) -> None:
        if (way := self._route.other()) is None:
            return
        fresh = Publisher(way.address, keys=way.keys)
        self.close()
        self._route.taken, self._publisher = way, fresh
