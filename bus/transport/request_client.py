"""The request client: requests to the broker and their replies.

A request carries a correlation frame, which the broker echoes. The client repeats a request without an answer, because
a dying broker loses it; every request of the protocol is repeatable. The first reply counts, later ones with the same
correlation frame are dropped. Only this module turns an `ErrorReply` into an exception.

The pauses between repetitions double. A fleet that repeats at a fixed pace keeps an overloaded broker overloaded: it
then answers requests that were given up. So a client waits at most twice as long as the broker is silent.
"""

import asyncio
import math
import struct
import time
from collections.abc import Awaitable
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

import zmq

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport.keys.bundle import CurveKeys
from rolloutmq.bus.transport.keys.handshakes import watched
from rolloutmq.bus.transport.sockets import Channel, Context, Scope, client_dealer
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ClosedError,
    ConsumerFencedError,
    KeyRefusedError,
    LeaseLostError,
    MalformedError,
    RefusedError,
    SessionFencedError,
)
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import ErrorReply, Reply
from rolloutmq.schemas.wire.requests import Request

TIMEOUT_S: Final = 10.0
"""Default time limit of a request."""
RESEND_S: Final = 1.0
"""Default pause before an unanswered request is sent again."""

RESEND_MAX_S: Final = 6.0
"""Longest such pause; shorter than the broker's `silence_s`."""
PATIENCE_MAX_S: Final = 30.0
"""Most that `BrokerClient.patience_s` becomes."""
LOOK_S: Final = 0.25
"""Time between two looks at the handshakes of a blocking client that waits for a connection."""

CLOCK_S: Final = 0.001
"""A timer of a loop may be early by this."""

Frames = list[memoryview]
"""Payload frames of a reply, as views of the received memory, which they keep alive."""
_Answer = tuple[Reply, Frames]


class _Waiting:
    """A request under way."""

    __slots__ = ("answer", "until")

    def __init__(self, answer: "asyncio.Future[list[zmq.Frame] | None]") -> None:
        self.answer = answer
        """Frames of the answer; None only ends the wait."""
        self.until = math.inf
        """When the wait ends in vain, in monotonic seconds."""


class BrokerClient:
    """Request client for an event loop, for any number of concurrent requests.

    Use it as `async with BrokerClient(address) as client`. Without a context the client creates its own.
    """

    def __init__(self, address: str, context: Context | None = None, keys: CurveKeys | None = None) -> None:
        self.address = address
        self.keys = keys
        """Keys of the socket, and of further sockets to the same broker."""
        self._lent = context
        self._numbers = count(1)
        self._waiting: dict[bytes, _Waiting] = {}
        """Requests under way, by number."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends waits in vain. One for all of them, so that an answer has none to cancel."""
        self._looks_at = math.inf
        self.patience_s = 0.0
        """Twice the time that the last answer took beyond the first pause, or that the last request without one waited.

        It counts from when the request left. The first pause of one that waits at the broker, such as a pull, is longer
        than that wait.
        """
        self._open: tuple[Scope, Channel] | None = None

    async def __aenter__(self) -> Self:
        scope = Scope(self._lent)
        socket = scope.connect(client_dealer, self.address, self.keys)
        channel = Channel(socket, watched(socket, self.address, self.keys))
        channel.on_message(self._take)
        self._open = scope, channel
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def problem(self) -> str:
        """What the last handshake with the broker failed for; empty if it did not."""
        return self._open[1].problem if self._open is not None else ""

    @property
    def is_connected(self) -> bool:
        """Whether a request would leave now: none does before a handshake is over."""
        return self._open is not None and self._open[1].is_writable

    async def close(self) -> None:
        """Close the socket; waiting requests raise ClosedError. May be called twice."""
        if self._open is None:
            return
        scope, channel = self._open
        self._open = None
        self._look_at(math.inf)
        for waiting in self._waiting.values():
            _end(waiting.answer, None)
        channel.close()
        scope.end()

    async def request(
        self, message: Request, timeout_s: float = TIMEOUT_S, resend_s: float = RESEND_S
    ) -> Reply:
        """Send a request and wait for the reply.

        Args:
            message: The request; it must be repeatable.
            timeout_s: Time limit in seconds, repetitions included.
            resend_s: First pause before the request is sent again, in seconds; it doubles up to `RESEND_MAX_S`.

        Raises:
            BrokerUnavailableError: There was no answer in time.
            SessionFencedError, ConsumerFencedError, LeaseLostError, RefusedError: The broker refused the request.
            ClosedError: The client is closed.
        """
        return (await self.request_frames(message, timeout_s, resend_s))[0]

    async def request_frames(
        self, message: Request, timeout_s: float = TIMEOUT_S, resend_s: float = RESEND_S
    ) -> _Answer:
        """Like `request`, with the payload frames that follow a `Batch` or a `LatestExampleReply`."""
        number = struct.pack(">Q", next(self._numbers))
        asked = [number, b"", codec.encode(message)]
        try:
            reply, frames = _decoded(await self._asked(asked, timeout_s, resend_s))
        finally:
            self._waiting.pop(number, None)
        return granted(reply, message), frames

    async def _asked(self, frames: list[bytes], timeout_s: float, resend_s: float) -> list[zmq.Frame]:
        now = time.monotonic()
        until, slow_from = now + timeout_s, math.inf
        answer = self._expect(frames[0])
        while not answer.done() and now < until:
            if self._open is None:
                raise ClosedError
            channel = self._open[1]
            patience_s = min(until - now, resend_s)
            if not channel.try_send(frames):
                await _for_at_most(channel.ready(zmq.POLLOUT), patience_s)
            else:
                slow_from = min(slow_from, now + resend_s)
                resend_s = longer_resend_s(resend_s)
                self._end_by(frames[0], now + patience_s)
                if (received := await answer) is not None:
                    self.patience_s = min(2 * max(0.0, time.monotonic() - slow_from), PATIENCE_MAX_S)
                    return received
                answer = self._expect(frames[0])
            now = time.monotonic()
        if answer.done() and (received := answer.result()) is not None:
            return received
        if self._open is None:
            raise ClosedError
        if slow_from < math.inf:
            self.patience_s = max(self.patience_s, min(2 * timeout_s, PATIENCE_MAX_S))
        raise unavailable(self.address, timeout_s, self.problem)

    def _expect(self, number: bytes) -> "asyncio.Future[list[zmq.Frame] | None]":
        """Return the future of the answer with this number; after a wait in vain it needs another one."""
        answer: asyncio.Future[list[zmq.Frame] | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(answer)
        return answer

    def _end_by(self, number: bytes, until: float) -> None:
        """Let the wait for an answer end in vain at that time."""
        self._waiting[number].until = until
        if until < self._looks_at:
            self._look_at(until)

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._looks_at = moment
        if moment < math.inf:
            pause_s = moment - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, pause_s), self._end_late)

    def _end_late(self) -> None:
        now = time.monotonic() + CLOCK_S
        for waiting in self._waiting.values():
            if waiting.until <= now:
                _end(waiting.answer, None)
        self._look_at(min((one.until for one in self._waiting.values() if one.until > now), default=math.inf))

    def _take(self, frames: list[zmq.Frame]) -> None:
        if (waiting := self._waiting.get(frames[0].bytes)) is not None:
            _end(waiting.answer, frames[1:])


def _end(answer: "asyncio.Future[list[zmq.Frame] | None]", frames: list[zmq.Frame] | None) -> None:
    if not answer.done():
        answer.set_result(frames)


class BlockingClient:
    """Request client for a thread without an event loop, one request at a time: for the command line and views."""

    def __init__(self, address: str, context: Context | None = None, keys: CurveKeys | None = None) -> None:
        self.address = address
        self._numbers = count(1)
        self._scope = Scope(context)
        self._socket = self._scope.connect(client_dealer, address, keys)
        self._handshakes = watched(self._socket, address, keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. May be called twice."""
        if self._handshakes is not None and not self._socket.closed:
            self._handshakes.close()
        self._socket.close()
        self._scope.end()

    def request(self, message: Request, timeout_s: float = TIMEOUT_S, resend_s: float = RESEND_S) -> Reply:
        """Send a request and block until the reply; raise what `BrokerClient.request` raises."""
        return self.request_frames(message, timeout_s, resend_s)[0]

    def request_frames(
        self, message: Request, timeout_s: float = TIMEOUT_S, resend_s: float = RESEND_S
    ) -> _Answer:
        """Like `request`, with the payload frames that follow the reply."""
        if self._socket.closed:
            raise ClosedError
        number = struct.pack(">Q", next(self._numbers))
        asked = [number, b"", codec.encode(message)]
        started = time.monotonic()
        while (left := timeout_s - (time.monotonic() - started)) > 0:
            patience_s = min(left, resend_s)
            if self._handshakes is not None:
                self._handshakes.look(time.monotonic())
                patience_s = min(patience_s, LOOK_S)
            if not self._socket.poll(int(patience_s * 1e3) + 1, zmq.POLLOUT):
                continue
            patience_s = min(left, resend_s)
            resend_s = longer_resend_s(resend_s)
            with suppress(zmq.Again):  # the connection was lost meanwhile and will return
                self._socket.send_multipart(asked, zmq.NOBLOCK)
            answer = self._await(number, patience_s)
            if answer is not None:
                return granted(answer[0], message), answer[1]
        if self._handshakes is not None:
            self._handshakes.look(time.monotonic())
            raise unavailable(self.address, timeout_s, self._handshakes.problem)
        raise BrokerUnavailableError(self.address, timeout_s)

    def _await(self, number: bytes, patience_s: float) -> _Answer | None:
        until = time.monotonic() + patience_s
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(int(left * 1e3) + 1):
                continue
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if frames[0].bytes == number:
                return _decoded(frames[1:])
        return None


def longer_resend_s(resend_s: float) -> float:
    """Return the pause after the next repetition; a caller that asks for a longer one keeps it."""
    return max(resend_s, min(2 * resend_s, RESEND_MAX_S))


def unavailable(address: str, waited_s: float, problem: str) -> BrokerUnavailableError:
    """Return the error of a request without an answer; `problem` is that of the handshake, or empty."""
    return (
        KeyRefusedError(address, waited_s, problem) if problem else BrokerUnavailableError(address, waited_s)
    )


def granted(reply: Reply, request: Request) -> Reply:
    """Return the reply; raise the exception of an `ErrorReply`."""
    if not isinstance(reply, ErrorReply):
        return reply
    if reply.code is ErrorCode.FENCED and (consumer := getattr(request, "consumer", "")):
        raise ConsumerFencedError(consumer)
    if reply.code is ErrorCode.FENCED:
        raise SessionFencedError(getattr(request, "producer", reply.detail), getattr(request, "session", 0))
    if reply.code is ErrorCode.LEASE_LOST:
        raise LeaseLostError(getattr(request, "lease", 0), reply.detail)
    raise RefusedError(reply.code, reply.detail)


def _decoded(frames: list[zmq.Frame]) -> _Answer:
    if len(frames) < 2 or len(frames[0]):
        raise MalformedError(f"reply: the empty delimiter frame is missing (got {len(frames)} frames)")
    return codec.decode_reply(frames[1].bytes), [frame.buffer for frame in frames[2:]]


async def _for_at_most(wait: Awaitable[Any], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await wait
    except TimeoutError:
        return
